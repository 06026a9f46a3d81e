"""The definition of fast svPN: the largest singular values by power iteration, equations 6 to 8 of the paper."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 1e-5  # share of λ̂₁ up to which a further singular value counts as zero


def power(matrix: Tensor, start: Tensor, exponent: float, num_values: int, num_iterations: int) -> Tensor:
    """`Σ_{i<r} λ̂ᵢ^α ûᵢ v̂ᵢᵀ + λ̂ᵣ^(α-1) (Q - Σ_{i<r} λ̂ᵢ ûᵢ v̂ᵢᵀ)` of `(..., m, n)`, from the vector `start (n,)`."""
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
            floor = SMALLEST * value.detach() * _cancellation(value, right, mapped)
        if k + 1 < num_values:
            component = left @ along.mT  # λ̂ û v̂ᵀ
            normalized = normalized + scale * component
            residual = residual - component
    return (normalized + scale * residual) * size.pow(exponent)


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
