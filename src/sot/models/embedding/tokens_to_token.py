"""Tokens-to-token: soft splits, with attention over the many small tokens in between (Yuan et al., ICCV 2021).

Parameter names are those of the published weights.
"""

from __future__ import annotations

import math

import torch
from timm.layers import Mlp, register_notrace_module
from torch import Tensor, nn

from sot.ops.precision import at_least_float32, autocast_off


def positive_features(x: Tensor, directions: Tensor) -> Tensor:
    """`exp(w·x − |x|²/2) / √m` for each of m directions w: products of two of them estimate `exp(x·y)`."""
    exponent = x @ directions.mT - x.square().sum(-1, keepdim=True) / 2  # (batch, tokens, m)
    return exponent.exp() / math.sqrt(directions.shape[0])


def performer_attention(query: Tensor, key: Tensor, value: Tensor, directions: Tensor) -> Tensor:
    """Performer's estimate of `softmax(query keyᵀ) value`, all `(batch, tokens, dim)`, in float32 at least.

    It takes time linear in the number of tokens.
    """
    kept = value.dtype
    query, key, value, directions = map(at_least_float32, (query, key, value, directions))
    with autocast_off(query):
        query, key = positive_features(query, directions), positive_features(key, directions)
        normalizer = query @ key.sum(1).unsqueeze(2)  # (batch, tokens, 1)
        return (query @ (key.mT @ value) / (normalizer + 1e-8)).to(kept)


class TokenPerformer(nn.Module):
    """Performer attention from `dim` to the narrower `out_dim`, its values as the shortcut; then an MLP."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.kqv = nn.Linear(dim, 3 * out_dim)
        self.proj = nn.Linear(out_dim, out_dim)
        self.drop = nn.Dropout(0.1)
        self.norm2 = nn.LayerNorm(out_dim)
        self.mlp = nn.Sequential(nn.Linear(out_dim, out_dim), nn.GELU(), nn.Linear(out_dim, out_dim), nn.Dropout(0.1))
        directions = torch.empty(out_dim // 2, out_dim)
        nn.init.orthogonal_(directions, gain=math.sqrt(out_dim // 2))
        self.register_buffer("w", directions)  # drawn once, saved, never trained

    def forward(self, x: Tensor) -> Tensor:
        key, query, value = self.kqv(self.norm1(x)).chunk(3, dim=-1)
        attended = performer_attention(query, key, value, self.w)  # type: ignore[arg-type]
        x = value + self.drop(self.proj(attended))
        return x + self.mlp(self.norm2(x))


class NarrowingAttention(nn.Module):
    """Single-head attention from `dim` to `out_dim`, its values as the shortcut."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.scale = dim**-0.5  # of the input's width, as the published weights were trained
        self.qkv = nn.Linear(dim, 3 * out_dim, bias=False)
        self.proj = nn.Linear(out_dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, scale=self.scale)
        return value + self.proj(attended)


class TokenTransformer(nn.Module):
    """Softmax attention from `dim` to the narrower `out_dim`, then an MLP."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = NarrowingAttention(dim, out_dim)
        self.norm2 = nn.LayerNorm(out_dim)
        self.mlp = Mlp(out_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


ATTENTION: dict[str, type[nn.Module]] = {"performer": TokenPerformer, "transformer": TokenTransformer}


@register_notrace_module
class TokensToToken(nn.Module):
    """Image `(batch, in_chans, H, W)` to features `(batch, dim, H / reduction, W / reduction)`.

    A soft split makes tokens of overlapping windows: of 7×7 pixels every 4, then twice of 3×3 tokens, every second one
    while the reduction is not reached.
    """

    def __init__(
        self, in_chans: int, dim: int, reduction: int, attention: str = "performer", token_dim: int = 64
    ) -> None:
        super().__init__()
        self.reduction, self.stride1 = reduction, 2 if reduction >= 8 else 1
        self.soft_split0 = nn.Unfold(7, stride=4, padding=2)
        self.soft_split1 = nn.Unfold(3, stride=self.stride1, padding=1)
        self.soft_split2 = nn.Unfold(3, stride=2 if reduction >= 16 else 1, padding=1)
        self.attention1 = ATTENTION[attention](in_chans * 49, token_dim)
        self.attention2 = ATTENTION[attention](token_dim * 9, token_dim)
        self.project = nn.Linear(token_dim * 9, dim)

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[2] // 4, image.shape[3] // 4
        tokens = self.attention1(self.soft_split0(image).mT)  # (batch, cells, token_dim)
        tokens = tokens.mT.unflatten(2, (height, width))
        height, width = height // self.stride1, width // self.stride1
        tokens = self.attention2(self.soft_split1(tokens).mT)
        tokens = tokens.mT.unflatten(2, (height, width))
        tokens = self.project(self.soft_split2(tokens).mT)
        return tokens.mT.unflatten(2, (image.shape[2] // self.reduction, image.shape[3] // self.reduction))
