"""Definitions to test against: the paper's formulae written out, slow and in float64."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT32 = 1e-7  # below this share of the largest a singular value is what rounding makes of a zero


def power_of_svd(matrix: Tensor, exponent: float, zero: float = 0.0) -> Tensor:
    """svPN; singular values up to `zero` of the largest count as zeros."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.where(values <= zero * values[..., :1], 0, values)
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


def gradient_of_smooth_power(matrix: Tensor, grad: Tensor, exponent: float, eps: float) -> Tensor:
    """The gradient of the smooth power `λ (λ² + ε²)^((α-1)/2)`, `ε = eps · λ₁`, of one matrix `(m >= n, n)`.

    With `f` that power, `T = UᵀGV`, `E = (fᵢ-fⱼ)/(λᵢ-λⱼ)` (`f'` on ties) and `F = (fᵢ+fⱼ)/(λᵢ+λⱼ)` it is
    `U (E∘sym(T) + F∘anti(T)) Vᵀ + (GV - UT) diag(f/λ) Vᵀ` (Daleckii and Krein). In float64, without ties.
    """
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    smooth = values.square() + (eps * values[0]) ** 2
    ratio = smooth.pow((exponent - 1) / 2)  # f/λ
    powers, slopes = values * ratio, ratio + (exponent - 1) * values.square() * smooth.pow((exponent - 3) / 2)
    gap = values[:, None] - values[None, :]
    difference = torch.where(gap == 0, slopes[:, None], (powers[:, None] - powers[None, :]) / gap.where(gap != 0, 1))
    mean = (powers[:, None] + powers[None, :]) / (values[:, None] + values[None, :])
    inner = left.mT @ grad @ right.mT
    middle = difference * (inner + inner.mT) / 2 + mean * (inner - inner.mT) / 2
    return (left @ middle + (grad @ right.mT - left @ inner) * ratio) @ right


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


torch.manual_seed(0)  # what follows is drawn while tests are collected: the same in every run
UGLY = {
    "zero": torch.zeros(6, 6),
    "identity": torch.eye(7),
    "negative": -torch.eye(3),
    "ones": torch.ones(14, 14),
    "one row": torch.ones(1, 5),
    "one column": torch.ones(5, 1),
    "one number": torch.full((1, 1), -3.0),
    "zero column": torch.eye(6)[:, [0, 1, 1, 2, 5, 5]] * torch.tensor([1.0, 1, 1, 0, 1, 0]),
    "tall": torch.randn(40, 5),
    "wide": torch.randn(5, 41),
    "tall and deficient": torch.randn(17, 2) @ torch.randn(2, 11),
    "repeated": with_spectrum(2, 2, 2, 1, 1, 0.5, 0.5).float(),
    "nearly repeated": with_spectrum(1, 1 - 1e-6, 1 - 1e-7, 0.5, 0.5 + 1e-6, 0.1).float(),
    "graded": with_spectrum(*[10.0**-k for k in range(6)]).float(),
    "scaled rows": torch.randn(12, 12) * torch.logspace(-3, 3, 12)[:, None],
    "large": torch.randn(4, 38, 38),
    "as large as it gets": torch.randn(4, 64, 64),
}
