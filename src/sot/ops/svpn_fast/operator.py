"""The operator `sot::svpn_fast`: svPN by the largest singular value that power iteration finds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sot.ops.library import define
from sot.ops.precision import at_least_float32, autocast_off
from sot.ops.registry import Operator, anything, log_once
from sot.ops.svpn_fast import reference
from sot.ops.svpn_fast import torch as by_torch

SVPN_FAST = Operator(
    {"torch": lambda num_values, num_iterations: num_values == num_iterations == 1, "reference": anything}
)


def _compute(matrix: Tensor, start: Tensor, exponent: float) -> tuple[Tensor, ...]:
    log_once("svpn_fast", "torch")
    out, parts = by_torch.power(matrix, start, exponent)
    return out, *parts


def _fake(matrix: Tensor, start: Tensor, exponent: float) -> tuple[Tensor, ...]:
    batch, rows, columns = matrix.shape
    return matrix.new_empty(matrix.shape), *(matrix.new_empty(batch, size, 1) for size in (rows, columns, 1, 1, 1))


_power = define(
    "svpn_fast(Tensor matrix, Tensor start, float exponent) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    lambda shape, *args, **kwargs: 4 * shape[0] * shape[1] * shape[2],
)


_gradient = define(
    "svpn_fast_backward(Tensor grad, Tensor matrix, Tensor start, Tensor[] parts, float exponent) -> (Tensor, Tensor)",
    by_torch.pull_back,
    lambda grad, matrix, start, parts, exponent: (grad.new_empty(grad.shape), start.new_empty(start.shape)),
    lambda shape, *args, **kwargs: 6 * shape[0] * shape[1] * shape[2],
)


class LargestValuePower(torch.autograd.Function):
    """`λ̂₁^(α-1) Q` of `(batch, m, n)`."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, start: Tensor, exponent: float) -> Tensor:
        out, *parts = _power(matrix, start, exponent)
        ctx.save_for_backward(matrix, start, *parts)
        ctx.exponent = exponent
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        matrix, start, *parts = ctx.saved_tensors
        with autocast_off(grad):
            if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the definition
                output = reference.power(matrix, start, ctx.exponent, 1, 1)
                return *torch.autograd.grad(output, (matrix, start), grad, create_graph=True), None  # type: ignore[return-value]
            return *_gradient(grad, matrix, start, parts, ctx.exponent), None


def svpn_fast(matrix: Tensor, start: Tensor, exponent: float, num_values: int, num_iterations: int) -> Tensor:
    """Approximate svPN of `(..., m, n)` in at least float32, from the `num_values` largest singular values."""
    full = at_least_float32(matrix)
    start = start.to(full.dtype)
    with autocast_off(full):
        if SVPN_FAST.choose(num_values, num_iterations) == "torch":
            flat = full.reshape(-1, *full.shape[-2:])
            result = LargestValuePower.apply(flat, start, exponent).view(full.shape)
        else:
            result = reference.power(full, start, exponent, num_values, num_iterations)
    return result.to(matrix.dtype)
