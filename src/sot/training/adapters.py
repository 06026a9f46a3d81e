"""Low-rank adapters of a backbone (LoRA, by peft): trained in its place, merged into its weights when saved."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sot.extras import need


def add_adapters(model: Any, rank: int) -> None:
    """Freeze the backbone, and give each of its linear layers an adapter of this rank."""
    need("peft", f"lora={rank}", "lora")
    from peft import LoraConfig, inject_adapter_in_model

    fused = [f"{name}." for name, part in model.backbone.named_modules() if _is_fused(part)]
    names = [name for name, layer in model.backbone.named_modules() if isinstance(layer, nn.Linear | Conv1D)]
    names = [name for name in names if not name.startswith(tuple(fused))]  # which never calls its layers
    if not names:
        raise ValueError(f"lora={rank} needs linear layers, and {type(model.body).__name__} has none")
    model.backbone.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names), model.backbone)


def _is_fused(part: nn.Module) -> bool:
    """Whether torch computes an attention from the weights of its layers; WavLM's is a module of its own."""
    return isinstance(part, nn.MultiheadAttention) or hasattr(part, "torch_multi_head_self_attention")


def merge_adapters(model: Any, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The model and its weights without adapters: a copy where there are any, in which they are merged."""
    if not any("lora_A" in name for name in weights):
        return model, weights
    from peft.tuners.lora import LoraLayer

    merged = deepcopy(model)
    merged.load_state_dict(weights)
    for name, layer in list(merged.backbone.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge()
            above, _, last = name.rpartition(".")
            setattr(merged.backbone.get_submodule(above), last, layer.get_base_layer())
    return merged, merged.state_dict()
