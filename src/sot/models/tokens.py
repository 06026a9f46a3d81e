"""How each backbone yields its tokens: one rule, and one table of exceptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Tokens:
    """What a head reads: class token `(batch, dim)` or None, words `(batch, tokens, dim)`, their mask and grid."""

    class_token: Tensor | None
    word_tokens: Tensor
    mask: Tensor | None = None
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class Layout:
    """Where the tokens are in what an image backbone returns, found once and saved with the model.

    `norm` names the backbone's own normalisation that its features have not passed yet; `unused` names what is left of
    its classifier, which would otherwise sit in the model without a gradient.
    """

    dim: int
    format: str = "NLC"
    has_class_token: bool = False
    num_prefix_tokens: int = 0
    norm: str | None = None
    unused: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for a configuration file."""
        return asdict(self)


# --- the rule ----------------------------------------------------------------------------------------------


def split(features: Tensor, layout: Layout, norm: nn.Module | None, image_size: tuple[int, int]) -> Tokens:
    """Features of a backbone to tokens: a map's cells are its words, a sequence's prefix holds its class token."""
    grid = None
    if features.ndim == 4:
        features = features if layout.format == "NHWC" else features.permute(0, 2, 3, 1)  # (batch, H, W, dim)
        grid = (features.shape[1], features.shape[2])
        features = features.flatten(1, 2)
    if norm is not None:  # a LayerNorm of maps has the same weights, over channels that are last here
        features = F.layer_norm(features, (layout.dim,), norm.weight, norm.bias, norm.eps)  # type: ignore[arg-type]
    words = features[:, layout.num_prefix_tokens :]
    class_token = features[:, 0] if layout.has_class_token else None
    return Tokens(class_token, words, None, grid or guess_grid(words.shape[1], image_size))


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


FETCH: dict[str, Callable[[Any, Tensor], Tensor]] = {"PoolingVisionTransformer": pit_features}
REFUSED = {  # class of the model, and why
    "CrossVit": "it returns two token sequences of different widths",
    "CoaT": "its parallel stages return several token sequences; CoaT-lite works",
    "EfficientViM": "it returns one map for each stage",
}
WITHOUT_NORM = {"PyramidVisionTransformerV2", "Levit", "LevitDistilled"}  # a LayerNorm of our own goes first


def timm_features(model: nn.Module, image: Tensor) -> Any:
    """Unpooled features of a timm model."""
    fetch = FETCH.get(type(model).__name__)
    return model.forward_features(image) if fetch is None else fetch(model, image)  # type: ignore[operator]


# --- finding the layout of a backbone ----------------------------------------------------------------------

NORM_NAMES = ("fc_norm", "head.norm", "layernorm", "norm", "pooler.layernorm")


def find_layout(model: nn.Module, features: Callable[[], Any], format: str | None, num_prefix: int | None) -> Layout:
    """The layout of `features()`, a forward pass of `model` with gradients; on the meta device it costs nothing."""
    name = type(model).__name__
    output = features()
    if not isinstance(output, Tensor) or output.ndim not in (3, 4):
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        why = REFUSED.get(name, f"its features are {shape}, not tokens (batch, tokens, dim) or a map")
        raise ValueError(f"{name} has no word tokens to pool: {why}")
    class_tokens = [p for name, p in model.named_parameters() if name.split(".")[-1].startswith("cls_token")]
    has_class_token = bool(class_tokens)
    if num_prefix is None:  # CaiT, XCiT, PiT and others do not say: count what their class token parameter holds
        num_prefix = class_tokens[-1].shape[1] if has_class_token else 0
    format = (format or "NCHW") if output.ndim == 4 else "NLC"
    dim = output.shape[1] if format == "NCHW" else output.shape[-1]
    if output.ndim == 3 and output.shape[1] <= num_prefix:
        raise ValueError(f"{name} has no word tokens to pool: it returns its class token alone")
    unused = unused_modules(model, output)
    norm = next((name for name in NORM_NAMES if name in unused and _is_layer_norm(model, name, dim)), None)
    unused = [other for other in unused if other != norm]
    return Layout(
        dim, format, has_class_token and output.ndim == 3, num_prefix if output.ndim == 3 else 0, norm, unused
    )


def _is_layer_norm(model: nn.Module, name: str, dim: int) -> bool:
    module = model.get_submodule(name)
    return isinstance(module, nn.LayerNorm) and module.normalized_shape == (dim,) and module.weight is not None


def unused_modules(model: nn.Module, output: Tensor) -> list[str]:
    """Names of the largest modules (or single parameters) that `output` does not depend on."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(output.sum(), list(parameters.values()), allow_unused=True)
    idle = {name for name, gradient in zip(parameters, gradients) if gradient is None}
    found: list[str] = []
    for name, module in model.named_modules():
        inside = [f"{name}.{inner}" for inner, _ in module.named_parameters()]
        covered = any(name.startswith(f"{outer}.") for outer in found)
        if name and inside and not covered and all(parameter in idle for parameter in inside):
            found.append(name)
    found += [name for name in idle if not any(name.startswith(f"{outer}.") for outer in found)]
    # the norm inside an otherwise empty classifier head is what matters, not the head around it
    return sorted(
        f"{name}.norm" if f"{name}.norm.weight" in idle and _only_norm(model, name) else name for name in found
    )


def _only_norm(model: nn.Module, name: str) -> bool:
    return all(inner.startswith("norm.") for inner, _ in model.get_submodule(name).named_parameters())


def remove_unused(model: nn.Module, names: list[str]) -> None:
    """Replace unused modules by nothing; a single unused parameter stays, frozen."""
    for name in names:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(getattr(owner, child), nn.Parameter):
            getattr(owner, child).requires_grad_(False)
        else:
            setattr(owner, child, nn.Identity())
