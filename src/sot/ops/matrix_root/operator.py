"""The operator `sot::matrix_root`: square roots of covariances by Newton-Schulz iteration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sot.ops.library import define
from sot.ops.matrix_root import numba, reference
from sot.ops.matrix_root import torch as by_torch
from sot.ops.precision import at_least_float32, autocast_off
from sot.ops.registry import Operator, anything, log_once

MATRIX_ROOT = Operator({"numba": numba.accepts, "torch": anything, "reference": anything})


def _compute(spd: Tensor, num_iterations: int, backend: str) -> tuple[Tensor, list[Tensor]]:
    log_once("matrix_root", backend)
    if backend == "numba":
        return numba.square_root(spd, num_iterations), []
    return by_torch.square_root(spd, num_iterations)


def _fake(spd: Tensor, num_iterations: int, backend: str) -> tuple[Tensor, list[Tensor]]:
    return spd.new_empty(spd.shape), [] if backend == "numba" else by_torch.make_states(spd, num_iterations)


def _flops(shape: Any, num_iterations: int, *args: Any, **kwargs: Any) -> int:
    return 2 * shape[0] * shape[1] ** 3 * (3 * num_iterations - 3 + (num_iterations == 1))


_root = define(
    "matrix_root(Tensor spd, int num_iterations, str backend) -> (Tensor, Tensor[])", _compute, _fake, _flops
)


def _compute_gradient(spd: Tensor, grad: Tensor, kept: list[Tensor], num_iterations: int, backend: str) -> Tensor:
    if backend == "numba":
        return numba.pull_back(spd, grad, num_iterations)
    return by_torch.pull_back(spd, grad, kept, num_iterations)


_gradient = define(
    "matrix_root_backward(Tensor spd, Tensor grad, Tensor[] kept, int num_iterations, str backend) -> Tensor",
    _compute_gradient,
    lambda spd, grad, kept, num_iterations, backend: spd.new_empty(spd.shape),
    lambda shape, grad, kept, num_iterations, *args, **kwargs: 2 * _flops(shape, num_iterations),
)


class SquareRoot(torch.autograd.Function):
    """The root of `(batch, n, n)`."""

    @staticmethod
    def forward(ctx: Any, spd: Tensor, num_iterations: int, backend: str) -> Tensor:
        out, kept = _root(spd, num_iterations, backend)
        ctx.save_for_backward(spd, *kept)
        ctx.settings = num_iterations, backend
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        spd, *kept = ctx.saved_tensors
        with autocast_off(grad):
            if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the definition
                output = reference.square_root(spd, ctx.settings[0])
                return torch.autograd.grad(output, spd, grad, create_graph=True)[0], None, None
            return _gradient(spd, grad, kept, *ctx.settings), None, None


def matrix_root(spd: Tensor, num_iterations: int) -> Tensor:
    """The square root of `(..., n, n)` in at least float32."""
    full = at_least_float32(spd)
    with autocast_off(full):
        backend = MATRIX_ROOT.choose(full)
        if backend == "reference":
            result = reference.square_root(full, num_iterations)
        else:
            result = SquareRoot.apply(full.reshape(-1, *full.shape[-2:]), num_iterations, backend).view(full.shape)
    return result.to(spd.dtype)


def root_of_product(rows: Tensor, num_iterations: int) -> Tensor:
    """`matrix_root` of `RᵀR (..., n, n)` for R `(..., tokens, n)`, by the smaller product `RRᵀ`."""
    full = at_least_float32(rows)
    with autocast_off(full):
        return reference.root_of_product(full, num_iterations).to(rows.dtype)
