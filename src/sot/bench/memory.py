"""How many bytes a forward and backward pass holds at its peak, and between the two."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sot.models.complexity import saved_bytes, storage_address


@dataclass(frozen=True)
class Memory:
    """Bytes beyond inputs and parameters: the peak of forward and backward, and what is saved between them."""

    peak: int
    saved: int


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that operations make until it is freed; `peak` is the most that lived at once."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.seen = {storage_address(tensor) for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self.seen:
            return
        self.seen.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self.seen.discard(address)
        self.live -= size


def measure_memory(function: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> Memory:
    """Memory of `function()` and its gradients with respect to the inputs; all tensors it uses are in `inputs`."""
    known = [*inputs, grad]
    saved = saved_bytes(function, known)
    tracker = LiveBytes(known)
    with tracker:
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        torch.autograd.grad(function(), wanted, grad)
    return Memory(tracker.peak, saved)
