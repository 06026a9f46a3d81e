"""The definition of svPN: every singular value of a matrix to the power α."""

from __future__ import annotations

import torch
from torch import Tensor


def power(matrix: Tensor, exponent: float, symmetric: bool = False) -> Tensor:
    """`Σ λᵢ^α uᵢ vᵢᵀ` of `(..., m, n)`; a bad number makes its own matrix NaN and no other."""
    left, values, right = decompose(matrix, symmetric)
    return (left * raise_values(values, exponent, zero_share(matrix)).unsqueeze(-2)) @ right


def decompose(matrix: Tensor, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """U `(..., m, k)`, λ >= 0 `(..., k)` and Vᵀ `(..., k, n)`; a matrix with a bad number has λ of NaN.

    A `symmetric` matrix is positive semi-definite, and what is below zero of its eigenvalues is rounding.
    """
    finite = matrix.isfinite().all(-1).all(-1)[..., None, None]
    solvable = torch.where(finite, matrix, torch.zeros_like(matrix))  # LAPACK refuses the whole batch otherwise
    if symmetric:
        wide = solvable.double() if matrix.device.type == "cpu" else solvable  # float32 of MKL fails at some of rank 1
        values, left = (part.to(matrix.dtype) for part in torch.linalg.eigh(wide))
        values, right = values.clamp_min(0), left.mT.clone()  # an operator may not return the same memory twice
    else:
        left, values, right = torch.linalg.svd(solvable, full_matrices=False)
    return left, torch.where(finite[..., 0], values, torch.full_like(values, float("nan"))), right


def raise_values(values: Tensor, exponent: float, zero: float) -> Tensor:
    """`λ^α`, but zero up to the share `zero` of the largest: of rounding, small powers would be seen."""
    return values.pow(exponent).masked_fill(values <= zero * values.amax(-1, keepdim=True), 0)


def zero_share(matrix: Tensor) -> float:
    """Below which share of the largest a decomposition cannot tell a singular value from zero, as `matrix_rank`."""
    return max(matrix.shape[-2], matrix.shape[-1]) * torch.finfo(matrix.dtype).eps
