"""When layers may be computed in another way than by calling them one after another with the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

KNOWN = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d, nn.AvgPool2d)


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody waits for the module to be called, or for its gradient."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def is_watched(modules: Iterable[nn.Module]) -> bool:
    """Whether a tracer records the calls of these modules or a hook waits for one."""
    if torch.jit.is_tracing() or torch.compiler.is_compiling():  # type: ignore[no-untyped-call]
        return True
    return any(map(is_hooked, modules))


def on_cpu(x: Tensor) -> bool:
    """On a CPU, where the maps of a large batch do not stay in cache; or on the meta device, which counts for it."""
    return x.device.type in ("cpu", "meta")


def can_train_by_hand(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """On a CPU in full precision, if the layers are torch's own and batch norms use the statistics of the batch."""
    if is_watched(layers) or not on_cpu(x) or torch.is_autocast_enabled("cpu"):
        return False
    if x.dtype not in (torch.float32, torch.float64) or x[:, 0].numel() < 2:
        return False
    return all(type(layer) in KNOWN and trains_as_usual(layer) for layer in layers)


def trains_as_usual(layer: nn.Module) -> bool:
    """Whether a batch norm normalises by its batch, tracks it with a fixed momentum, and has a scale and a shift."""
    if not isinstance(layer, nn.BatchNorm2d):
        return True
    return layer.training and layer.track_running_stats and layer.momentum is not None and layer.affine
