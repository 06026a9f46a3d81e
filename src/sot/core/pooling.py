"""Poolings `(tokens, mask) -> vector`: section 3.2 of the paper, and the baselines people pick today.

`tokens` is `(batch, tokens, dim)`; `mask` is `(batch, tokens)`, True (or 1) for the tokens to keep. What is masked
never reaches the result, not even a NaN. A sample with nothing left to pool gives a finite vector.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sot.core import simd
from sot.core.checks import check_positive
from sot.core.covariance import covariance, is_plain, projected_covariance, split_heads
from sot.core.normalize import square_root_of_product
from sot.core.normalizers import NORMS, SYMMETRIC_ONLY, MatrixSquareRoot, NormSettings, build_norm
from sot.core.packed import Packed, packed_covariance
from sot.core.precision import at_least_float32, autocast_off, is_eager, is_hooked, is_observed


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
        return tokens, torch.ones(tokens.shape[:2], device=tokens.device).sum(1, keepdim=True)
    dropped = mask == 0
    count = (~dropped).float().sum(1, keepdim=True).clamp_min(1)
    if not torch.jit.is_scripting():  # noqa: SIM102  alone, for the compiler of TorchScript to skip what follows
        if tokens.device.type == "cpu" and is_eager() and not is_observed():
            return _fill_rows(tokens, dropped), count
    return tokens.masked_fill(dropped.unsqueeze(-1), 0), count


@torch.jit.unused
def _fill_rows(tokens: Tensor, dropped: Tensor) -> Tensor:
    """`masked_fill` of whole tokens with zero; on a CPU five times as fast as a look at every number."""
    rows = dropped.flatten().nonzero()[:, 0]
    return tokens.flatten(0, 1).index_fill(0, rows, 0).view_as(tokens)


class Pool(nn.Module):
    """Base: checks its input, then `pool`. `dim` is the width of a token, `out_features` that of the result."""

    def __init__(self, dim: int, out_features: int) -> None:
        super().__init__()
        check_positive(dim=dim)
        self.dim = dim
        self.out_features = out_features

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        if not torch.jit.is_scripting():
            check_tokens(tokens, mask, self.dim)
        kept, count = keep(tokens, mask)
        return self.pool(kept, mask, count)

    def pool(self, tokens: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        """What `keep` gives, pooled."""
        raise NotImplementedError

    @torch.jit.unused
    def pool_packed(self, packed: Packed) -> Tensor:
        """The same of tokens without padding, for whoever has them so."""
        return self.pool(*packed.padded(), packed.counts)


class AveragePool(Pool):
    """Mean of the kept tokens (GAP)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def pool(self, tokens: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        return (at_least_float32(tokens).sum(1) / count).to(tokens.dtype)


class MaxPool(Pool):
    """Largest value of each channel among the kept tokens; zero where none is kept."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

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
        norm: str = "svpn_fast",
        exponent: float = 0.5,
        num_values: int = 1,
        num_iterations: int | None = 1,
        center: bool = False,
    ) -> None:
        check_positive(heads=heads, left_dim=left_dim, right_dim=right_dim)
        super().__init__(dim, heads * left_dim * right_dim)
        if norm in SYMMETRIC_ONLY:
            accepted = ", ".join(name for name in NORMS if name not in SYMMETRIC_ONLY)
            raise ValueError(f"norm {norm!r} needs a covariance, a cross-covariance accepts: {accepted}")
        self.heads, self.left_dim, self.right_dim, self.center = heads, left_dim, right_dim, center
        self.projection = nn.Linear(dim, heads * (left_dim + right_dim), bias=False)  # all Wᵢ, then all Rᵢ
        self.norm = build_norm(norm, NormSettings(left_dim, right_dim, exponent, num_values, num_iterations))

    def pool(self, tokens: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            left, right = split_heads(self.projection(tokens), self.heads, self.left_dim)
            normalized = self.norm(covariance(left, right, count, mask, self.center))
        elif not (self.center and mask is not None) and is_eager() and is_plain(self.projection, tokens):
            weight = self.projection.weight
            product = projected_covariance(tokens, weight, self.heads, self.left_dim, self.center)
            normalized = self.norm(product / count.to(product.dtype)[:, :, None, None])
        else:
            left, right = split_heads(self.projection(tokens), self.heads, self.left_dim)
            with autocast_off(tokens):
                normalized = self.norm(covariance(left, right, count, mask, self.center))
        return normalized.flatten(1).to(tokens.dtype)

    @torch.jit.unused
    def pool_packed(self, packed: Packed) -> Tensor:
        weight = self.projection.weight
        plain = not self.center and is_eager() and is_plain(self.projection, packed.tokens)
        if not (plain and simd.can_multiply_packed(packed.tokens, weight, self.heads, self.left_dim)):
            return super().pool_packed(packed)
        return self.norm(packed_covariance(packed, weight, self.heads, self.left_dim)).flatten(1)


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
        self.center = center
        self.projection = nn.Linear(dim, reduced_dim)
        self.norm = build_norm(norm, NormSettings(reduced_dim, reduced_dim, exponent, num_values, num_iterations))
        self.reduced_dim = reduced_dim

    def pool(self, tokens: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        reduced, _ = keep(self.projection(tokens), mask)  # again: the projection has a bias
        if torch.jit.is_scripting():
            normalized = self._normalized(reduced, count, mask)
        else:
            with autocast_off(tokens):
                normalized = self._normalize(reduced, count, mask)
        return self._upper_triangle(normalized).to(tokens.dtype)

    @torch.jit.unused
    def pool_packed(self, packed: Packed) -> Tensor:
        reduced, mask = Packed(self.projection(packed.tokens), packed.starts).padded()
        with autocast_off(reduced):
            return self._upper_triangle(self._normalize(reduced, packed.counts, mask)).to(reduced.dtype)

    def _upper_triangle(self, normalized: Tensor) -> Tensor:
        upper = torch.triu_indices(self.reduced_dim, self.reduced_dim, device=normalized.device)
        places = upper[0] * self.reduced_dim + upper[1]
        return normalized.flatten(1).index_select(1, places)

    @torch.jit.unused
    def _normalize(self, reduced: Tensor, count: Tensor, mask: Tensor | None) -> Tensor:
        if not (self._has_few(reduced) and isinstance(self.norm, MatrixSquareRoot)):
            return self._normalized(reduced, count, mask)
        rows = at_least_float32(reduced)
        rows = rows / count.to(rows.dtype).sqrt().unsqueeze(2)
        return square_root_of_product(rows, self.norm.num_iterations)

    def _normalized(self, reduced: Tensor, count: Tensor, mask: Tensor | None) -> Tensor:
        reduced = reduced.unsqueeze(2)  # (batch, tokens, 1, reduced_dim)
        return self.norm(covariance(reduced, reduced, count, mask, self.center)).squeeze(1)

    @torch.jit.unused
    def _has_few(self, tokens: Tensor) -> bool:
        """Whether the covariance has a rank lower than its size, and nobody waits to see it."""
        if not is_eager() or is_observed() or is_hooked(self.norm):  # first: exporters must not see the comparison
            return False
        return tokens.shape[1] < self.reduced_dim and not self.center
