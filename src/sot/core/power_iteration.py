"""Fast svPN: the largest singular values by power iteration, equations 6 to 8 of the paper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sot.core.checks import check_exponent, check_matrix, check_positive
from sot.core.precision import at_least_float32, autocast_off, is_eager
from sot.core.spectral import SLOPE_EPS


def _length(vector: Tensor) -> Tensor:
    """Euclidean length over dimension -2, kept; scaled, so that no square overflows or vanishes."""
    largest = vector.detach().abs().amax(-2, keepdim=True)
    scale = torch.where(largest == 0, torch.ones_like(largest), largest)
    return torch.linalg.vector_norm(vector / scale, dim=-2, keepdim=True) * scale


def _unit(vector: Tensor, floor: Tensor) -> Tensor:
    """The vector over its length; zero, with a finite gradient, if it is no longer than `floor`."""
    length = torch.linalg.vector_norm(vector, dim=-2, keepdim=True)
    none = length <= floor  # false for NaN, which has to come through
    return torch.where(none, torch.zeros_like(vector), vector) / torch.where(none, torch.ones_like(length), length)


def _cancellation(value: Tensor, right: Tensor, mapped: Tensor) -> Tensor:
    """How many times its rounding the image of a vector has lost: many where that is almost orthogonal to the rows."""
    length = torch.linalg.vector_norm(mapped.detach(), dim=-2, keepdim=True)
    whole = value.detach() * torch.linalg.vector_norm(right.detach(), dim=-2, keepdim=True)
    return torch.where(length < whole, whole / length, torch.ones_like(whole))


def _deflate(
    matrix: Tensor, start: Tensor, exponent: float, num_values: int, num_iterations: int, eps: float = SLOPE_EPS
) -> Tensor:
    size = matrix.detach().abs().amax((-2, -1), keepdim=True)  # taken out, so that no square overflows or vanishes
    size = torch.where(size == 0, torch.ones_like(size), size)
    floor = torch.zeros_like(size)  # below it a vector or value counts as zero
    scale = torch.ones_like(size)
    normalized = torch.zeros_like(matrix)
    residual = matrix / size
    for k in range(num_values):
        # After a single iteration û ∝ Q v⁽⁰⁾, so the deflated matrix maps v⁽⁰⁾ to zero: start the next value elsewhere.
        right = (torch.roll(start, k) if num_iterations == 1 else start).unsqueeze(-1)  # v⁽⁰⁾ (n, 1)
        mapped = residual @ right
        left = _unit(mapped, floor * torch.linalg.vector_norm(start))
        for _ in range(num_iterations - 1):
            right = _unit(residual.mT @ left, floor)
            mapped = residual @ right
            left = _unit(mapped, floor)
        along = residual.mT @ left  # λ̂ v̂ (..., n, 1)
        value = torch.linalg.vector_norm(along, dim=-2, keepdim=True)
        none = value <= floor  # without it the rest is shrunk as by the value before
        scale = torch.where(none, scale, torch.where(none, torch.ones_like(value), value).pow(exponent - 1))
        if k == 0:
            floor = eps * value.detach() * _cancellation(value, right, mapped)
        if k + 1 < num_values:
            component = left @ along.mT  # λ̂ û v̂ᵀ
            normalized = normalized + scale * component
            residual = residual - component
    return (normalized + scale * residual) * size.pow(exponent)


class _LargestValuePower(torch.autograd.Function):
    """`_deflate` for one value and one iteration, `y = λ̂^(α-1) Q` with û ∝ Qv and λ̂v̂ = Qᵀû, on `(batch, m, n)`.

    dQ = λ̂^(α-1) (G - (1-α) ⟨G,Q⟩/λ̂ (û v̂ᵀ + r vᵀ)) and dv = -(1-α) λ̂^(α-2) ⟨G,Q⟩ Qᵀr, r = (Qv̂ - λ̂û)/‖Qv‖.
    Where û or v̂ does not exist it is zero, and so is its part of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, start: Tensor, exponent: float) -> Tensor:
        mapped = (matrix.reshape(-1, start.shape[0]) @ start).view(*matrix.shape[:2], 1)  # Qv: one product for all
        length = _length(mapped)
        length = torch.where(length == 0, torch.ones_like(length), length)
        left = mapped / length
        along = (matrix * left).sum(1).unsqueeze(-1)  # Qᵀû; a batch of small products with vectors would take longer
        value = _length(along)
        value = torch.where(value == 0, torch.ones_like(value), value)
        scale = value.pow(exponent - 1)
        ctx.save_for_backward(matrix, start, left, along / value, length, value, scale)
        ctx.exponent = exponent
        return matrix * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        matrix, start, left, right, length, value, scale = ctx.saved_tensors
        with autocast_off(grad):
            if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the definition
                output = _deflate(matrix, start, ctx.exponent, 1, 1)
                d_matrix, d_start = torch.autograd.grad(output, (matrix, start), grad, create_graph=True)
                return d_matrix, d_start, None
            # lengths divide what is as small as they are before anything is multiplied: no scale overflows
            weight = (1 - ctx.exponent) * scale * ((grad * matrix).sum((-2, -1), keepdim=True) / value)
            mapped = (matrix * right.mT).sum(2, keepdim=True)  # Qv̂
            drift = weight * ((mapped - value * left) / length)  # r, weighted
            d_matrix = (grad * scale).addcmul_(weight * left, right.mT, value=-1).addcmul_(drift, start, value=-1)
            d_start = -(matrix.reshape(-1, start.shape[0]).mT @ drift.flatten())
        return d_matrix, d_start, None


def fast_singular_value_power_norm(
    matrix: Tensor, start: Tensor, exponent: float = 0.5, num_values: int = 1, num_iterations: int = 1
) -> Tensor:
    """Approximate svPN from the `r = num_values` largest singular values, by power iteration and deflation.

    `Σ_{i<r} λ̂ᵢ^α ûᵢ v̂ᵢᵀ + λ̂ᵣ^(α-1) (Q - Σ_{i<r} λ̂ᵢ ûᵢ v̂ᵢᵀ)`, each value sought from `start (n,)`, or
    from `start` rolled by its index when there is a single iteration. With one value this is `Q / λ̂₁^(1-α)`.
    Gradients flow to the matrix and to `start`; a zero matrix stays zero.
    """
    full = at_least_float32(matrix)
    if torch.jit.is_scripting():
        result = _deflate(full, start.to(full.dtype), exponent, num_values, num_iterations)
    else:
        _check(matrix, start, exponent, num_values, num_iterations)
        with autocast_off(full):
            if num_values == num_iterations == 1 and is_eager():
                flat = full.reshape(-1, *full.shape[-2:])
                result = _LargestValuePower.apply(flat, start.to(full.dtype), exponent).view(full.shape)
            else:
                result = _deflate(full, start.to(full.dtype), exponent, num_values, num_iterations)
    return result.to(matrix.dtype)


def _check(matrix: Tensor, start: Tensor, exponent: float, num_values: int, num_iterations: int) -> None:
    check_matrix(matrix)
    check_exponent(exponent)
    check_positive(num_values=num_values, num_iterations=num_iterations)
    most = min(matrix.shape[-2:])
    if num_values > most:
        raise ValueError(f"num_values must be at most {most} for {tuple(matrix.shape)}, got {num_values}")
    if start.shape != matrix.shape[-1:]:
        raise ValueError(f"start must have shape ({matrix.shape[-1]},), got {tuple(start.shape)}")
