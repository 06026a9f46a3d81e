"""Tokens of samples one after the other, without padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sot.core import simd
from sot.core.covariance import backward_by_kernels


class Packed(NamedTuple):
    """Tokens of all samples, `(tokens, dim)`: those of sample i are `tokens[starts[i] : starts[i + 1]]`."""

    tokens: Tensor
    starts: Tensor  # (batch + 1), int64

    @property
    def counts(self) -> Tensor:
        """How many tokens each sample has, `(batch, 1)` float32, at least 1."""
        return self.starts.diff().clamp_min(1).float().unsqueeze(1)

    def padded(self) -> tuple[Tensor, Tensor | None]:
        """`(batch, longest, dim)` with zeros, and the mask of what is none; no mask where all have as many."""
        counts, dim = self.starts.diff(), self.tokens.shape[1]
        longest = max(1, int(counts.max())) if len(counts) else 1
        if len(self.tokens) == len(counts) * longest:
            return self.tokens.view(len(counts), longest, dim), None
        mask = torch.arange(longest) < counts.unsqueeze(1)
        padded = self.tokens.new_zeros(mask.numel(), dim)
        return padded.index_copy_(0, mask.flatten().nonzero()[:, 0], self.tokens).view(*mask.shape, dim), mask


class _PackedCovariance(torch.autograd.Function):
    """`Wᵢ ZᵀZ Rᵢᵀ / q` of each sample by compiled kernels."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, starts: Tensor, weight: Tensor, heads: int, left_dim: int) -> Tensor:
        projected = simd.Panels(weight.mT).times(tokens.unsqueeze(0))
        count = Packed(tokens, starts).counts[:, :, None, None]
        ctx.save_for_backward(tokens, starts, weight, projected, count)
        return simd.cross_products(projected, starts, heads, left_dim).div_(count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        tokens, starts, weight, projected, count = ctx.saved_tensors
        d_projected = torch.empty_like(projected)
        simd.pull_back_products(projected, starts, grad / count, d_projected)
        wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        whole = [(slice(None), d_projected)]
        d_tokens, d_weight = backward_by_kernels(tokens.unsqueeze(0), weight, whole, *wanted)
        return None if d_tokens is None else d_tokens[0], None, d_weight, None, None


def packed_covariance(packed: Packed, weight: Tensor, heads: int, left_dim: int) -> Tensor:
    """`XᵀY / q (batch, heads, m, n)` of tokens projected by `weight (heads · (m + n), dim)`.

    Only where `simd.can_multiply_packed` says so.
    """
    return _PackedCovariance.apply(packed.tokens, packed.starts, weight, heads, left_dim)
