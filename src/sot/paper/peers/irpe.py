"""iRPE: DeiT with contextual relative positions, by the product method (Wu et al., ICCV 2021).

Offsets between two cells fall into 7×7 buckets, rows and columns each by a piecewise index, and the class token has one
more. Each bucket has an encoding that the queries ("k"), the keys ("q") or the attention ("v") meet. Parameter names
and shapes are those of the authors' checkpoints.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.layers import Attention, LayerNorm, maybe_add_mask, resolve_self_attn_mask, to_2tuple
from timm.models import generate_default_cfgs
from timm.models.vision_transformer import Block, VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from sot.models.variants import image_cfg, register_variants

__all__ = ["RelativeVisionTransformer", "piecewise_index", "product_buckets"]

ALPHA, BETA, GAMMA = 1.9, 2 * 1.9, 8 * 1.9  # of the piecewise index, as in the authors' models
REACH = int(BETA)
NUM_BUCKETS = (2 * REACH + 1) ** 2 + 1


def piecewise_index(offset: Tensor, alpha: float = ALPHA, beta: float = BETA, gamma: float = GAMMA) -> Tensor:
    """Offsets to indices in -⌊β⌋…⌊β⌋: themselves up to α, then in steps that grow with the logarithm of the distance.

    `sign(x) · min(⌊β⌋, round(α + (β - α) · log(|x| / α) / log(γ / α)))` beyond α.
    """
    distance = offset.abs().double()
    beyond = alpha + (beta - alpha) * (distance.clamp(min=alpha) / alpha).log() / math.log(gamma / alpha)
    index = torch.where(distance <= alpha, distance.round(), beyond.round().clamp(max=int(beta)))
    return (offset.sign() * index).long()


def product_buckets(grid: tuple[int, int]) -> Tensor:
    """Bucket of each pair of tokens, `(1 + cells, 1 + cells)`; the first token is the class token."""
    rows = torch.arange(grid[0]).repeat_interleave(grid[1])
    columns = torch.arange(grid[1]).repeat(grid[0])
    row_index = piecewise_index(rows[:, None] - rows) + REACH
    column_index = piecewise_index(columns[:, None] - columns) + REACH
    cells = row_index * (2 * REACH + 1) + column_index
    return nn.functional.pad(cells, (1, 0, 1, 0), value=NUM_BUCKETS - 1)


class Encodings(nn.Module):
    """Encodings of the buckets, shared by all heads, and the bucket of each pair of tokens."""

    def __init__(self, shape: tuple[int, int], grid: tuple[int, int]) -> None:
        super().__init__()
        self.lookup_table_weight = nn.Parameter(torch.zeros(1, *shape))
        self.register_buffer("buckets", None, persistent=False)
        self.set_grid(grid)

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Buckets for another grid of words."""
        self.grid = grid
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Compute the buckets; loaders that build on the meta device call this again."""
        with torch.device("cpu"):
            buckets = product_buckets(self.grid)
        self.buckets = buckets.to(self.lookup_table_weight.device)

    def scores(self, x: Tensor) -> Tensor:
        """Of queries or keys `(batch, heads, tokens, head_dim)`: `score[i, j] = x[i] · encoding[bucket[i, j]]`."""
        scores = x @ self.lookup_table_weight[0]  # (batch, heads, tokens, buckets)
        return torch.take_along_dim(scores, self.buckets[None, None], -1)

    def values(self, attention: Tensor) -> Tensor:
        """`out[i] = Σⱼ attention[i, j] · encoding[bucket[i, j]]`, as `(batch, heads, tokens, head_dim)`."""
        encodings = self.lookup_table_weight[0][self.buckets]  # (tokens, tokens, head_dim)
        return torch.einsum("bhij,ijd->bhid", attention, encodings)


class RelativeAttention(Attention):
    """timm's attention with relative positions on queries, keys or values."""

    def encode(self, on: str, grid: tuple[int, int]) -> None:
        """Make the encodings: `on` names where, of "q", "k" and "v"."""
        of_scores, of_values = (self.head_dim, NUM_BUCKETS), (NUM_BUCKETS, self.head_dim)
        self.rpe_q = Encodings(of_scores, grid) if "q" in on else None
        self.rpe_k = Encodings(of_scores, grid) if "k" in on else None
        self.rpe_v = Encodings(of_values, grid) if "v" in on else None
        for encodings in (self.rpe_q, self.rpe_k, self.rpe_v):
            if encodings is not None:
                encodings.to(self.qkv.weight)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        query, key = self.q_norm(query) * self.scale, self.k_norm(key)
        scores = query @ key.transpose(-2, -1)
        if self.rpe_k is not None:
            scores = scores + self.rpe_k.scores(query)
        if self.rpe_q is not None:
            scores = scores + self.rpe_q.scores(key * self.scale).transpose(-2, -1)
        scores = maybe_add_mask(scores, resolve_self_attn_mask(tokens, scores, attn_mask, is_causal))
        attention = self.attn_drop(scores.softmax(-1))
        out = attention @ value
        if self.rpe_v is not None:
            out = out + self.rpe_v.values(attention)
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, tokens, self.attn_dim)))


class RelativeBlock(Block):
    """timm's block over that attention."""

    def __init__(self, *args: Any, on: str, grid: tuple[int, int], **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "attn_layer": RelativeAttention})
        self.attn.encode(on, grid)


class RelativeVisionTransformer(VisionTransformer):
    """DeiT with contextual relative positions.

    Args:
        rpe_on: Where: any of the letters of "qkv".
        img_size: `set_input_size` changes it later; images of changing size (`dynamic_img_size`) are not taken.
        **kwargs: As timm's VisionTransformer.
    """

    def __init__(
        self,
        rpe_on: str = "k",
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        dynamic_img_size: bool = False,
        **kwargs: Any,
    ) -> None:
        if not rpe_on or set(rpe_on) - set("qkv"):
            raise ValueError(f"rpe_on must be some of the letters of 'qkv', got {rpe_on!r}")
        if dynamic_img_size:
            raise ValueError("dynamic_img_size=True is not possible: relative positions are made for one grid of words")
        sides = zip(to_2tuple(img_size), to_2tuple(patch_size))
        rows, columns = (size // patch for size, patch in sides)

        def block(*args: Any, **settings: Any) -> RelativeBlock:
            return RelativeBlock(*args, on=rpe_on, grid=(rows, columns), **settings)

        super().__init__(img_size=img_size, patch_size=patch_size, block_fn=block, norm_layer=LayerNorm, **kwargs)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Another image size: positions interpolated, buckets computed anew."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        for module in self.modules():
            if isinstance(module, Encodings):
                module.set_grid(self.patch_embed.grid_size)


VARIANTS = {  # DeiT's sizes
    "irpe_k_tiny": {"rpe_on": "k", "embed_dim": 192, "num_heads": 3},  # 5.8 M parameters, 1.3 G multiply-adds
    "irpe_qkv_small": {"rpe_on": "qkv", "embed_dim": 384, "num_heads": 6},  # 22.2 M, 4.9 G
    "irpe_k_base": {"rpe_on": "k", "embed_dim": 768, "num_heads": 12},  # 86.6 M, 17.7 G
}
default_cfgs = generate_default_cfgs(dict.fromkeys(VARIANTS, image_cfg("patch_embed.proj")))
register_variants(RelativeVisionTransformer, VARIANTS, filter_fn=checkpoint_filter_fn)
