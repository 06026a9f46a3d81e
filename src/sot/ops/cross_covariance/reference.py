"""The definition: `XᵀY` of each head of each sample, X and Y being its tokens projected."""

from __future__ import annotations

import torch
from torch import Tensor


def split_heads(projected: Tensor, heads: int, left_dim: int) -> tuple[Tensor, Tensor]:
    """X `(batch, heads, tokens, m)` and Y `(…, n)` of `(batch, tokens, heads · (m + n))`: all Wᵢ first, then all Rᵢ."""
    batch, tokens, width = projected.shape
    right_dim = width // heads - left_dim
    left, right = torch.split(projected, [heads * left_dim, heads * right_dim], dim=-1)
    left, right = left.view(batch, tokens, heads, left_dim), right.view(batch, tokens, heads, right_dim)
    return left.transpose(1, 2), right.transpose(1, 2)


def cross_products(projected: Tensor, heads: int, left_dim: int) -> Tensor:
    """`XᵀY (batch, heads, m, n)`."""
    left, right = split_heads(projected, heads, left_dim)
    return left.mT @ right


def project(tokens: Tensor, weight: Tensor, heads: int, left_dim: int, center: bool) -> Tensor:
    """The same of tokens `(batch, tokens, dim)` and `weight (heads · (m + n), dim)`, means subtracted if asked."""
    projected = tokens @ weight.mT
    if center:
        projected = projected - projected.mean(1, keepdim=True)
    return cross_products(projected, heads, left_dim)
