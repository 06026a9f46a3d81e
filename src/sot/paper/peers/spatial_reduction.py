"""PVT's transformer block, whose attention reduces keys and values in space."""

from __future__ import annotations

import torch.nn.functional as F
from timm.layers import DropPath, LayerNorm, Mlp, use_fused_attn
from timm.models import checkpoint
from torch import Tensor, nn


def to_map(tokens: Tensor, grid: list[int]) -> Tensor:
    """Tokens `(batch, rows · columns, dim)` to `(batch, dim, rows, columns)`."""
    return tokens.reshape(tokens.shape[0], grid[0], grid[1], tokens.shape[2]).permute(0, 3, 1, 2).contiguous()


class SpatialReductionAttention(nn.Module):
    """Attention whose keys and values are read from a map `reduction` times smaller each way: a strided convolution."""

    def __init__(self, dim: int, num_heads: int, reduction: int, attn_drop: float, proj_drop: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.reduction = reduction
        self.fused_attn = use_fused_attn()
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.sr: nn.Module = nn.Conv2d(dim, dim, reduction, reduction) if reduction > 1 else nn.Identity()
        self.norm: nn.Module = nn.LayerNorm(dim) if reduction > 1 else nn.Identity()

    def forward(self, x: Tensor, grid: list[int]) -> Tensor:
        """Tokens `(batch, rows · columns, dim)` of a grid of `[rows, columns]`; without reduction any tokens."""
        batch, tokens, dim = x.shape
        query = self.q(x).reshape(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
        source = self.norm(self.sr(to_map(x, grid)).flatten(2).transpose(1, 2)) if self.reduction > 1 else x
        key_value = self.kv(source).reshape(batch, -1, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        key, value = key_value.unbind(0)  # (batch, heads, tokens / reduction², head_dim)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(query, key, value, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            attention = (query * self.head_dim**-0.5) @ key.transpose(-2, -1)
            x = self.attn_drop(attention.softmax(-1)) @ value
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(batch, tokens, dim)))


class PyramidBlock(nn.Module):
    """Pre-norm transformer block over spatial-reduction attention."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        reduction: int,
        mlp_ratio: float,
        proj_drop: float,
        attn_drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=1e-6)
        self.attn = SpatialReductionAttention(dim, num_heads, reduction, attn_drop, proj_drop)
        self.norm2 = LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.grad_checkpointing = False

    def forward(self, x: Tensor, grid: list[int]) -> Tensor:
        if self.grad_checkpointing:
            return checkpoint(self._forward, x, grid)
        return self._forward(x, grid)

    def _forward(self, x: Tensor, grid: list[int]) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        return x + self.drop_path(self.mlp(self.norm2(x)))
