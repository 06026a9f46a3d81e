"""What `equip` has to know of a timm model: its arguments, its layout, its preprocessing."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import PatchEmbed, to_2tuple
from timm.models import load_model_config_from_hf
from torch import nn
from transformers import BitImageProcessor, PreTrainedModel, TimmWrapperModel

from sot.files import weights_of
from sot.models.configuration import check_depth
from sot.models.embedding.token_embed import replace_embedding
from sot.models.folder import folder_config
from sot.models.layout import Layout, find_layout
from sot.models.tokens import as_branches, timm_features
from sot.models.variants import ensure_registered


def is_timm(model: Any) -> bool:
    """Whether a model, name or folder is one of timm's."""
    if isinstance(model, nn.Module):
        return hasattr(model, "timm_model" if isinstance(model, PreTrainedModel) else "pretrained_cfg")
    name = str(model)
    if Path(name).is_dir():
        saved = folder_config(Path(name))
        ensure_registered(str(saved.get("architecture")))
        return "architecture" in saved
    ensure_registered(name)
    return timm.is_model(name) or name.startswith(("timm/", "hf-hub:", "hf_hub:", "local-dir:"))


def open_timm(model: Any, pretrained: bool, model_args: dict[str, Any]) -> tuple[Any, dict[str, Any], bool]:
    """The timm model itself, the arguments it is built with, and whether these had to be read off it."""
    folder = Path(model) if isinstance(model, str | Path) and Path(model).is_dir() else None
    if folder is not None and folder_config(folder).get("model_type"):
        with weights_of(folder):
            model = TimmWrapperModel.from_pretrained(folder)
    if isinstance(model, PreTrainedModel):
        return model.timm_model, {**(model.config.model_args or {}), **model_args}, False
    if isinstance(model, nn.Module):
        return (model, model_args, False) if model_args else (model, recover_arguments(model), True)
    name, model_args = timm_name(str(model), model_args)
    with nullcontext() if folder is None else weights_of(folder):
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **model_args), model_args, False


