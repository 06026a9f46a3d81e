"""svPN and its gradient by torch's own decompositions, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from sot.ops.svpn.reference import decompose, raise_values, zero_share
from sot.ops.svpn.slopes import relative, slopes

LEFT_EPS = 1e-7  # the rounding of float32: below this share of λ₁ a singular value of QᵀQ in float64 counts as zero
GPUS = ("cuda", "meta")  # what is counted without a GPU is counted as on one
BATCHED = 32  # up to here torch calls one routine of the GPU's library for the whole batch
Parts = tuple[Tensor, Tensor, Tensor]  # U (batch, m, k), λ (batch, k), Vᵀ (batch, k, n)


def power(matrix: Tensor, exponent: float, symmetric: bool) -> tuple[Tensor, Parts]:
    """`U diag(λ^α) Vᵀ` of `(batch, m >= n, n)`, and its parts."""
    gram = by_gram(matrix, symmetric)
    left, values, right = decompose_by_gram(matrix) if gram else decompose(matrix, symmetric)
    powers = raise_values(values, exponent, LEFT_EPS if gram else zero_share(matrix))
    return (left * powers.unsqueeze(-2)) @ right, (left, values, right)


def part_shapes(matrix: Tensor) -> tuple[tuple[int, ...], ...]:
    """Shapes of the parts of `(batch, m >= n, n)`."""
    batch, rows, columns = matrix.shape
    return (batch, rows, columns), (batch, columns), (batch, columns, columns)


def by_gram(matrix: Tensor, symmetric: bool) -> bool:
    """Whether QᵀQ is decomposed: in float64 it holds what float32 of Q does."""
    known = matrix.device.type == "cpu" or is_batched(matrix, symmetric)
    return matrix.dtype == torch.float32 and known and not symmetric


def is_batched(matrix: Tensor, symmetric: bool) -> bool:
    """Whether a GPU decomposes all of `(batch, m >= n, n)` in one call."""
    squares = symmetric or matrix.dtype == torch.float32  # by `eigh` of n × n, else by the SVD of m × n
    return matrix.device.type in GPUS and matrix.shape[2 if squares else 1] <= BATCHED


def one_by_one(matrix: Tensor, exponent: float, symmetric: bool) -> bool:
    """Whether torch would loop over the matrices on their device, or refuse them: a copy to the CPU costs less."""
    return matrix.device.type not in ("cpu", "meta") and not is_batched(matrix, symmetric)


def decompose_by_gram(matrix: Tensor) -> Parts:
    """As `decompose`, for float32: V from QᵀQ in float64, and U = QV/λ. Faster than the SVD, and closer."""
    double = matrix.double()
    gram = double.mT @ double
    finite = gram.diagonal(dim1=-2, dim2=-1).sum(-1).isfinite()[..., None, None]  # no square of a float32 overflows
    right = torch.linalg.eigh(torch.where(finite, gram, 0))[1]
    images = double @ right  # λᵢ uᵢ
    values = images.square().sum(-2, keepdim=True).sqrt()
    left = images / torch.where(values == 0, 1, values)
    return left.to(matrix.dtype), values.squeeze(-2).to(matrix.dtype), right.mT.to(matrix.dtype)


def pull_back(grad: Tensor, parts: Parts, exponent: float, eps: float, symmetric: bool) -> Tensor:
    """The gradient of `power`: `scale · (U (A∘T + B∘Tᵀ) + (GV - UT) diag(ratio)) Vᵀ`, `T = UᵀGV`."""
    left, values, right = parts
    gram = by_gram(left, symmetric)
    unit, ratio, scale = relative(values, exponent, eps)
    same, swapped = slopes(unit, exponent, eps)
    if gram:
        left = left * (unit > LEFT_EPS).unsqueeze(-2)
    mapped = torch.bmm(grad * scale.unsqueeze(-1), right.mT)  # G V
    inner = torch.bmm(left.mT, mapped)  # T
    if symmetric:
        inner = (inner + inner.mT) / 2
    middle = same * inner + swapped * inner.mT
    result = torch.bmm(left, middle)
    if gram or grad.shape[-2] > grad.shape[-1]:
        result = result + torch.baddbmm(mapped, left, inner, alpha=-1) * ratio.unsqueeze(-2)  # what U does not span
    return torch.bmm(result, right)
