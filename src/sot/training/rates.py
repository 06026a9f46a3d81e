"""Rates of a recipe: at every step, and of every weight."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from timm.optim import param_groups_layer_decay
from torch import nn
from transformers import PreTrainedModel

from sot.training.recipe import Recipe


def learning_rate_factor(recipe: Recipe, steps_per_epoch: float) -> Callable[[int], float]:
    """Factor of the base rate at each step: linear warm-up, then cosine, linear or constant, then the final rate."""
    warmup = recipe.warmup_epochs * steps_per_epoch
    total = recipe.epochs * steps_per_epoch
    first, last = recipe.warmup_lr / recipe.lr, recipe.min_lr / recipe.lr

    def factor(step: int) -> float:
        if step < warmup:
            return first + (1 - first) * step / warmup
        progress = min(1.0, (step - warmup) / max(1.0, total - warmup))
        if recipe.schedule == "constant":
            return 1.0
        shape = 1 - progress if recipe.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return last + (1 - last) * shape

    return factor


def parameter_groups(model: Any, recipe: Recipe) -> list[dict[str, Any]]:
    """Groups with their own rate and decay: matrices decay, vectors and what the backbone names do not."""
    backbone = getattr(model.backbone, "timm_model", model.backbone)
    exempt = set(backbone.no_weight_decay()) if hasattr(backbone, "no_weight_decay") else set()
    prefix = "backbone.timm_model." if backbone is not model.backbone else "backbone."
    scales = _layer_scales(backbone, recipe.layer_decay)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        inner = name.removeprefix(prefix)
        decays = parameter.ndim > 1 and inner not in exempt
        scale = recipe.head_lr_multiplier if name.startswith("classifier.") else scales.get(inner, 1.0)
        key = (recipe.weight_decay if decays else 0.0, recipe.lr * scale)
        group = groups.setdefault(key, {"params": [], "weight_decay": key[0], "lr": key[1]})
        group["params"].append(parameter)
    return list(groups.values())


def _layer_scales(backbone: nn.Module, decay: float) -> dict[str, float]:
    if decay == 1.0:
        return {}
    if isinstance(backbone, PreTrainedModel):
        return _numbered_scales(backbone, decay)
    names = {id(parameter): name for name, parameter in backbone.named_parameters()}
    groups = param_groups_layer_decay(backbone, layer_decay=decay)
    return {names[id(p)]: float(group["lr_scale"]) for group in groups for p in group["params"]}


def _numbered_scales(backbone: nn.Module, decay: float) -> dict[str, float]:
    """By the first number in a name of Hugging Face's: embeddings come before all layers, what is left after them."""
    names = [name for name, _ in backbone.named_parameters()]
    layers = {name: int(found[1]) + 1 for name in names if (found := re.search(r"\.(\d+)\.", name))}
    if not layers:
        raise ValueError(f"layer_decay must be 1 for {type(backbone).__name__}, which has no layers, got {decay}")
    first, top = names.index(next(iter(layers))), max(layers.values()) + 1
    rest = {name: 0 if index < first or "emb" in name else top for index, name in enumerate(names)}
    return {name: decay ** (top - layer) for name, layer in {**rest, **layers}.items()}
