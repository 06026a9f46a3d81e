"""Weights laid out like the authors' code, renamed to ours."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from sot.core.head import HeadConfig
from sot.files import write_atomically
from sot.models.vision import SecondOrderTransformer, sinusoid_positions

# Theirs, ours: the first pattern that matches renames the whole key.
RENAMES = (
    (r"visual_tokens\.tokens\.stem\.0\.(.+)", r"patch_embed.proj.stem.0.\1"),
    (r"visual_tokens\.tokens\.stage\.(.+)", r"patch_embed.proj.stages.\1"),
    (r"visual_tokens\.tokens\.transition\.(.+)", r"patch_embed.proj.out.\1"),
    (r"visual_tokens\.tokens\.proj\.(.+)", r"patch_embed.proj.\1"),
    (r"(cls_token|norm\..+|blocks\..+)", r"\1"),
    (r"classifier\.representation\.wr\.weight", r"head.pool.projection.weight"),
    (r"classifier\.representation\.norm\.factor", r"head.pool.norm.log_scale"),
    (r"classifier\.representation\.norm\.(.+)", r"head.pool.norm.\1"),
    (r"classifier\.dr\.(.+)", r"head.pool.projection.\1"),
    (r"classifier\.dim\.(.+)", r"head.widen.\1"),
    (r"classifier\.visual_fc\.(.+)", r"head.word_linear.\1"),
    (r"classifier\.cls_fc\.(.+)", r"head.class_linear.\1"),
)


ARCHITECTURES = {(256, 7): "sot_7", (240, 12): "sot_tiny", (384, 14): "sot_small", (528, 24): "sot_base"}
NO_WEIGHTS = "{} holds no plain weights; accepted: safetensors, or tensors by name by torch.save"


@dataclass
class Conversion:
    """`state` in our layout; `used` maps their keys to ours; `unused` maps the others to the reason."""

    state: dict[str, Tensor] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)


def convert_state_dict(official: Mapping[str, Tensor], fusion: str = "sum") -> Conversion:
    """Rename every key of a state dict of the authors' code and say what became of it.

    The keys alone do not tell `sum`, `late` and `aggr_all` apart, so the fusion has to be named.
    """
    result = Conversion()
    idle_class_layer = fusion in ("concat", "aggr_all")
    for key, value in official.items():
        name = _rename(key)
        if key == "pos_embed":  # a parameter that is never trained: ours is computed
            same = torch.allclose(value, sinusoid_positions(value.shape[1], value.shape[2]).to(value), atol=1e-4)
            result.unused[key] = "computed here, equal" if same else "computed here, DIFFERENT from this table"
        elif name is None:
            result.unused[key] = "no counterpart"
        elif name.startswith("head.class_linear.") and idle_class_layer:
            result.unused[key] = f"never read by fusion {fusion}"
        else:
            if name == "head.pool.norm.weight" and "classifier.representation.norm.bias" not in official:
                name = "head.pool.norm.start"  # of the fast normalisation; LayerNorm has a bias as well
            result.state[name] = _log_of_positive(value) if name.endswith("log_scale") else value
            result.used[key] = name
    if "classifier.dr.weight" in official:
        positions = official.get("pos_embed")
        words = 196 if positions is None else positions.shape[1] - 1
        _rescale_covariance(result.state, words + (fusion == "aggr_all"))
    return result


def _log_of_positive(factor: Tensor) -> Tensor:
    if factor <= 0:
        raise ValueError(f"the learned scale must be positive to be converted, got {factor.item()}")
    return factor.log()


def _rescale_covariance(state: dict[str, Tensor], num_tokens: int) -> None:
    """Their GCP divides by the number of channels instead of tokens: put the root of the ratio into the next layer."""
    channels = state["head.pool.projection.weight"].shape[0]
    weight = state["head.word_linear.weight"].clone()
    weight[:, -channels * (channels + 1) // 2 :] *= (num_tokens / channels) ** 0.5
    state["head.word_linear.weight"] = weight


def _rename(key: str) -> str | None:
    for theirs, ours in RENAMES:
        match = re.fullmatch(theirs, key)
        if match:
            return match.expand(ours)
    return None


def infer_model(state: Mapping[str, Tensor], fusion: str = "sum") -> tuple[str, dict[str, object]]:
    """Name and arguments for `timm.create_model` of the model that a converted state dict belongs to."""
    if "cls_token" not in state:
        raise ValueError("not a state dict of the authors' code: it has no cls_token")
    depth = len({key.split(".")[1] for key in state if key.startswith("blocks.")})
    width = state["cls_token"].shape[-1]
    if (width, depth) not in ARCHITECTURES:
        accepted = ", ".join(f"{w}×{d}" for w, d in ARCHITECTURES)
        raise ValueError(f"no SoT model has width×depth {width}×{depth}; accepted: {accepted}")
    head = _infer_head(state, fusion)
    linear = "head.class_linear.weight" if head.fusion == "class" else "head.word_linear.weight"
    marks = {"densenet": "denselayer", "inception": "branch0", "nonlocal": "theta", "resnet": "bn3"}
    embed = next((kind for kind, mark in marks.items() if any(mark in key for key in state)), "naive")
    arguments = {"embed": embed, "head": head.to_dict(), "num_classes": state[linear].shape[0]}
    return ARCHITECTURES[width, depth], arguments


def _infer_head(state: Mapping[str, Tensor], fusion: str) -> HeadConfig:
    if "head.word_linear.weight" not in state:
        wide = state.get("head.widen.weight")
        return HeadConfig(fusion="class", class_width=None if wide is None else wide.shape[0])
    width = state["cls_token"].shape[-1]
    pooled = state["head.word_linear.weight"].shape[1] - (width if fusion == "concat" else 0)
    projection = state.get("head.pool.projection.weight")
    if projection is None:
        return HeadConfig(fusion=fusion, pool="gap")
    if "head.pool.projection.bias" in state:
        return HeadConfig(fusion=fusion, pool="gcp", reduced_dim=projection.shape[0], num_iterations=3)
    side = 2 * pooled // projection.shape[0]  # h m² over h m
    norms = {"start": "svpn_fast", "bias": "ln", "log_scale": "scale"}
    norm = next((name for key, name in norms.items() if f"head.pool.norm.{key}" in state), "none")
    return HeadConfig(fusion=fusion, heads=projection.shape[0] // (2 * side), left_dim=side, right_dim=side, norm=norm)


def convert(official: Mapping[str, Tensor], fusion: str = "sum") -> SecondOrderTransformer:
    """Our model with their weights; refused unless they fill every parameter and statistic of it."""
    return load_converted(convert_state_dict(official, fusion).state, fusion)


def load_converted(state: Mapping[str, Tensor], fusion: str = "sum") -> SecondOrderTransformer:
    """The model that a converted state dict belongs to, with its weights."""
    name, arguments = infer_model(state, fusion)
    model: SecondOrderTransformer = timm.create_model(name, **arguments)
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]
    if missing or unexpected:
        gaps = f"missing {missing or 'none'}, left over {unexpected or 'none'}"
        raise ValueError(f"the weights do not make a whole {name}: {gaps}")
    return model


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from a file, without running code from it; training checkpoints and DDP prefixes are unwrapped."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    if path.suffix == ".safetensors":
        state = load_file(path)
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # torch raises nearly anything of a file that is not its own
            raise ValueError(NO_WEIGHTS.format(path)) from None
    for wrapper in ("state_dict_ema", "state_dict", "model"):
        inner = state.get(wrapper) if isinstance(state, Mapping) else None
        state = inner if isinstance(inner, Mapping) and inner else state  # a checkpoint holds the state dict inside
    if not isinstance(state, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
    ):
        raise ValueError(NO_WEIGHTS.format(path))
    return {key.removeprefix("module."): value for key, value in state.items()}


def write_weights(model: SecondOrderTransformer, path: Path) -> None:
    """The weights as safetensors, with what `timm.create_model` needs as metadata; all of the file or none of it."""
    arguments = {"head": model.head_config.to_dict(), "embed": model.patch_embed.kind, "num_classes": model.num_classes}
    metadata = {"architecture": model.default_cfg["architecture"], "arguments": json.dumps(arguments), "format": "pt"}
    write_atomically(path, save({key: value.contiguous() for key, value in model.state_dict().items()}, metadata))
