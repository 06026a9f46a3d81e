"""Exact powers of singular values and eigenvalues, with gradients that are right on any spectrum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sot.core import simd
from sot.core.checks import check_exponent, check_matrix
from sot.core.precision import at_least_float32, autocast_off, is_eager

SLOPE_EPS = 1e-5  # below this share of λ₁ a singular value counts as zero for the gradient: docs/normalization.md
LEFT_EPS = 1e-7  # the rounding of float32: below this share of λ₁ a singular value of QᵀQ in float64 counts as zero


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


def _decompose_by_gram(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_decompose`, for float32: V from QᵀQ in float64, and U = QV/λ. Faster than the SVD, and closer."""
    double = matrix.double()
    gram = double.mT @ double
    finite = gram.diagonal(dim1=-2, dim2=-1).sum(-1).isfinite()[..., None, None]  # no square of a float32 overflows
    right = torch.linalg.eigh(torch.where(finite, gram, 0))[1]
    images = double @ right  # λᵢ uᵢ
    values = images.square().sum(-2, keepdim=True).sqrt()
    left = images / torch.where(values == 0, 1, values)
    return left.to(matrix.dtype), values.squeeze(-2).to(matrix.dtype), right.mT.to(matrix.dtype)


def _power(left: Tensor, values: Tensor, right: Tensor, exponent: float, zero: float) -> Tensor:
    """`U diag(λ^α) Vᵀ`; what is below `zero` of the largest is rounding, whose small powers would be seen."""
    powers = values.pow(exponent).masked_fill(values <= zero * values.amax(-1, keepdim=True), 0)
    return (left * powers.unsqueeze(-2)) @ right


def _rounding(matrix: Tensor) -> float:
    """Below which share of the largest the SVD cannot tell a singular value from zero: as `matrix_rank` has it."""
    eps = 2.2e-16 if matrix.dtype == torch.float64 else 1.2e-7  # TorchScript knows no finfo
    return max(matrix.shape[-2], matrix.shape[-1]) * eps