def timm_name(name: str, model_args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What timm calls a name, folder or hub name, and the arguments it builds the model with."""
    if Path(name).is_dir():
        return f"local-dir:{name}", {**(folder_config(Path(name)).get("model_args") or {}), **model_args}
    if timm.is_model(name):
        return name, model_args
    hub = f"hf-hub:{name}" if name.startswith("timm/") else name
    _, architecture, saved = load_model_config_from_hf(hub.split(":", 1)[1])
    ensure_registered(architecture)
    return hub, {**(saved or {}), **model_args}


def timm_layout(architecture: str, model_args: Mapping[str, Any], embed: str | None) -> Layout:
    """Where a timm model has its tokens, found on the meta device."""
    with torch.device("meta"):
        model = timm.create_model(architecture, num_classes=0, **model_args).eval()
    if embed is not None:
        replace_embedding(model, embed)
    size = timm.data.resolve_model_data_config(model)["input_size"]
    size = (model_args.get("in_chans", size[0]), *_image_size(model, model_args, size))

    def features() -> Any:
        return timm_features(model, torch.zeros(2, *size, device="meta"))

    return find_layout(model, features, getattr(model, "output_fmt", None), getattr(model, "num_prefix_tokens", None))


def _image_size(model: Any, model_args: Mapping[str, Any], default: tuple[int, int, int]) -> tuple[int, int]:
    known = getattr(getattr(model, "patch_embed", None), "img_size", None) or default[1:]
    height, width = to_2tuple(model_args.get("img_size") or known)
    return int(height), int(width)


def recover_arguments(model: Any) -> dict[str, Any]:
    """The arguments, beside its name, with which timm builds a model of the shapes of this instance."""
    architecture = model.pretrained_cfg.get("architecture")
    if not architecture or not timm.is_model(architecture):
        raise ValueError(f"{type(model).__name__} was not built by timm.create_model, so it could not be loaded again")
    with torch.device("meta"):
        plain = timm.create_model(architecture, num_classes=0)
        usual = read_arguments(plain)
        arguments = {name: value for name, value in read_arguments(model).items() if usual.get(name) != value}
        try:
            twin = timm.create_model(architecture, num_classes=0, **arguments) if arguments else plain
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise ValueError(_needs_arguments(architecture)) from error
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    same = all(shapes.get(name) == value.shape for name, value in twin.state_dict().items())
    if not same or _dropouts(model, "p", "drop_prob") != _dropouts(twin, "p", "drop_prob"):
        raise ValueError(_needs_arguments(architecture))
    return arguments


def _dropouts(model: Any, *attributes: str) -> dict[str, float]:
    """How much each module of the backbone drops while training, if anything; heads are not of the backbone."""
    rates = {
        name: getattr(module, attribute)
        for name, module in model.named_modules()
        for attribute in attributes
        if hasattr(module, attribute) and not name.startswith("head")
    }
    return {name: round(rate, 6) for name, rate in rates.items() if isinstance(rate, float) and rate > 0}


def with_depth(model: Any, model_args: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The arguments of a timm model with its first `depth` layers."""
    check_depth(depth, read_arguments(model).get("depth"), type(model).__name__)
    return {**model_args, "depth": depth}


def _needs_arguments(architecture: str) -> str:
    return f"this {architecture} was built with arguments that cannot be read off it: pass them as model_args={{...}}"


def read_arguments(model: Any) -> dict[str, Any]:
    """What can be read off a timm model of the arguments it was built with."""
    found = _embedding_arguments(model) | _block_arguments(model)
    found["pos_drop_rate"] = getattr(getattr(model, "pos_drop", None), "p", 0.0)
    found["drop_path_rate"] = max(_dropouts(model, "drop_prob").values(), default=0.0)  # it grows with the depth
    return {name: value for name, value in found.items() if value is not None}


def _embedding_arguments(model: Any) -> dict[str, Any]:
    """Sizes of images and patches, channels, and the tokens beside the words."""
    found = {name: getattr(model, name) for name in ("no_embed_class", "dynamic_img_size") if hasattr(model, name)}
    found["class_token"] = getattr(model, "has_class_token", None)
    found["reg_tokens"] = getattr(model, "num_reg_tokens", None)
    first_layer = model.pretrained_cfg.get("first_conv")
    if isinstance(first_layer, str) and first_layer in dict(model.named_modules()):
        found["in_chans"] = getattr(model.get_submodule(first_layer), "in_channels", None)
    embedding: Any = getattr(model, "patch_embed", None)
    if isinstance(embedding, PatchEmbed):
        found |= {"img_size": embedding.img_size, "patch_size": embedding.patch_size[0]}
    return found


def _block_arguments(model: Any) -> dict[str, Any]:
    """Depth, width and dropout of attention blocks, in stages or without; nothing where some stage has none."""
    stages = [stage for name in ("layers", "stages") for stage in _children(model, name)]
    blocks = [_children(stage, "blocks") for stage in stages] or [_children(model, "blocks")]
    if not all(stage and hasattr(stage[0], "attn") for stage in blocks):
        return {}
    first: list[Any] = [stage[0] for stage in blocks]
    heads, depths = tuple(getattr(block.attn, "num_heads", None) for block in first), tuple(map(len, blocks))
    if stages:
        found = {"depths": depths, "num_heads": heads, "embed_dim": getattr(model, "embed_dim", None)}
    else:
        found = {"depth": depths[0], "num_heads": heads[0], "embed_dim": model.num_features}
    if hasattr(getattr(first[0], "mlp", None), "fc1"):
        found["mlp_ratio"] = first[0].mlp.fc1.out_features / first[0].mlp.fc1.in_features
    for rate in ("proj_drop", "attn_drop"):
        found[f"{rate}_rate"] = getattr(getattr(first[0].attn, rate, None), "p", 0.0)
    return found


def _children(module: Any, name: str) -> list[Any]:
    found = getattr(module, name, None)
    return list(found) if isinstance(found, nn.Sequential | nn.ModuleList) else []


@torch.no_grad()
def check_twin(model: Any, twin: Any) -> None:
    """Same shapes are not yet the same function: compare features of both."""
    original = copy.deepcopy(model).eval()
    data = timm.data.resolve_model_data_config(original)
    channels = read_arguments(original).get("in_chans", data["input_size"][0])
    size = (2, channels, *_image_size(original, {}, data["input_size"]))
    image = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(next(original.parameters()))
    mode, twin = twin.training, twin.eval()
    pairs = zip(as_branches(timm_features(original, image)), as_branches(timm_features(twin, image)), strict=True)
    same = all(torch.allclose(own, other, rtol=1e-3, atol=1e-4) for own, other in pairs)
    twin.train(mode)
    if not same:
        raise ValueError(_needs_arguments(model.pretrained_cfg["architecture"]))


def timm_processor(model: Any, model_args: Mapping[str, Any]) -> BitImageProcessor:
    """The model's evaluation transform as an image processor that can be saved: resize, crop, normalise."""
    data = timm.data.resolve_model_data_config(model)
    height, width = _image_size(model, model_args, data["input_size"])
    scale = min(height, width) / data["crop_pct"]
    return BitImageProcessor(
        size={"shortest_edge": int(scale)},
        crop_size={"height": height, "width": width},
        resample={"nearest": 0, "lanczos": 1, "bilinear": 2}.get(data["interpolation"], 3),
        image_mean=list(data["mean"]),
        image_std=list(data["std"]),
    )


def resize_processor(processor: BitImageProcessor, size: int) -> None:
    """Have pictures read at another size, the share that the crop keeps staying as it is."""
    edge = processor.size["shortest_edge"] * size / min(processor.crop_size["height"], processor.crop_size["width"])
    processor.size, processor.crop_size = {"shortest_edge": int(edge)}, {"height": size, "width": size}
