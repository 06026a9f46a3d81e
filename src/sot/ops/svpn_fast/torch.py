"""Fast svPN of one value and one iteration, `y = λ̂^(α-1) Q` with û ∝ Qv and λ̂v̂ = Qᵀû, and its gradient.

dQ = λ̂^(α-1) (G - (1-α) ⟨G,Q⟩/λ̂ (û v̂ᵀ + r vᵀ)) and dv = -(1-α) λ̂^(α-2) ⟨G,Q⟩ Qᵀr, r = (Qv̂ - λ̂û)/‖Qv‖.
Where û or v̂ does not exist it is zero, and so is its part of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GPUS = ("cuda", "meta")  # what is counted without a GPU is counted as on one
OWN_LOOPS = 400  # from so many numbers of a matrix on torch calls a library for its product with a vector
Parts = Sequence[Tensor]  # û, v̂, ‖Qv‖, λ̂ and λ̂^(α-1), each (batch, ., 1)


def power(matrix: Tensor, start: Tensor, exponent: float) -> tuple[Tensor, Parts]:
    """The power of `(batch, m, n)`, and what its gradient is made of."""
    mapped = (matrix.reshape(-1, start.shape[0]) @ start).view(*matrix.shape[:2], 1)  # Qv: one product for all
    length = _length(mapped)
    length.masked_fill_(length == 0, 1)
    left = mapped / length
    along = _apply_transposed(matrix, left)  # Qᵀû
    value = _length(along)
    value.masked_fill_(value == 0, 1)
    scale = value.pow(exponent - 1)
    return matrix * scale, (left, along / value, length, value, scale)


def pull_back(grad: Tensor, matrix: Tensor, start: Tensor, parts: Parts, exponent: float) -> tuple[Tensor, Tensor]:
    """Gradients of the matrix and of the start vector."""
    left, right, length, value, scale = parts
    # lengths divide what is as small as they are before anything is multiplied: no scale overflows
    weight = (grad * matrix).sum((-2, -1), keepdim=True).div_(value).mul_(scale).mul_(exponent - 1)
    drift = _apply(matrix, right).addcmul_(value, left, value=-1).div_(length).mul_(weight)  # r, weighted
    d_matrix = (grad * scale).addcmul_(weight * left, right.mT).addcmul_(drift, start)
    d_start = matrix.reshape(-1, start.shape[0]).mT @ drift.flatten()
    return d_matrix, d_start


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    """Each matrix times its vector `(batch, n, 1)`."""
    if _on_gpu(matrix) or _is_small(matrix):
        return torch.bmm(matrix, vector)
    return (matrix * vector.mT).sum(2, keepdim=True)


def _apply_transposed(matrix: Tensor, vector: Tensor) -> Tensor:
    """Each matrix transposed, times its vector `(batch, m, 1)`."""
    if _on_gpu(matrix):
        return torch.bmm(matrix.mT, vector)
    if _is_small(matrix):
        return (matrix * vector).sum(1).unsqueeze(2)
    return torch.bmm(vector.mT, matrix).mT


def _is_small(matrix: Tensor) -> bool:
    """Whether torch takes loops of its own on a CPU. They are fast along rows; the library it takes else, across."""
    return matrix.shape[1] * matrix.shape[2] < OWN_LOOPS


def _on_gpu(tensor: Tensor) -> bool:
    """Whether few launches count, and there is float64."""
    return tensor.device.type in GPUS


def _length(vector: Tensor) -> Tensor:
    """Euclidean length over dimension -2, kept; scaled, so that no square overflows or vanishes."""
    if _on_gpu(vector) and vector.dtype == torch.float32:  # one pass: no square of a float32 leaves float64
        return torch.linalg.vector_norm(vector, dim=-2, keepdim=True, dtype=torch.float64).float()
    scale = vector.abs().amax(-2, keepdim=True).clamp_min_(torch.finfo(vector.dtype).tiny)  # no division by zero
    return torch.linalg.vector_norm(vector / scale, dim=-2, keepdim=True).mul_(scale)