def _roots(unit: Tensor, exponent: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """What the slopes of α = ½ and ¼ are made of: s = (λ²+ε²)^(α/2), ε and λ over s, for ¼ over s³."""
    root = (unit.square() + eps**2).sqrt().sqrt()
    if exponent == 0.25:
        root = root.sqrt()
        cube = root.pow(3)
        return root, eps / cube, unit / cube
    return root, eps / root, unit / root


def _root_slopes(unit: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`_any_slopes` for α = ½ without powers of pairs: with s = (λ²+ε²)^¼ every difference of powers factors.

    A = (s²+t²+st + ε²/st) / ((s+t)(s²+t²)), B = -λμ / (st(s+t)(s²+t²)), where t and μ belong to the other index.
    """
    root, small, share = _roots(unit, 0.5, eps)
    square, columns = root.square(), root.unsqueeze(2)
    both = square.unsqueeze(2) + square.unsqueeze(1)
    inverse = both.mul(columns + root.unsqueeze(1)).reciprocal_()
    same = both.addcmul_(columns, root.unsqueeze(1)).addcmul_(small.unsqueeze(2), small.unsqueeze(1)).mul_(inverse)
    swapped = inverse.mul_(share.unsqueeze(2)).mul_(share.unsqueeze(1)).neg_()
    return same, swapped


def _quarter_slopes(unit: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`_any_slopes` for α = ¼ in the same way: with s = (λ²+ε²)^⅛, n = s²+st+t² and d = (s+t)(s²+t²)(s⁴+t⁴),

    A = (s⁴+s³t+s²t²+st³+t⁴ + ε²n/s³t³) / d and B = -λμ n / (s³t³ d).
    """
    root, small, share = _roots(unit, 0.25, eps)
    square = root.square()
    product = root.unsqueeze(2) * root.unsqueeze(1)
    squares = square.unsqueeze(2) + square.unsqueeze(1)
    fourths = squares.square().addcmul_(product, product, value=-2)
    inverse = (root.unsqueeze(2) + root.unsqueeze(1)).mul_(squares).mul_(fourths).reciprocal_()
    cubic = squares.add_(product)  # n
    quintic = fourths.addcmul_(product, cubic)  # s⁴+t⁴ + st(s²+st+t²)
    cubic.mul_(inverse)
    same = quintic.mul_(inverse).addcmul_(small.unsqueeze(2) * small.unsqueeze(1), cubic)
    return same, cubic.mul_(share.unsqueeze(2)).mul_(share.unsqueeze(1)).neg_()


def _any_slopes(unit: Tensor, exponent: float, eps: float) -> tuple[Tensor, Tensor]:
    """Divided differences `A`, `B (batch, k, k, ...)` of the smooth power `f(λ) = λ g(λ)`, `g = (λ² + ε²)^((α-1)/2)`.

    A = (E+F)/2 and B = (E-F)/2 of E = (fᵢ-fⱼ)/(λᵢ-λⱼ) and F = (fᵢ+fⱼ)/(λᵢ+λⱼ), so that E∘sym(T) + F∘anti(T) =
    A∘T + B∘Tᵀ. No case is special: with a >= b and z = (a²-b²)/(b²+ε²), E = g(a) + b(a+b) g(b)/(b²+ε²) ·
    ((1+z)^β - 1)/z, whose last factor tends to β on ties.
    """
    beta = (exponent - 1) / 2
    a = torch.maximum(unit.unsqueeze(2), unit.unsqueeze(1))
    b = torch.minimum(unit.unsqueeze(2), unit.unsqueeze(1))
    b_square = b.square() + eps**2
    z = (a - b) * (a + b) / b_square
    tie = z == 0
    growth = torch.where(tie, beta, torch.expm1(beta * torch.log1p(z)) / torch.where(tie, 1, z))
    difference = (a.square() + eps**2).pow(beta) + b * (a + b) * b_square.pow(beta - 1) * growth

    weighted = unit * (unit.square() + eps**2).pow(beta)
    total = unit.unsqueeze(2) + unit.unsqueeze(1)
    mean = (weighted.unsqueeze(2) + weighted.unsqueeze(1)) / torch.where(total == 0, 1, total)
    mean = torch.where(total == 0, eps ** (2 * beta), mean)
    return (difference + mean) / 2, (difference - mean) / 2


def _slopes(unit: Tensor, exponent: float, eps: float) -> tuple[Tensor, Tensor]:
    if exponent == 0.5:
        return _root_slopes(unit, eps)
    return _quarter_slopes(unit, eps) if exponent == 0.25 else _any_slopes(unit, exponent, eps)


def _relative(values: Tensor, exponent: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of singular values `(batch, k, ...)`: λ/λ₁, g(λ/λ₁), and λ₁^(α-1), to which the gradient is proportional.

    All is computed on λ/λ₁, so that no scale can overflow; a zero matrix has no direction to shrink along.
    """
    largest = values.amax(1, keepdim=True)
    alive = largest > torch.finfo(values.dtype).tiny
    unit = values / torch.where(alive, largest, 1)
    ratio = (unit.square() + eps**2).pow((exponent - 1) / 2)
    return unit, ratio, torch.where(alive, largest.pow(exponent - 1), 0)


class _SpectralPower(torch.autograd.Function):
    """`U diag(λ^α) Vᵀ` of `(batch, m >= n, n)` with the Daleckii-Krein derivative, right on any spectrum."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, exponent: float, eps: float, symmetric: bool, gram: bool) -> Tensor:
        left, values, right = _decompose_by_gram(matrix) if gram else _decompose(matrix, symmetric)
        ctx.save_for_backward(left, values, right)
        ctx.exponent, ctx.eps, ctx.symmetric, ctx.gram = exponent, eps, symmetric, gram
        return _power(left, values, right, exponent, LEFT_EPS if gram else _rounding(matrix))

    @staticmethod
    @once_differentiable  # a second derivative would miss how U, λ and V move: refuse it
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        left, values, right = ctx.saved_tensors
        with autocast_off(grad):
            unit, ratio, scale = _relative(values, ctx.exponent, ctx.eps)
            same, swapped = _slopes(unit, ctx.exponent, ctx.eps)
            grad = grad * scale.unsqueeze(-1)
            if ctx.gram:
                left = left * (unit > LEFT_EPS).unsqueeze(-2)
            mapped = torch.bmm(grad, right.mT)  # G V
            inner = torch.bmm(left.mT, mapped)  # T = Uᵀ G V
            if ctx.symmetric:
                inner = (inner + inner.mT) / 2
            middle = same.mul_(inner).addcmul_(swapped, inner.mT)
            if ctx.gram or grad.shape[-2] > grad.shape[-1]:
                outside = torch.baddbmm(mapped, left, inner, alpha=-1) * ratio.unsqueeze(-2)  # what U does not span
                result = torch.baddbmm(outside, left, middle)
            else:
                result = torch.bmm(left, middle)
        return torch.bmm(result, right), None, None, None, None


class _LanePower(torch.autograd.Function):
    """`_SpectralPower` of float32 on a CPU by compiled kernels."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, exponent: float, eps: float) -> Tensor:
        out, kept = simd.power(matrix, exponent, LEFT_EPS, keep=ctx.needs_input_grad[0])
        ctx.save_for_backward(*kept)
        ctx.exponent, ctx.eps = exponent, eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        kept, settings = ctx.saved_tensors, (ctx.exponent, ctx.eps)
        if ctx.exponent in (0.5, 0.25):
            return simd.pull_back(grad, kept, *settings), None, None
        unit, *factors = _relative(kept[1], *settings)
        return simd.pull_back(grad, kept, *settings, _slopes(unit, *settings), tuple(factors)), None, None


def _spectral_power(matrix: Tensor, exponent: float, eps: float, symmetric: bool) -> Tensor:
    full = at_least_float32(matrix)
    wide = full.shape[-2] < full.shape[-1]
    if wide:
        full = full.mT
    if torch.jit.is_scripting():
        left, values, right = _decompose(full, symmetric)
        result = _power(left, values, right, exponent, _rounding(full))
    else:
        # the Gram matrix in float64 holds what float32 of the matrix does; accelerators are slow at float64 or lack it
        gram = full.dtype == torch.float32 and full.device.type == "cpu" and eps >= SLOPE_EPS and not symmetric
        with autocast_off(full):
            flat = full.reshape(-1, full.shape[-2], full.shape[-1])
            if gram and is_eager() and simd.is_possible(flat):
                result = _LanePower.apply(flat, exponent, eps)
            else:
                result = _SpectralPower.apply(flat, exponent, eps, symmetric, gram)
            result = result.view(full.shape)
    if wide:
        result = result.mT
    return result.to(matrix.dtype)


def singular_value_power_norm(matrix: Tensor, exponent: float = 0.5, eps: float = SLOPE_EPS) -> Tensor:
    """Exact svPN: `Σ λᵢ^α uᵢ vᵢᵀ` over all singular triples of the matrix.

    The value is exact; singular values that rounding makes of zeros, below some 10⁻⁷ of the largest, count as zeros.
    Its gradient is that of the smooth power with `ε = eps · λ₁`: indistinguishable from the true one for singular
    values above `10 ε`, bounded by `(eps · λ₁)^(α-1)` below, zero for a zero matrix.
    """
    if not torch.jit.is_scripting():
        check_matrix(matrix)
        check_exponent(exponent)
    return _spectral_power(matrix, exponent, eps, False)


def matrix_power_norm(spd: Tensor, exponent: float = 0.5, eps: float | None = None) -> Tensor:
    """Exact power of symmetric positive semi-definite matrices `(..., n, n)`; the gradient as in svPN.

    Eigenvalues of a covariance are squares, so `eps` is too by default, but never below the rounding of its type.
    """
    if torch.jit.is_scripting():
        smooth = 0.0
    else:
        check_matrix(spd, square=True)
        check_exponent(exponent)
        rounding = torch.finfo(at_least_float32(spd).dtype).eps
        smooth = max(SLOPE_EPS**2, 10 * rounding) if eps is None else eps
    return _spectral_power((spd + spd.mT) / 2, exponent, smooth, True)
