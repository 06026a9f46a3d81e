"""Poolings `(tokens, mask) -> vector`: section 3.2 of the paper, and the baselines people pick today.

`tokens` is `(batch, tokens, dim)`; `mask` is `(batch, tokens)`, True (or 1) for the tokens to keep. What is masked
never reaches the result, not even a NaN. A sample with nothing left to pool gives a finite vector.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sot.core.checks import check_cross_norm, check_positive
from sot.core.normalizers import MatrixSquareRoot, NormSettings, build_norm
from sot.core.packed import Packed
from sot.ops.cross_covariance import cross_covariance, takes_packed
from sot.ops.cross_covariance.reference import cross_products
from sot.ops.matrix_root import root_of_product
from sot.ops.precision import at_least_float32, autocast_off, is_autocast


def check_tokens(tokens: Tensor, mask: Tensor | None, dim: int) -> None:
    """Raise ValueError unless tokens are `(batch, >= 1, dim)` and the mask fits them."""
    if tokens.ndim != 3 or tokens.shape[1] < 1 or tokens.shape[2] != dim:
        raise ValueError(f"word tokens must have shape (batch, tokens >= 1, {dim}), got {tuple(tokens.shape)}")
    if mask is None:
        return
    if mask.shape != tokens.shape[:2]:
        raise ValueError(f"mask must have shape {tuple(tokens.shape[:2])} as the word tokens, got {tuple(mask.shape)}")
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"mask must be boolean or integer, True or 1 to keep, got {mask.dtype}")


def keep(tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens with the masked ones set to zero, and how many are kept per sample, `(batch, 1)` float32, at least 1."""
    if mask is None:
        return tokens, torch.full((tokens.shape[0], 1), tokens.shape[1], dtype=torch.float32, device=tokens.device)
    dropped = mask == 0
    count = (~dropped).float().sum(1, keepdim=True).clamp_min(1)
    return tokens.masked_fill(dropped.unsqueeze(-1), 0), count


