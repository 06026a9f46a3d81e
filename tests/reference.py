"""Definitions to test against: the paper's formulae written out, slow and in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def power_of_svd(matrix: Tensor, exponent: float) -> Tensor:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ torch.diag_embed(values**exponent) @ right


def corollary_1(matrix: Tensor, grad: Tensor, exponent: float) -> Tensor:
    """The gradient of svPN as the paper's Corollary 1 states it, for one matrix."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    right = right.mT
    lam, powered = torch.diag(values), torch.diag(values**exponent)
    d_left = grad @ right @ powered
    d_right = grad.mT @ left @ powered
    d_values = exponent * torch.diag(values ** (exponent - 1)) @ left.mT @ grad @ right
    gap = values[:, None] ** 2 - values[None, :] ** 2
    k = torch.where(gap == 0, 0, 1 / gap)
    inverse = torch.diag(1 / values)
    inner = k.mT * (right.mT @ (d_right - right @ inverse @ d_left.mT @ left @ lam))
    middle = torch.diag(torch.diag(d_values - left.mT @ d_left @ inverse))
    return d_left @ inverse @ right.mT + left @ middle @ right.mT + left @ lam @ (inner + inner.mT) @ right.mT


def deflation(matrix: Tensor, starts: list[Tensor], exponent: float, num_iterations: int) -> Tensor:
    """Equations 6 to 8 for one matrix, one start vector for each singular value."""
    residual, result = matrix, torch.zeros_like(matrix)
    for index, start in enumerate(starts):
        v = start
        for _ in range(num_iterations):
            u = residual @ v / (residual @ v).norm()
            v = residual.T @ u / (residual.T @ u).norm()
        value = (residual.T @ u).norm()
        if index == len(starts) - 1:
            return result + residual / value ** (1 - exponent)
        result = result + value**exponent * torch.outer(u, v)
        residual = residual - value * torch.outer(u, v)
    raise AssertionError("no start vectors")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def with_spectrum(*values: float, rows: int | None = None, columns: int | None = None) -> Tensor:
    """A float64 matrix with these singular values and random singular vectors."""
    count = len(values)
    left = torch.linalg.qr(torch.randn(rows or count, count, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns or count, count, dtype=torch.float64))[0]
    return left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right.mT
