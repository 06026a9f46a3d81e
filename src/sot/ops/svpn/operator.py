"""The operator `sot::svpn`: exact powers of singular values, with gradients that are right on any spectrum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sot.ops.library import define
from sot.ops.precision import at_least_float32, autocast_off
from sot.ops.registry import Operator, anything, log_once
from sot.ops.svpn import export, numba, reference
from sot.ops.svpn import torch as by_torch
from sot.ops.svpn import triton as by_triton

SVPN = Operator(
    {
        "numba": numba.accepts,
        "triton": by_triton.accepts,
        "host": by_torch.one_by_one,
        "torch": anything,
        "export": lambda matrix, exponent, symmetric: exponent in export.ROOTS and not symmetric,
        "reference": anything,
    },
    exported=("export", "reference"),
    transformed="torch",
)


def _compute(matrix: Tensor, exponent: float, symmetric: bool, keep: bool, backend: str) -> tuple[Tensor, ...]:
    log_once("svpn", backend)
    if backend == "numba":
        out, parts = numba.power(matrix, exponent, keep)
    elif backend == "triton":
        out, parts = by_triton.power(matrix, exponent)
    else:
        out, parts = by_torch.power(matrix, exponent, symmetric)
    if not keep or parts is None:
        return out, *_nothing(matrix)
    return out, *(part.contiguous() for part in parts)  # as `_fake` has them; LAPACK gives columns


def _nothing(matrix: Tensor) -> tuple[Tensor, ...]:
    return tuple(matrix.new_empty(0) for _ in range(3))


def _fake(matrix: Tensor, exponent: float, symmetric: bool, keep: bool, backend: str) -> tuple[Tensor, ...]:
    shapes = numba.part_shapes(matrix) if backend == "numba" else by_torch.part_shapes(matrix)
    parts = (matrix.new_empty(shape) for shape in shapes) if keep else _nothing(matrix)
    return matrix.new_empty(matrix.shape), *parts


def _flops(shape: Any, *args: Any, **kwargs: Any) -> int:
    """Gram matrix, images and power; of the decomposition, which iterates, nothing."""
    batch, rows, columns = shape
    return 6 * batch * rows * columns * columns


_power = define(
    "svpn(Tensor matrix, float exponent, bool symmetric, bool keep, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    _flops,
)


def _compute_gradient(
    grad: Tensor,
    left: Tensor,
    values: Tensor,
    right: Tensor,
    exponent: float,
    eps: float,
    symmetric: bool,
    backend: str,
) -> Tensor:
    if backend == "numba":
        return numba.pull_back(grad, (left, values, right), exponent, eps)
    if backend == "triton":
        return by_triton.pull_back(grad, (left, values, right), exponent, eps)
    return by_torch.pull_back(grad, (left, values, right), exponent, eps, symmetric)


_gradient = define(
    "svpn_backward(Tensor grad, Tensor left, Tensor values, Tensor right, float exponent, float eps, bool symmetric,"
    " str backend) -> Tensor",
    _compute_gradient,
    lambda grad, *args: grad.new_empty(grad.shape),
    lambda shape, *args, **kwargs: 8 * shape[0] * shape[1] * shape[2] ** 2,
)


class SingularValuePower(torch.autograd.Function):
    """`U diag(λ^α) Vᵀ` of `(batch, m >= n, n)`, with the Daleckii-Krein derivative."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, exponent: float, eps: float, symmetric: bool, backend: str) -> Tensor:
        out, *parts = _power(matrix, exponent, symmetric, True, backend)
        ctx.save_for_backward(matrix, *parts)
        ctx.settings = exponent, eps, symmetric, backend
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *of_parts: Tensor) -> tuple[Tensor | None, ...]:
        matrix, *parts = ctx.saved_tensors
        with autocast_off(grad):
            if torch.is_grad_enabled():  # so that whoever differentiates again is told
                return FirstDerivative.apply(matrix, grad, *parts, *ctx.settings), *[None] * 4
            return _gradient(grad, *parts, *ctx.settings), *[None] * 4


class TransformedPower(torch.autograd.Function):
    """The same and its parts, as torch.func wants it, which takes longer."""

    @staticmethod
    def forward(matrix: Tensor, exponent: float, eps: float, symmetric: bool, backend: str) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = _power(matrix, exponent, symmetric, True, backend)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        matrix, *ctx.settings = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(matrix, *output[1:])

    backward = SingularValuePower.backward

    @staticmethod
    def vmap(info: Any, in_dims: Any, matrix: Tensor, *settings: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """A further batch dimension; the parts keep the batch first, as those of the backend `torch` have it."""
        merged = matrix.movedim(in_dims[0], 0).flatten(0, 1)
        results = TransformedPower.apply(merged, *settings)
        return tuple(result.unflatten(0, (info.batch_size, -1)) for result in results), (0,) * len(results)


class FirstDerivative(torch.autograd.Function):
    """The gradient of `SingularValuePower` as something that has none: it would miss how U, λ and V move."""

    @staticmethod
    def forward(matrix: Tensor, grad: Tensor, *parts_and_settings: Any) -> Tensor:
        return _gradient(grad, *parts_and_settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError("exact svPN has a first derivative only: take svpn_fast where a second one is needed")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        """A further batch dimension of all tensors."""

        def merge(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            batched = value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            return batched.flatten(0, 1)

        merged = map(merge, arguments, in_dims)
        return FirstDerivative.apply(*merged).unflatten(0, (info.batch_size, -1)), 0


def svpn(matrix: Tensor, exponent: float, eps: float, symmetric: bool = False) -> Tensor:
    """`Σ λᵢ^α uᵢ vᵢᵀ` of `(..., m, n)` in at least float32; the gradient is that of the smooth power."""
    full = at_least_float32(matrix)
    wide = full.shape[-2] < full.shape[-1]
    tall = full.mT if wide else full
    with autocast_off(full):
        flat = tall.reshape(-1, tall.shape[-2], tall.shape[-1])
        backend = SVPN.choose(flat, exponent, symmetric)
        if backend == "host":
            if not torch.compiler.is_compiling():
                log_once("svpn", "the CPU, to which the matrices are copied")
            result = svpn(flat.cpu(), exponent, eps, symmetric).to(flat.device)
        elif backend == "export":
            result = export.power(flat, exponent)
        elif backend == "reference":
            result = reference.power(flat, exponent, symmetric)
        elif torch._C._are_functorch_transforms_active():
            result = TransformedPower.apply(flat, exponent, eps, symmetric, backend)[0]
        elif torch.is_grad_enabled() and flat.requires_grad:
            result = SingularValuePower.apply(flat, exponent, eps, symmetric, backend)
        else:
            result = _power(flat, exponent, symmetric, False, backend)[0]
        result = result.view(tall.shape)
    return (result.mT if wide else result).to(matrix.dtype)