class Pool(nn.Module):
    """Base: checks its input, then `pool`. `dim` is the width of a token, `out_features` that of the result.

    `accelerated`, which `sot.accelerate` sets, allows a pooling not to call its layers where it knows a shorter way.
    """

    accelerated = False

    def __init__(self, dim: int, out_features: int | None = None) -> None:
        super().__init__()
        check_positive(dim=dim)
        self.dim, self.out_features = dim, out_features or dim

    def forward(self, tokens: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        if isinstance(tokens, Packed):
            return self.pool_packed(tokens)
        check_tokens(tokens, mask, self.dim)
        kept, count = keep(tokens, mask)
        return self.pool(kept, mask, count)

    def pool(self, tokens: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        """Pool tokens `(batch, tokens, dim)`, masked ones zero, to `(batch, out_features)`; `count` is `(batch, 1)`."""
        raise NotImplementedError

    def pool_packed(self, packed: Packed) -> Tensor:
        """Pool tokens without padding to `(batch, out_features)`."""
        return self.pool(*packed.padded(), packed.counts)

    def can_skip(self, linear: nn.Module, tokens: Tensor) -> bool:
        """Whether `tokens @ weightᵀ` may be had without calling the layer: adapters replace it, autocast halves it."""
        usual = type(linear) is nn.Linear and linear.weight.dtype == tokens.dtype
        return self.accelerated and usual and not is_autocast(tokens)


class AveragePool(Pool):
    """Mean of the kept tokens (GAP)."""

    def pool(self, tokens: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        return (at_least_float32(tokens).sum(1) / count).to(tokens.dtype)


class MaxPool(Pool):
    """Largest value of each channel among the kept tokens; zero where none is kept."""

    def pool(self, tokens: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        if mask is None:
            return tokens.amax(1)
        kept = (mask != 0).unsqueeze(-1)
        largest = tokens.masked_fill(~kept, -float("inf")).amax(1)
        return torch.where(kept.any(1), largest, torch.zeros_like(largest))


class CrossCovariancePool(Pool):
    """Multi-headed global cross-covariance pooling (MGCrP): `[norm(Wᵢ Z Zᵀ Rᵢᵀ / q)]` over the heads, flattened."""

    def __init__(
        self,
        dim: int,
        heads: int = 6,
        left_dim: int = 14,
        right_dim: int = 14,
        norm: str = "svpn",
        exponent: float = 0.25,
        num_values: int = 1,
        num_iterations: int | None = None,
        center: bool = False,
    ) -> None:
        check_positive(heads=heads, left_dim=left_dim, right_dim=right_dim)
        super().__init__(dim, heads * left_dim * right_dim)
        check_cross_norm(norm)
        self.heads, self.left_dim, self.right_dim, self.center = heads, left_dim, right_dim, center
        self.projection = nn.Linear(dim, heads * (left_dim + right_dim), bias=False)  # all Wᵢ, then all Rᵢ
        self.norm = build_norm(norm, NormSettings(left_dim, right_dim, exponent, num_values, num_iterations))

    def can_skip(self, linear: nn.Module, tokens: Tensor) -> bool:
        """Not in half precision: products of tokens overflow it."""
        return at_least_float32(tokens).dtype == tokens.dtype and super().can_skip(linear, tokens)

    def pool(self, tokens: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        if self.can_skip(self.projection, tokens) and not (self.center and mask is not None):
            weight = self.projection.weight
            product = cross_covariance(tokens, weight, self.heads, self.left_dim, self.center)
        else:
            projected = at_least_float32(self.projection(tokens))
            if self.center:
                projected, _ = keep(projected - _mean(projected, count), mask)
            with autocast_off(tokens):
                product = cross_products(projected, self.heads, self.left_dim)
        return self._normalized(product, count).to(tokens.dtype)

    def _normalized(self, product: Tensor, count: Tensor) -> Tensor:
        with autocast_off(product):
            return self.norm(product / count.to(product.dtype)[:, :, None, None]).flatten(1)

    def pool_packed(self, packed: Packed) -> Tensor:
        tokens, weight = packed.tokens.unsqueeze(0), self.projection.weight
        short = self.can_skip(self.projection, tokens) and not self.center
        if not (short and takes_packed(tokens, weight, self.heads, self.left_dim)):
            return super().pool_packed(packed)
        product = cross_covariance(tokens, weight, self.heads, self.left_dim, starts=packed.starts)
        return self._normalized(product, packed.counts)


class CovariancePool(Pool):
    """Global covariance pooling (GCP): reduce the channels, `norm(Z Zᵀ / q)`, upper triangle as a vector."""

    def __init__(
        self,
        dim: int,
        reduced_dim: int = 48,
        norm: str = "isqrt",
        exponent: float = 0.5,
        num_values: int = 1,
        num_iterations: int | None = None,
        center: bool = False,
    ) -> None:
        check_positive(reduced_dim=reduced_dim)
        super().__init__(dim, reduced_dim * (reduced_dim + 1) // 2)
        self.center, self.reduced_dim = center, reduced_dim
        self.projection = nn.Linear(dim, reduced_dim)
        self.norm = build_norm(norm, NormSettings(reduced_dim, reduced_dim, exponent, num_values, num_iterations))

    def pool(self, tokens: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        reduced, _ = keep(self.projection(tokens), mask)  # again: the projection has a bias
        return self._pool_reduced(reduced, mask, count).to(tokens.dtype)

    def pool_packed(self, packed: Packed) -> Tensor:
        reduced, mask = Packed(self.projection(packed.tokens), packed.starts).padded()
        return self._pool_reduced(reduced, mask, packed.counts).to(reduced.dtype)

    def _pool_reduced(self, reduced: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        rows = at_least_float32(reduced)
        if self.center:
            rows, _ = keep(rows - _mean(rows, count), mask)
        size = count.to(rows.dtype).unsqueeze(2)
        with autocast_off(rows):
            # a covariance of fewer tokens than channels is never made: its root comes of the smaller product
            if self.accelerated and isinstance(self.norm, MatrixSquareRoot) and rows.shape[1] < self.reduced_dim:
                normalized = root_of_product(rows / size.sqrt(), self.norm.num_iterations)
            else:
                normalized = self.norm(rows.mT @ rows / size)
        upper = torch.triu_indices(self.reduced_dim, self.reduced_dim, device=rows.device)
        return normalized.flatten(1).index_select(1, upper[0] * self.reduced_dim + upper[1])


def _mean(tokens: Tensor, count: Tensor) -> Tensor:
    """Of each channel over the kept tokens, `(batch, 1, dim)`."""
    return tokens.sum(1, keepdim=True) / count.to(tokens.dtype).unsqueeze(2)
