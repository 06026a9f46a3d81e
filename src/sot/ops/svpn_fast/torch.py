"""Fast svPN of one value and one iteration, `y = λ̂^(α-1) Q` with û ∝ Qv and λ̂v̂ = Qᵀû, and its gradient.

dQ = λ̂^(α-1) (G - (1-α) ⟨G,Q⟩/λ̂ (û v̂ᵀ + r vᵀ)) and dv = -(1-α) λ̂^(α-2) ⟨G,Q⟩ Qᵀr, r = (Qv̂ - λ̂û)/‖Qv‖.
Where û or v̂ does not exist it is zero, and so is its part of the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

Parts = tuple[Tensor, ...]  # û, v̂, ‖Qv‖, λ̂ and λ̂^(α-1), each (batch, ., 1)


def power(matrix: Tensor, start: Tensor, exponent: float) -> tuple[Tensor, Parts]:
    """The power of `(batch, m, n)`, and what its gradient is made of."""
    mapped = (matrix.reshape(-1, start.shape[0]) @ start).view(*matrix.shape[:2], 1)  # Qv: one product for all
    length = _length(mapped)
    length = torch.where(length == 0, torch.ones_like(length), length)
    left = mapped / length
    along = (matrix * left).sum(1).unsqueeze(-1)  # Qᵀû; a batch of small products with vectors would take longer
    value = _length(along)
    value = torch.where(value == 0, torch.ones_like(value), value)
    scale = value.pow(exponent - 1)
    return matrix * scale, (left, along / value, length, value, scale)


def pull_back(grad: Tensor, matrix: Tensor, start: Tensor, parts: Parts, exponent: float) -> tuple[Tensor, Tensor]:
    """Gradients of the matrix and of the start vector."""
    left, right, length, value, scale = parts
    # lengths divide what is as small as they are before anything is multiplied: no scale overflows
    weight = (1 - exponent) * scale * ((grad * matrix).sum((-2, -1), keepdim=True) / value)
    mapped = (matrix * right.mT).sum(2, keepdim=True)  # Qv̂
    drift = weight * ((mapped - value * left) / length)  # r, weighted
    d_matrix = (grad * scale).addcmul_(weight * left, right.mT, value=-1).addcmul_(drift, start, value=-1)
    d_start = -(matrix.reshape(-1, start.shape[0]).mT @ drift.flatten())
    return d_matrix, d_start


def _length(vector: Tensor) -> Tensor:
    """Euclidean length over dimension -2, kept; scaled, so that no square overflows or vanishes."""
    largest = vector.detach().abs().amax(-2, keepdim=True)
    scale = torch.where(largest == 0, torch.ones_like(largest), largest)
    return torch.linalg.vector_norm(vector / scale, dim=-2, keepdim=True) * scale
