"""What a training starts from: a file of weights, a model that sot trained; and what of it is trained."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sot.core.head import HeadConfig
from sot.errors import SettingError
from sot.extras import need
from sot.files import one_line
from sot.models.folder import load_model
from sot.models.modeling import labels_of
from sot.training.recipe import Recipe

logger = logging.getLogger("sot")
PREFIXES = ("", "model.", "module.", "encoder.", "backbone.", "backbone.timm_model.")  # that files put before names


def continue_from(folder: str, labels: Sequence[str], head: HeadConfig | None, settings: dict[str, Any]) -> Any:
    """A trained model with its processor; its head is a new one where the classes or the head are others.

    `settings` go into its configuration.
    """
    model, processor = load_model(Path(folder))
    wanted = (head or HeadConfig(fusion="class")).to_dict()
    wanted["pre_norm"] = (model.config.head or {}).get("pre_norm") if wanted["pre_norm"] is None else wanted["pre_norm"]
    same = HeadConfig.from_saved(model.config.head).to_dict() == wanted
    if labels_of(model) != list(labels) or not same:
        logger.warning("The head of %s has other classes or settings: a new one is trained.", folder)
        config = type(model.config).from_dict(model.config.to_dict())
        config.id2label, config.label2id = dict(enumerate(labels)), {name: i for i, name in enumerate(labels)}
        config.head = wanted
        renewed = type(model)(config)
        renewed.backbone.load_state_dict(model.backbone.state_dict())
        model = renewed
    for name, value in settings.items():
        setattr(model.config, name, value)
    model.processor = processor
    return model.train()


def load_weights(model: Any, file: Path) -> None:
    """Read the weights of a backbone, or of a whole model, from a file of safetensors or of torch."""
    target, named = max(_readings(model, _read_weights(file)), key=lambda reading: len(_fitting(*reading)))
    fitting = _fitting(target, named)
    if not fitting:
        raise SettingError("{weights} {} holds no weight of {} by name and shape", file, type(model.body).__name__)
    wanted = [name for name in target.state_dict() if not name.startswith("classifier.")]
    missing = [name for name in wanted if name not in fitting]
    if missing:
        there = f"of shape {tuple(named[missing[0]].shape)} there" if missing[0] in named else "which is not there"
        first = f"{missing[0]} of shape {tuple(target.state_dict()[missing[0]].shape)}, {there}"
        said = "{weights} {} lacks {} of {} weights of {}, first {}"
        raise SettingError(said, file, len(missing), len(wanted), type(model.body).__name__, first)
    target.load_state_dict(fitting, strict=False)


def _readings(model: Any, found: dict[str, Tensor]) -> Iterator[tuple[Any, dict[str, Tensor]]]:
    """What the file may be of, the whole model or its backbone, with the names that it then means."""
    own = f"{getattr(model.body, 'base_model_prefix', '')}."
    for prefix in (*PREFIXES, own):
        named = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
        yield model, named
        yield model.body, _as_timm_names(model.body, named)


def _fitting(target: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
    shapes = {name: value.shape for name, value in target.state_dict().items()}
    return {name: value for name, value in named.items() if shapes.get(name) == value.shape}


def _read_weights(file: Path) -> dict[str, Tensor]:
    try:
        found = timm.models.load_state_dict(str(file), weights_only=True)
    except FileNotFoundError:
        raise SettingError("{weights}: no such file: {}", file) from None
    except Exception as error:  # torch raises nearly anything of a file that is not its own
        said = "{weights} {} must be a file of safetensors, or of torch that holds weights alone: {}"
        raise SettingError(said, file, one_line(error)) from error
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _as_timm_names(body: Any, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other names and sizes of a timm model's weights in its own, where timm knows how: positions are interpolated."""
    convert = getattr(sys.modules[type(body).__module__], "checkpoint_filter_fn", None)
    if convert is None or not hasattr(body, "pretrained_cfg"):
        return found
    try:
        return dict(convert(dict(found), body))
    except (KeyError, RuntimeError, ValueError, AttributeError):  # of weights under other names
        return found


def prepare(model: Any, recipe: Recipe, weights: Path | None, numbers: Sequence[int] | None) -> None:
    """Read the weights of a file, weigh the classes by their samples, and choose what is trained."""
    if weights is not None:
        load_weights(model, weights)
    if recipe.balance:
        model.classifier.class_weights = _class_weights(numbers, len(labels_of(model)), model.config.problem)
    if recipe.freeze:
        model.backbone.requires_grad_(False)
    if recipe.lora:
        add_adapters(model, recipe.lora)


def _class_weights(numbers: Sequence[int] | None, classes: int, problem: str) -> Tensor:
    """Inverse to the samples of each class, one on average over samples."""
    if numbers is None or problem != "single_label_classification":
        raise SettingError("{balance} needs one class for each sample, all of them known before training")
    counts = np.maximum(1, np.bincount(np.asarray(numbers, dtype=int), minlength=classes))
    return torch.tensor(len(numbers) / (classes * counts), dtype=torch.float32)


# --- low-rank adapters (LoRA, by peft): trained in place of the backbone, merged into its weights when saved


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
