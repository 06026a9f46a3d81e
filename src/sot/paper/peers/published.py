"""Transformers whose published weights have other names than timm's."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, ClassVar

from timm.layers import LayerNorm, resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn


class PublishedTransformer(VisionTransformer):
    """timm's VisionTransformer as DeiT's successors build it: no bias on qkv, a class token drawn like the weights.

    `load_state_dict` takes published names: each pattern of `RENAMED` that matches the beginning of one is replaced,
    by nothing at all where its replacement is None. A position table of another grid is resampled.
    """

    RENAMED: ClassVar[dict[str, str | None]] = {}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"qkv_bias": False, "norm_layer": partial(LayerNorm, eps=1e-5), **kwargs})
        self.register_load_state_dict_pre_hook(rename_published)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """timm's initialisation, and the class token drawn as wide as the other weights."""
        super().init_weights(mode, needs_reset)
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    def fit_positions(self, table: Tensor, old_grid: tuple[int, int] | None = None) -> Tensor:
        """A position table for the grid of this model; that of `table` is square unless told."""
        grid = list(self.patch_embed.grid_size)
        return resample_abs_pos_embed(table, grid, old_grid, num_prefix_tokens=self.num_prefix_tokens)


def rename_published(model: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Give published weights their names here, in place; names that are known already stay."""
    for name in [name for name in state if name.startswith(prefix)]:
        for pattern, replacement in model.RENAMED.items():
            found = re.match(pattern, name[len(prefix) :])
            if found:
                value = state.pop(name)
                if replacement is not None:
                    state[prefix + replacement + name[len(prefix) + found.end() :]] = value
                break
    positions = state.get(f"{prefix}pos_embed")
    if positions is not None and model.pos_embed is not None and positions.shape[1] != model.pos_embed.shape[1]:
        state[f"{prefix}pos_embed"] = model.fit_positions(positions)
