"""The faster ways through a model: nothing takes them until somebody asks."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

logger = logging.getLogger("sot")
Model = TypeVar("Model", bound=nn.Module)
OWN = ("torch.nn.modules.", "sot.")  # where layers are defined that do what their weights say


def accelerate(model: Model, on: bool = True) -> Model:
    """Return the same model, set to compute faster; `on=False` undoes it.

    Sets the attribute `accelerated` of every module that has one: token embeddings, dense blocks and transitions,
    poolings and heads. Weights, their names and the results stay the same, up to rounding. What changes:

    - Layers *inside* of these modules are no longer called one by one. Hooks that you put on them later do not fire,
      and adapters or other layers that you put in their place later are not seen. So call this last.
    - A module stays as it is if a layer inside has a hook, a parametrization or quantized weights, or is neither
      torch's nor ours.
    - On a CPU, batches pass an embedding in pieces, and dense blocks train with a backward pass of their own,
      which has no second derivative.

    Exporters still see every layer of an embedding called. Compilers see operators: in eval mode the stem alone.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate takes a torch module, got {type(model).__name__}")
    parts: list[Any] = [module for module in model.modules() if hasattr(type(module), "accelerated")]
    for part in parts:
        part.accelerated = on and has_plain_layers(part)
    fast, name = sum(part.accelerated for part in parts), type(model).__name__
    logger.debug("%d of %d modules of %s that know a faster way take it", fast, len(parts), name)
    return model


def has_plain_layers(module: nn.Module) -> bool:
    """Whether all layers inside are torch's or ours, without hooks, parametrizations and weights of other types."""
    for layer in islice(module.modules(), 1, None):
        hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
        if any(hooks) or not type(layer).__module__.startswith(OWN):  # a parametrization makes a class of its own
            return False
    return all(type(weight) is nn.Parameter for weight in module.parameters())  # not quantized or sharded


def computes_by_hand(x: Tensor) -> bool:
    """Whether an accelerated module may leave torch's layers: on a CPU, in full precision, not for an exporter."""
    if torch.compiler.is_exporting() or torch.is_autocast_enabled("cpu"):
        return False
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
