"""Normalisation of (cross-)covariance matrices: section 3.3 of the paper.

Every function takes matrices of shape `(..., m, n)` with any batch shape, computes in at least float32
whatever the autocast state, and returns the type it was given. A matrix with a NaN or an infinity comes
back as NaN and leaves its neighbours alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

SLOPE_EPS = 1e-5  # below this share of λ₁ a singular value counts as zero for the gradient: docs/normalization.md


def autocast_off(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context in which matrix products keep the type of their operands."""
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor itself, or its float32 copy when it is float16 or bfloat16."""
    if tensor.dtype == torch.float16 or tensor.dtype == torch.bfloat16:
        return tensor.float()
    return tensor


def _check(matrix: Tensor, exponent: float, square: bool = False) -> None:
    if matrix.ndim < 2 or not matrix.is_floating_point() or 0 in matrix.shape[-2:]:
        got = f"{matrix.dtype} of shape {tuple(matrix.shape)}"
        raise ValueError(f"expected floating point matrices (..., m, n) with m, n >= 1, got {got}")
    if square and matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"expected square matrices (..., n, n), got shape {tuple(matrix.shape)}")
    check_exponent(exponent)


def check_exponent(exponent: float) -> None:
    """Raise ValueError unless `0 < exponent <= 1`."""
    if not 0 < exponent <= 1:
        raise ValueError(f"exponent must be in (0, 1], got {exponent}")


def check_positive(**counts: int) -> None:
    """Raise ValueError unless every count is an integer of at least 1."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {count!r}")


# --- exact: powers of singular values or eigenvalues -------------------------------------------------------


