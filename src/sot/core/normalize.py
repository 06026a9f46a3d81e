"""Normalisation of (cross-)covariance matrices: section 3.3 of the paper.

Every function takes matrices of shape `(..., m, n)` with any batch shape, computes in at least float32 whatever the
autocast state, and returns the type it was given. A matrix with a NaN or an infinity comes back as NaN and leaves its
neighbours alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sot.core.checks import check_exponent, check_matrix, check_positive
from sot.ops.matrix_root import matrix_root
from sot.ops.precision import at_least_float32
from sot.ops.svpn import svpn
from sot.ops.svpn_fast import svpn_fast

ZERO_SCALE = 1e-5  # of elements that epn takes for zero: of a blank picture, centred, rounding leaves some 1e-13
SLOPE_EPS = 1e-5  # below this share of λ₁ a singular value counts as zero for the gradient: docs/normalization.md


def singular_value_power_norm(matrix: Tensor, exponent: float = 0.5, eps: float = SLOPE_EPS) -> Tensor:
    """Exact svPN: `Σ λᵢ^α uᵢ vᵢᵀ` over all singular triples of the matrix.

    The value is exact; singular values that rounding makes of zeros, below some 10⁻⁷ of the largest, count as zeros.
    Its gradient is that of the smooth power with `ε = eps · λ₁`: indistinguishable from the true one for singular
    values above `10 ε`, bounded by `(eps · λ₁)^(α-1)` below, zero for a zero matrix.
    """
    check_matrix(matrix)
    check_exponent(exponent)
    return svpn(matrix, exponent, eps)


def fast_singular_value_power_norm(
    matrix: Tensor, start: Tensor, exponent: float = 0.5, num_values: int = 1, num_iterations: int = 1
) -> Tensor:
    """Approximate svPN from the `r = num_values` largest singular values, by power iteration and deflation.

    `Σ_{i<r} λ̂ᵢ^α ûᵢ v̂ᵢᵀ + λ̂ᵣ^(α-1) (Q - Σ_{i<r} λ̂ᵢ ûᵢ v̂ᵢᵀ)`, each value sought from `start (n,)`, or from `start`
    rolled by its index when there is a single iteration. With one value this is `Q / λ̂₁^(1-α)`. Gradients flow to the
    matrix and to `start`; a zero matrix stays zero.
    """
    check_matrix(matrix)
    check_exponent(exponent)
    check_positive(num_values=num_values, num_iterations=num_iterations)
    most = min(matrix.shape[-2:])
    if num_values > most:
        raise ValueError(f"num_values must be at most {most} for {tuple(matrix.shape)}, got {num_values}")
    if start.shape != matrix.shape[-1:]:
        raise ValueError(f"start must have shape ({matrix.shape[-1]},), got {tuple(start.shape)}")
    return svpn_fast(matrix, start, exponent, num_values, num_iterations)


def matrix_power_norm(spd: Tensor, exponent: float = 0.5, eps: float | None = None) -> Tensor:
    """Exact power of symmetric positive semi-definite matrices `(..., n, n)`; the gradient as in svPN.

    Eigenvalues of a covariance are squares, so `eps` is too by default, but never below the rounding of its type.
    """
    check_matrix(spd, square=True)
    check_exponent(exponent)
    if eps is None:
        eps = max(SLOPE_EPS**2, 10 * torch.finfo(at_least_float32(spd).dtype).eps)
    return svpn((spd + spd.mT) / 2, exponent, eps, symmetric=True)


def matrix_square_root(spd: Tensor, num_iterations: int = 5) -> Tensor:
    """iSQRT: square root of symmetric positive semi-definite `(..., n, n)` by coupled Newton-Schulz iteration.

    Divided by the trace before, multiplied by its root after: plain batched products, approximate for few iterations.
    Of a matrix that is not symmetric its symmetric part is taken.
    """
    check_matrix(spd, square=True)
    check_positive(num_iterations=num_iterations)
    return matrix_root(spd, num_iterations)


def element_power_norm(matrix: Tensor, exponent: float = 0.5, eps: float = 1e-6) -> Tensor:
    """Signed power of each element, then each matrix divided by its Frobenius norm.

    Smooth within `eps` of the largest element from zero. A matrix whose largest element is far below `ZERO_SCALE` is
    rounding, not signal: it fades to zero, as does its gradient, which never exceeds `eps^(α-1) / ZERO_SCALE`.
    """
    check_matrix(matrix)
    check_exponent(exponent)
    full = at_least_float32(matrix)
    largest = full.abs().amax((-2, -1), keepdim=True)
    unit = full / largest.clamp_min(1e-30)  # within ±1, so that squares neither overflow nor vanish
    powered = unit * (unit.square() + eps**2).pow((exponent - 1) / 2)
    length = torch.linalg.vector_norm(powered, dim=(-2, -1), keepdim=True).clamp_min(0.5)  # at least 1 but for zeros
    signal = (largest / ZERO_SCALE).clamp_max(1e9).square()
    return (powered / length * (signal / (1 + signal))).to(matrix.dtype)
