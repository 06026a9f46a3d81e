"""What lies between torch's tensors and the kernels: flat arrays, and threads that share the work."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _find_team() -> Any:
    """`GOMP_parallel` of the OpenMP runtime that torch is linked to, or nothing where it has another one."""
    try:
        team = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    team.argtypes, team.restype = (Work, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return team


def _forget_team() -> None:
    global _team
    _team = None


_team = _find_team()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_team)  # a forked process has none of its threads, and would wait


def on_threads(run: Callable[[tuple[int, int]], Result], items: int, least: int = 4) -> list[Result]:
    """Call with ranges of items, one for each thread that torch may use: the kernels let go of the interpreter.

    What the calls return comes back in the order of the items. Fewer than `least` items are done before another thread
    has started. The threads are those of torch: after a product they spin for more work, and would keep others waiting.
    """
    threads = min(torch.get_num_threads(), items // least)
    if threads < 2:
        return [run((0, items))]
    bounds = [items * k // threads for k in range(threads + 1)]
    parts = list(itertools.pairwise(bounds))
    if _team is None:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(run, parts))
    return _in_team(run, parts)


def _in_team(run: Callable[[tuple[int, int]], Result], parts: list[tuple[int, int]]) -> list[Result]:
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    left = iter(enumerate(parts))  # whoever comes takes the next: there may be fewer threads than were asked for

    def work(_: Any) -> None:
        try:
            for number, part in left:
                results[number] = run(part)
        except BaseException as error:  # has to come out of the thread that asked
            errors.append(error)

    _team(Work(work), None, len(parts), 0)
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(parts))]


def array(tensor: Tensor) -> Any:
    """The tensor as numba takes it."""
    return (tensor.detach() if tensor.requires_grad else tensor).numpy()


def flat(tensor: Tensor) -> Any:
    """The numbers of a contiguous tensor as one array."""
    return tensor.detach().flatten().numpy()


def storage(tensor: Tensor) -> Any:
    """All that lies between the first number of a tensor and its last, as one array."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.detach().as_strided((last + 1 if tensor.numel() else 0,), (1,)).numpy()