def _decompose(matrix: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`U (..., m, k)`, `λ >= 0 (..., k)`, `Vᵀ (..., k, n)`; a non-finite matrix decomposes as NaN."""
    finite = matrix.isfinite().all(-1).all(-1)[..., None, None]
    solvable = torch.where(finite, matrix, torch.zeros_like(matrix))  # LAPACK refuses the whole batch otherwise
    if symmetric:
        values, left = torch.linalg.eigh(solvable)
        values, right = values.clamp_min(0), left.mT
    else:
        left, values, right = torch.linalg.svd(solvable, full_matrices=False)
    return left, torch.where(finite[..., 0], values, torch.full_like(values, float("nan"))), right


def _power(left: Tensor, values: Tensor, right: Tensor, exponent: float) -> Tensor:
    return (left * values.pow(exponent).unsqueeze(-2)) @ right


def _slopes(values: Tensor, exponent: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Divided differences of the smooth power `f(λ) = λ g(λ)`, `g = (λ² + ε²)^((α-1)/2)`, `ε = eps · λ₁`.

    Returns `E = (fᵢ-fⱼ)/(λᵢ-λⱼ)` and `F = (fᵢ+fⱼ)/(λᵢ+λⱼ)`, both `(..., k, k)`, and `g (..., k)`.
    No case is special: with a >= b and z = (a²-b²)/(b²+ε²), E = g(a) + b(a+b) g(b)/(b²+ε²) · ((1+z)^β - 1)/z,
    whose last factor tends to β on ties. All is computed on λ/λ₁, so that no scale can overflow.
    """
    beta = (exponent - 1) / 2
    largest = values.amax(-1, keepdim=True)
    alive = largest > torch.finfo(values.dtype).tiny
    unit = values / torch.where(alive, largest, 1)
    scale = torch.where(alive, largest.pow(exponent - 1), 0)  # a zero matrix has no direction to shrink along

    square = unit.square() + eps**2
    ratio = square.pow(beta)
    a = torch.maximum(unit.unsqueeze(-1), unit.unsqueeze(-2))
    b = torch.minimum(unit.unsqueeze(-1), unit.unsqueeze(-2))
    z = (a - b) * (a + b) / (b.square() + eps**2)
    tie = z == 0
    growth = torch.where(tie, beta, torch.expm1(beta * torch.log1p(z)) / torch.where(tie, 1, z))
    b_square = b.square() + eps**2
    difference = (a.square() + eps**2).pow(beta) + b * (a + b) * b_square.pow(beta - 1) * growth

    weighted = unit * ratio
    total = unit.unsqueeze(-1) + unit.unsqueeze(-2)
    mean = (weighted.unsqueeze(-1) + weighted.unsqueeze(-2)) / torch.where(total == 0, 1, total)
    mean = torch.where(total == 0, eps ** (2 * beta), mean)
    return difference * scale.unsqueeze(-1), mean * scale.unsqueeze(-1), ratio * scale


class _SpectralPower(torch.autograd.Function):
    """`U diag(λ^α) Vᵀ` with the Daleckii-Krein derivative, right on any spectrum and bounded on all."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, exponent: float, eps: float, symmetric: bool) -> Tensor:
        left, values, right = _decompose(matrix, symmetric)
        ctx.save_for_backward(left, values, right)
        ctx.exponent, ctx.eps, ctx.symmetric = exponent, eps, symmetric
        return _power(left, values, right, exponent)

    @staticmethod
    @once_differentiable  # a second derivative would miss how U, λ and V move: refuse it
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        left, values, right = ctx.saved_tensors
        with autocast_off(grad):
            difference, mean, ratio = _slopes(values, ctx.exponent, ctx.eps)
            inner = left.mT @ grad @ right.mT  # T = Uᵀ G V
            middle = difference * (inner + inner.mT) / 2
            if not ctx.symmetric:
                middle = middle + mean * (inner - inner.mT) / 2
            result = left @ middle @ right
            rows, columns = grad.shape[-2:]
            if rows > columns:  # what U does not span
                result = result + ((grad @ right.mT - left @ inner) * ratio.unsqueeze(-2)) @ right
            elif rows < columns:  # what V does not span
                result = result + left @ (ratio.unsqueeze(-1) * (left.mT @ grad - inner @ right))
        return result, None, None, None


def _spectral_power(matrix: Tensor, exponent: float, eps: float, symmetric: bool) -> Tensor:
    full = at_least_float32(matrix)
    if torch.jit.is_scripting():
        left, values, right = _decompose(full, symmetric)
        result = _power(left, values, right, exponent)
    else:
        with autocast_off(full):
            result = _SpectralPower.apply(full, exponent, eps, symmetric)
    return result.to(matrix.dtype)


def singular_value_power_norm(matrix: Tensor, exponent: float = 0.5, eps: float = SLOPE_EPS) -> Tensor:
    """Exact svPN: `Σ λᵢ^α uᵢ vᵢᵀ` over all singular triples of the matrix.

    The value is exact. Its gradient is that of the smooth power with `ε = eps · λ₁`: indistinguishable from the
    true one for singular values above `10 ε`, bounded by `(eps · λ₁)^(α-1)` below, zero for a zero matrix.
    """
    if not torch.jit.is_scripting():
        _check(matrix, exponent)
    return _spectral_power(matrix, exponent, eps, False)


def matrix_power_norm(spd: Tensor, exponent: float = 0.5, eps: float | None = None) -> Tensor:
    """Exact power of symmetric positive semi-definite matrices `(..., n, n)`; the gradient as in svPN.

    Eigenvalues of a covariance are squares, so `eps` is too by default, but never below the rounding of its type.
    """
    if torch.jit.is_scripting():
        smooth = 0.0
    else:
        _check(spd, exponent, square=True)
        rounding = torch.finfo(at_least_float32(spd).dtype).eps
        smooth = max(SLOPE_EPS**2, 10 * rounding) if eps is None else eps
    return _spectral_power((spd + spd.mT) / 2, exponent, smooth, True)


# --- fast: few singular values, or Newton-Schulz ------------------------------------------------------------


def _unit(vector: Tensor, floor: Tensor) -> Tensor:
    """The vector over its length; zero, with a finite gradient, if it is no longer than `floor`."""
    length = torch.linalg.vector_norm(vector, dim=-2, keepdim=True)
    none = length <= floor  # false for NaN, which has to come through
    return torch.where(none, torch.zeros_like(vector), vector) / torch.where(none, torch.ones_like(length), length)


def _deflate(
    matrix: Tensor, start: Tensor, exponent: float, num_values: int, num_iterations: int, eps: float = SLOPE_EPS
) -> Tensor:
    floor = torch.zeros_like(matrix[..., :1, :1])  # below it a vector or value counts as zero
    scale = torch.ones_like(floor)
    normalized = torch.zeros_like(matrix)
    residual = matrix
    for k in range(num_values):
        # After a single iteration û ∝ Q v⁽⁰⁾, so the deflated matrix maps v⁽⁰⁾ to zero: start the next value elsewhere.
        right = (torch.roll(start, k) if num_iterations == 1 else start).unsqueeze(-1)  # v⁽⁰⁾ (n, 1)
        left = _unit(residual @ right, floor * torch.linalg.vector_norm(start))
        for _ in range(num_iterations - 1):
            left = _unit(residual @ _unit(residual.mT @ left, floor), floor)
        along = residual.mT @ left  # λ̂ v̂ (..., n, 1)
        value = torch.linalg.vector_norm(along, dim=-2, keepdim=True)
        none = value <= floor  # without it the rest is shrunk as by the value before
        scale = torch.where(none, scale, torch.where(none, torch.ones_like(value), value).pow(exponent - 1))
        if k == 0:
            floor = eps * value.detach()
        if k + 1 < num_values:
            component = left @ along.mT  # λ̂ û v̂ᵀ
            normalized = normalized + scale * component
            residual = residual - component
    return normalized + scale * residual


def fast_singular_value_power_norm(
    matrix: Tensor, start: Tensor, exponent: float = 0.5, num_values: int = 1, num_iterations: int = 1
) -> Tensor:
    """Approximate svPN from the `r = num_values` largest singular values, by power iteration and deflation.

    `Σ_{i<r} λ̂ᵢ^α ûᵢ v̂ᵢᵀ + λ̂ᵣ^(α-1) (Q - Σ_{i<r} λ̂ᵢ ûᵢ v̂ᵢᵀ)`, each value sought from `start (n,)`, or
    from `start` rolled by its index when there is a single iteration. With one value this is `Q / λ̂₁^(1-α)`.
    Gradients flow to the matrix and to `start`; a zero matrix stays zero.
    """
    if torch.jit.is_scripting():
        full = at_least_float32(matrix)
        result = _deflate(full, start.to(full.dtype), exponent, num_values, num_iterations)
    else:
        _check(matrix, exponent)
        check_positive(num_values=num_values, num_iterations=num_iterations)
        most = min(matrix.shape[-2:])
        if num_values > most:
            raise ValueError(f"num_values must be at most {most} for {tuple(matrix.shape)}, got {num_values}")
        if start.shape != matrix.shape[-1:]:
            raise ValueError(f"start must have shape ({matrix.shape[-1]},), got {tuple(start.shape)}")
        full = at_least_float32(matrix)
        with autocast_off(full):
            result = _deflate(full, start.to(full.dtype), exponent, num_values, num_iterations)
    return result.to(matrix.dtype)


def _newton_schulz(spd: Tensor, num_iterations: int) -> Tensor:
    trace = spd.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    trace = torch.where(trace == 0, torch.ones_like(trace), trace)  # a zero matrix stays zero
    identity = torch.eye(spd.shape[-1], dtype=spd.dtype, device=spd.device)
    root, inverse = spd / trace, identity
    for _ in range(num_iterations):
        step = 1.5 * identity - 0.5 * (inverse @ root)
        root, inverse = root @ step, step @ inverse
    return root * trace.sqrt()


def matrix_square_root(spd: Tensor, num_iterations: int = 5) -> Tensor:
    """iSQRT: square root of symmetric positive semi-definite `(..., n, n)` by coupled Newton-Schulz iteration.

    Divided by the trace before, multiplied by its root after: plain batched products, approximate for few iterations.
    """
    full = at_least_float32(spd)
    if torch.jit.is_scripting():
        result = _newton_schulz(full, num_iterations)
    else:
        _check(spd, 1.0, square=True)
        check_positive(num_iterations=num_iterations)
        with autocast_off(full):
            result = _newton_schulz(full, num_iterations)
    return result.to(spd.dtype)


def element_power_norm(matrix: Tensor, exponent: float = 0.5, eps: float = 1e-6) -> Tensor:
    """Signed power of each element, then each matrix divided by its Frobenius norm; smooth within `eps` of zero."""
    if not torch.jit.is_scripting():
        _check(matrix, exponent)
    full = at_least_float32(matrix)
    powered = full * (full.square() + eps**2).pow((exponent - 1) / 2)
    return F.normalize(powered.flatten(-2), dim=-1).view_as(full).to(matrix.dtype)
