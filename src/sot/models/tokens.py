"""How each backbone yields its tokens: one rule, and one table of exceptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timm.layers import RmsNorm2d, RmsNorm2dFp32, SimpleNorm2d, SimpleNorm2dFp32
from torch import Tensor, nn

if TYPE_CHECKING:
    from sot.models.layout import Layout


@dataclass
class Tokens:
    """What a head reads: class token `(batch, dim)` or None, words `(batch, tokens, dim)`, their mask and grid.

    `branches` has the tokens of a backbone's further branches, each for a head of its own; `outputs` is what else the
    backbone returned.
    """

    class_token: Tensor | None
    word_tokens: Tensor
    mask: Tensor | None = None
    grid: tuple[int, int] | None = None
    branches: list[Tokens] = field(default_factory=list)
    outputs: Any = None

    def to(self, dtype: torch.dtype) -> Tokens:
        """The same tokens in another type."""
        class_token = None if self.class_token is None else self.class_token.to(dtype)
        branches = [branch.to(dtype) for branch in self.branches]
        return replace(self, class_token=class_token, word_tokens=self.word_tokens.to(dtype), branches=branches)


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


def split_text(hidden: Tensor, pooled: Tensor | None, mask: Tensor | None, class_position: str) -> Tokens:
    """The first or last kept token as class token, the other kept tokens as words, whatever side is padded."""
    mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device) if mask is None else mask != 0
    position = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
    rank = position if class_position == "last" else hidden.shape[1] + 1 - position
    index = (mask * rank).argmax(1, keepdim=True)  # (batch, 1)
    if pooled is None:
        pooled = hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.shape[2])).squeeze(1)
    return Tokens(pooled, hidden, mask & (position - 1 != index))


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


FETCH: dict[str, Callable[[Any, Tensor], Any]] = {  # class of the model, and how its tokens are had
    "PoolingVisionTransformer": pit_features,
    "Conformer": lambda model, image: model.forward_features(image),  # two branches: tokens, and a map
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


def timm_features(model: nn.Module, image: Tensor) -> Any:
    """Unpooled features of a timm model."""
    fetch = FETCH.get(type(model).__name__)
    return model.forward_features(image) if fetch is None else fetch(model, image)  # type: ignore[operator]
