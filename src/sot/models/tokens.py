"""How each backbone yields its tokens: one rule, and one table of exceptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import (
    RmsNorm,
    RmsNorm2d,
    RmsNorm2dFp32,
    RmsNormFp32,
    SimpleNorm,
    SimpleNorm2d,
    SimpleNorm2dFp32,
    SimpleNormFp32,
)
from torch import Tensor, nn


@dataclass
class Tokens:
    """What a head reads: class token `(batch, dim)` or None, words `(batch, tokens, dim)`, their mask and grid.

    `branches` has the tokens of a backbone's further branches, each for a head of its own.
    """

    class_token: Tensor | None
    word_tokens: Tensor
    mask: Tensor | None = None
    grid: tuple[int, int] | None = None
    branches: list[Tokens] = field(default_factory=list)


@dataclass(frozen=True)
class Layout:
    """Where the tokens are in what an image backbone returns, found once and saved with the model.

    `norm` names the backbone's own normalisation that its features have not passed yet; `needs_norm` says that there is
    none, before or after them, so that one belongs in front of the head; `unused` names what is left of its classifier,
    which would otherwise sit in the model without a gradient; `branches` are the layouts of further branches.
    """

    dim: int
    format: str = "NLC"
    has_class_token: bool = False
    num_prefix_tokens: int = 0
    norm: str | None = None
    unused: list[str] = field(default_factory=list)
    needs_norm: bool = False
    branches: list[Layout] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for a configuration file."""
        return {name: value for name, value in asdict(self).items() if value or name != "branches"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Layout:
        """The inverse of `to_dict`; unknown fields are refused."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown or "dim" not in values:
            wrong = f"unknown {', '.join(map(repr, unknown))}" if unknown else "it lacks 'dim'"
            raise ValueError(f"the layout of the model is damaged: {wrong}; accepted: {', '.join(known)}")
        return cls(**{**values, "branches": [cls.from_dict(branch) for branch in values.get("branches", [])]})


# --- the rule ----------------------------------------------------------------------------------------------


def split_branches(features: Any, layout: Layout, model: nn.Module, image_size: tuple[int, int]) -> Tokens:
    """Features of the branches that have a layout to tokens, with the norms they still lack."""
    layouts = [layout, *layout.branches]
    first, *others = (
        split(part, own, None if own.norm is None else model.get_submodule(own.norm), image_size)
        for part, own in zip(as_branches(features), layouts)
    )
    first.branches = others
    return first


def as_branches(features: Any) -> tuple[Any, ...]:
    """Features as one entry for each branch."""
    return features if isinstance(features, tuple) else (features,)


def split(features: Tensor, layout: Layout, norm: nn.Module | None, image_size: tuple[int, int]) -> Tokens:
    """Features of a backbone to tokens: a map's cells are its words, a sequence's prefix holds its class token."""
    grid = None
    if features.ndim == 4:
        features = features if layout.format == "NHWC" else features.permute(0, 2, 3, 1)  # (batch, H, W, dim)
        grid = (features.shape[1], features.shape[2])
        features = features.flatten(1, 2)
    if norm is not None:
        features = apply_norm(norm, features)
    words = features[:, layout.num_prefix_tokens :]
    class_token = features[:, 0] if layout.has_class_token else None
    return Tokens(class_token, words, None, grid or guess_grid(words.shape[1], image_size))


def apply_norm(norm: Any, features: Tensor) -> Tensor:
    """A backbone's own norm on `(batch, tokens, dim)`; those of maps want their channels second."""
    if isinstance(norm, nn.LayerNorm):  # its functional form is the same for maps: channels are last here
        return F.layer_norm(features, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    if isinstance(norm, MAP_NORMS):
        return norm(features.mT.unsqueeze(-1)).squeeze(-1).mT
    return norm(features)


def guess_grid(num_words: int, image_size: tuple[int, int]) -> tuple[int, int] | None:
    """Rows and columns of words in the proportions of the image, if there are such."""
    if not isinstance(num_words, int):
        return None  # a symbolic size while exporting
    rows = round((num_words * image_size[0] / image_size[1]) ** 0.5)
    return (rows, num_words // rows) if rows and num_words % rows == 0 else None


# --- the exceptions ----------------------------------------------------------------------------------------


def pit_features(model: Any, image: Tensor) -> Tensor:
    """PiT returns its class token alone: take the words from its last stage, and give them the same norm."""
    embedded = model.pos_drop(model.patch_embed(image) + model.pos_embed)
    words, prefix = model.transformers((embedded, model.cls_token.expand(image.shape[0], -1, -1)))
    return model.norm(torch.cat([prefix, words.flatten(2).mT], dim=1))


def gemma_features(model: Any, image: Tensor) -> Tensor:
    """Gemma's encoder asks whether any patch is padding, which takes values: patches of a whole image never are."""
    encoder = getattr(model, "encoder", model)
    embedded, positions, _ = encoder.patch_embed(image)
    return encoder._encode(embedded, positions, torch.zeros(1, dtype=torch.bool, device="cpu"))


def conformer_features(model: Any, image: Tensor) -> tuple[Tensor, Tensor]:
    """Conformer's two branches: tokens, and a map."""
    tokens, cells = model.forward_features(image)
    return tokens, cells


FETCH: dict[str, Callable[[Any, Tensor], Any]] = {  # class of the model, and how its tokens are had
    "PoolingVisionTransformer": pit_features,
    "Conformer": conformer_features,
    "Gemma4VitClassifier": gemma_features,
    "Gemma4VitEncoder": gemma_features,
}
REFUSED = {  # class of the model, and why
    "CrossVit": "it returns two token sequences of different widths",
    "CoaT": "its parallel stages return several token sequences; CoaT-lite works",
    "EfficientViM": "it returns one token sequence for each stage, of different widths",
    "EfficientViMDistilled": "it returns one token sequence for each stage, of different widths",
}
WITHOUT_NORM = {  # attention whose last residual sum nothing normalises: a LayerNorm of our own goes first
    *("Levit", "LevitDistilled", "EfficientVit", "EfficientVitLarge", "EfficientVitMsra", "SHViT", "IFormer"),
    *("LowFormer", "CPUBone", "Gemma4VitEncoder"),
}
MAP_NORMS = (RmsNorm2d, RmsNorm2dFp32, SimpleNorm2d, SimpleNorm2dFp32)
SEQUENCE_NORMS = (nn.LayerNorm, nn.RMSNorm, RmsNorm, RmsNormFp32, SimpleNorm, SimpleNormFp32)


def timm_features(model: nn.Module, image: Tensor) -> Any:
    """Unpooled features of a timm model."""
    fetch = FETCH.get(type(model).__name__)
    return model.forward_features(image) if fetch is None else fetch(model, image)  # type: ignore[operator]


# --- finding the layout of a backbone ----------------------------------------------------------------------

NORM_NAMES = ("fc_norm", "head.norm", "layernorm", "norm", "pooler.layernorm", "merger.norm", "post_layernorm")
CLASS_TOKENS = ("cls_token", "class_embedding")  # of CLIP and its kin


def find_layout(model: nn.Module, features: Callable[[], Any], format: str | None, num_prefix: int | None) -> Layout:
    """The layout of `features()`, a forward pass of `model` with gradients; on the meta device it costs nothing."""
    name = type(model).__name__
    called: set[nn.Module] = set()
    hooks = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in model.modules()]
    with torch.enable_grad():  # the graph tells which parameters take part, also for callers who want no gradient
        output = features()
    for hook in hooks:
        hook.remove()
    outputs = as_branches(output) if name in FETCH else (output,)
    for part in outputs:
        if not isinstance(part, Tensor) or part.ndim not in (3, 4) or part.shape[0] != 2:  # pictures, that is
            shape = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            why = REFUSED.get(name, f"its features are {shape}, not tokens (batch, tokens, dim) or a map")
            raise ValueError(f"{name} has no word tokens to pool: {why}")
    idle = set.intersection(*(idle_parameters(model, part) for part in outputs))
    first, *others = (branch_layout(model, part, idle, called, format, num_prefix) for part in outputs)
    normed = tuple(f"{layout.norm}." for layout in (first, *others) if layout.norm is not None)
    unused = unused_modules(model, {parameter for parameter in idle if not parameter.startswith(normed)})
    return replace(first, unused=unused, branches=others)


def branch_layout(
    model: nn.Module, output: Tensor, idle: set[str], called: set[nn.Module], format: str | None, num_prefix: int | None
) -> Layout:
    """The layout of what one branch of the model returned."""
    name = type(model).__name__
    class_tokens = [
        p for n, p in model.named_parameters() if n.rpartition(".")[2].startswith(CLASS_TOKENS) and n not in idle
    ]
    if num_prefix is None:  # CaiT, XCiT, PiT and others do not say: count what their class token parameter holds
        num_prefix = class_tokens[-1].shape[1] if class_tokens else 0
    if output.ndim == 3 and output.shape[1] <= num_prefix:
        raise ValueError(f"{name} has no word tokens to pool: it returns its class token alone")
    sequence = output.ndim == 3
    format = "NLC" if sequence else format or "NCHW"
    dim = output.shape[1] if format == "NCHW" else output.shape[-1]
    norm = pending_norm(model, dim, idle, called)
    switched_off = sequence and isinstance(getattr(model, "norm", None), nn.Identity)  # some of EVA's, on purpose
    return Layout(
        dim=dim,
        format=format,
        has_class_token=sequence and bool(class_tokens),
        num_prefix_tokens=num_prefix if sequence else 0,
        norm=norm,
        needs_norm=norm is None and (name in WITHOUT_NORM or switched_off),
    )


def pending_norm(model: nn.Module, dim: int, idle: set[str], called: set[nn.Module]) -> str | None:
    """Name of the norm that the backbone would apply next: over `dim`, without part in the features so far."""
    modules = dict(model.named_modules())
    for name in NORM_NAMES:
        norm: Any = modules.get(name)
        if not isinstance(norm, SEQUENCE_NORMS + MAP_NORMS) or tuple(norm.normalized_shape) != (dim,):
            continue
        weights = {f"{name}.{weight}" for weight, _ in norm.named_parameters()}
        if weights <= idle if weights else norm not in called:
            return name
    return None


def idle_parameters(model: nn.Module, output: Tensor) -> set[str]:
    """Names of the trainable parameters that `output` does not depend on."""
    used = used_parameters(output)
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter not in used}


def used_parameters(output: Tensor) -> set[Tensor]:
    """The parameters that `output` was computed from, read off its graph: no backward pass, which some devices lack."""
    found: set[Tensor] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
        if hasattr(node, "variable"):  # a leaf
            found.add(node.variable)
    return found


def unused_modules(model: nn.Module, idle: set[str]) -> list[str]:
    """Names of the largest modules (or single parameters) that hold idle parameters only."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = [f"{name}.{inner}" for inner, _ in module.named_parameters()]
        covered = any(name.startswith(f"{outer}.") for outer in found)
        if name and inside and not covered and all(parameter in idle for parameter in inside):
            found.append(name)
    return sorted(found + [name for name in idle if not any(name.startswith(f"{outer}.") for outer in found)])


def remove_unused(model: nn.Module, names: list[str]) -> None:
    """Replace unused modules by nothing; a single unused parameter stays, frozen."""
    for name in names:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(getattr(owner, child), nn.Parameter):
            getattr(owner, child).requires_grad_(False)
        else:
            setattr(owner, child, nn.Identity())
    teach_buffers(model)


def teach_buffers(model: nn.Module) -> None:
    """Give modules of timm that forget it a way to fill their unsaved buffers after loading, as the others have."""
    for module in model.modules():
        fill = FILL_BUFFERS.get(type(module).__name__)
        if fill is not None and not hasattr(module, "init_non_persistent_buffers"):
            vars(module)["init_non_persistent_buffers"] = partial(fill, module)


def fill_attention_mask(block: Any) -> None:
    """Swin v2's mask of shifted windows."""
    if block.attn_mask is not None:
        block.attn_mask = block.get_attn_mask(device=block.attn_mask.device, dtype=block.attn_mask.dtype)


FILL_BUFFERS: dict[str, Callable[[Any], None]] = {"SwinTransformerV2Block": fill_attention_mask}
