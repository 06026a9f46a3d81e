"""In what type the matrices are computed, and by whom: torch here and now, or a compiler later."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def autocast_off(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context in which matrix products keep the type of their operands."""
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor itself, or its float32 copy when it is float16 or bfloat16."""
    if tensor.dtype == torch.float16 or tensor.dtype == torch.bfloat16:
        return tensor.float()
    return tensor


def is_eager() -> bool:
    """Whether torch runs each operation as it comes; tracers, compilers and `torch.func` want plain operations."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[no-untyped-call]
        return False
    return not torch._C._are_functorch_transforms_active()


def is_observed() -> bool:
    """Whether somebody counts or fakes torch's operations, who would not see ours."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_exporting() -> bool:
    """Whether torch.export or an ONNX exporter writes down the operations, for runtimes that know the common ones."""
    return torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody waits for the module to be called, or for its gradient."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
