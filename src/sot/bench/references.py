"""The published formulae step by step, as the yardstick: written for likeness to the authors' steps, not for speed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def svd_power(matrix: Tensor, exponent: float = 0.5) -> Tensor:
    """Exact svPN of `(batch, m, n)` through SVD, its gradient through torch's autograd of SVD."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ torch.diag_embed(values.pow(exponent)) @ right


def deflated_power(
    matrix: Tensor, start: Tensor, exponent: float = 0.5, num_values: int = 1, num_iterations: int = 1
) -> Tensor:
    """Fast svPN of `(batch, m, n)`: every component found is taken out, the rest divided, the components put back."""
    batch, rows, columns = matrix.shape
    lefts, rights = matrix.new_zeros(batch, rows, num_values), matrix.new_zeros(batch, columns, num_values)
    values = matrix.new_zeros(batch, num_values, num_values)
    rest = matrix
    value = values[:, :1, :1]
    for k in range(num_values):
        right = start.view(1, columns, 1).expand(batch, columns, 1)
        left = right
        for _ in range(num_iterations):
            left = F.normalize(torch.bmm(rest, right), dim=1)
            right = F.normalize(torch.bmm(rest.transpose(1, 2), left), dim=1)
        value = torch.bmm(torch.bmm(left.transpose(1, 2), rest), right)
        lefts[:, :, k], values[:, k, k], rights[:, :, k] = left[..., 0], value[:, 0, 0], right[..., 0]
        rest = rest - torch.bmm(torch.bmm(left, value), right.transpose(1, 2))
    powered = torch.bmm(torch.bmm(lefts, values.pow(exponent)), rights.transpose(1, 2))
    return powered + rest / (value.pow(1 - exponent) + 1e-5)


class _PublishedRoot(torch.autograd.Function):
    """iSQRT-COV as published: every iterate kept in one array, the backward written out, the trace sample by sample."""

    @staticmethod
    def forward(ctx: Any, spd: Tensor, num_iterations: int) -> Tensor:
        batch, size, last = spd.shape[0], spd.shape[1], num_iterations - 2
        three = 3 * torch.eye(size, dtype=spd.dtype, device=spd.device).repeat(batch, 1, 1)
        trace = (spd * three).sum((1, 2)) / 3
        unit = spd / trace.view(batch, 1, 1)
        roots = spd.new_zeros(batch, num_iterations, size, size)
        inverses = torch.eye(size, dtype=spd.dtype, device=spd.device).repeat(batch, num_iterations, 1, 1)
        step = 0.5 * (three - unit)
        roots[:, 0], inverses[:, 0] = torch.bmm(unit, step), step
        for k in range(1, num_iterations - 1):
            step = 0.5 * (three - torch.bmm(inverses[:, k - 1], roots[:, k - 1]))
            roots[:, k], inverses[:, k] = torch.bmm(roots[:, k - 1], step), torch.bmm(step, inverses[:, k - 1])
        result = 0.5 * torch.bmm(roots[:, last], three - torch.bmm(inverses[:, last], roots[:, last]))
        ctx.save_for_backward(spd, unit, result, trace, roots, inverses)
        return result * trace.sqrt().view(batch, 1, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        spd, unit, result, trace, roots, inverses = ctx.saved_tensors
        batch, count, size = roots.shape[:3]
        three = 3 * torch.eye(size, dtype=spd.dtype, device=spd.device).repeat(batch, 1, 1)
        scaled = grad * trace.sqrt().view(batch, 1, 1)
        of_root = (grad * result).sum((1, 2)) / (2 * trace.sqrt())
        y, z = roots[:, count - 2], inverses[:, count - 2]
        d_y = 0.5 * (torch.bmm(scaled, three - torch.bmm(y, z)) - torch.bmm(torch.bmm(z, y), scaled))
        d_z = -0.5 * torch.bmm(torch.bmm(y, scaled), y)
        for k in range(count - 3, -1, -1):
            y, z = roots[:, k], inverses[:, k]
            rest, both = three - torch.bmm(y, z), torch.bmm(z, y)
            previous = torch.bmm(d_y, rest) - torch.bmm(torch.bmm(z, d_z), z) - torch.bmm(both, d_y)
            d_z = 0.5 * (torch.bmm(rest, d_z) - torch.bmm(torch.bmm(y, d_y), y) - torch.bmm(d_z, both))
            d_y = 0.5 * previous
        d_unit = 0.5 * (torch.bmm(d_y, three - unit) - d_z - torch.bmm(unit, d_y))
        d_unit = d_unit.transpose(1, 2)
        result = d_unit / trace.view(batch, 1, 1)
        along = (d_unit * spd).sum((1, 2))
        for i in range(batch):
            result[i] += (of_root[i] - along[i] / trace[i] ** 2) * torch.ones(
                size, dtype=spd.dtype, device=spd.device
            ).diag()
        return result, None


def published_root(spd: Tensor, num_iterations: int = 5) -> Tensor:
    """Square root of covariances `(batch, n, n)` by the published coupled iteration, of at least 2 steps."""
    return _PublishedRoot.apply(spd, num_iterations)


def published_covariance(left: Tensor, right: Tensor, center: bool) -> Tensor:
    """`XᵀY / q` of `(batch, q, m)` and `(batch, q, n)`; `center` subtracts one mean over tokens and channels."""
    if center:
        left = left - F.adaptive_avg_pool2d(left, 1)
        right = right - F.adaptive_avg_pool2d(right, 1)
    return torch.bmm(left.transpose(1, 2), right) / left.shape[1]


class PublishedHead(nn.Module):
    """Class token and word tokens to logits, summed: tokens projected, copied by head, centred, normalised."""

    def __init__(self, dim: int, num_classes: int, heads: int, head_dim: int, center: bool = True) -> None:
        super().__init__()
        self.heads, self.head_dim, self.center = heads, head_dim, center
        self.projection = nn.Linear(dim, 2 * heads * head_dim, bias=False)
        self.start = nn.Parameter(torch.randn(head_dim))
        self.word_linear = nn.Linear(heads * head_dim**2, num_classes)
        self.class_linear = nn.Linear(dim, num_classes)

    def forward(self, class_token: Tensor, word_tokens: Tensor) -> Tensor:
        batch, count, _ = word_tokens.shape
        projected = self.projection(word_tokens).reshape(batch, count, 2, self.heads, self.head_dim)
        left, right = projected.permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, head_dim) each
        left = left.reshape(batch * self.heads, count, self.head_dim)
        right = right.reshape(batch * self.heads, count, self.head_dim)
        normalized = deflated_power(published_covariance(left, right, self.center), self.start)
        return self.class_linear(class_token) + self.word_linear(normalized.reshape(batch, -1))
