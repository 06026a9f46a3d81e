"""What lies between torch's tensors and the kernels: flat arrays, and threads that share the work."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def on_threads(run: Callable[[tuple[int, int]], Result], items: int, least: int = 4) -> list[Result]:
    """Call with ranges of items, one for each thread that torch may use: the kernels let go of the interpreter.

    What the calls return comes back in the order of the items. Fewer than `least` items are done before another thread
    has started.
    """
    threads = min(torch.get_num_threads(), items // least)
    if threads < 2:
        return [run((0, items))]
    bounds = [items * k // threads for k in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, itertools.pairwise(bounds)))


def array(tensor: Tensor) -> Any:
    """The tensor as numba takes it."""
    return tensor.detach().numpy()


def flat(tensor: Tensor) -> Any:
    """The numbers of a contiguous tensor as one array."""
    return tensor.detach().flatten().numpy()


def storage(tensor: Tensor) -> Any:
    """All that lies between the first number of a tensor and its last, as one array."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.detach().as_strided((last + 1,), (1,)).numpy()
