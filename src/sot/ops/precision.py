"""In what type the matrices are computed, whatever the autocast state."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def is_autocast(tensor: Tensor) -> bool:
    """Whether products with the tensor would be computed in another type."""
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def autocast_off(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context in which matrix products keep the type of their operands."""
    return torch.autocast(tensor.device.type, enabled=False) if is_autocast(tensor) else nullcontext()


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor itself, or its float32 copy when it is float16 or bfloat16."""
    if tensor.dtype == torch.float16 or tensor.dtype == torch.bfloat16:
        return tensor.float()
    return tensor
