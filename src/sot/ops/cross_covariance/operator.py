"""The operator `sot::cross_covariance`: tokens projected and multiplied with each other, head by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sot.ops.cross_covariance import numba, reference
from sot.ops.cross_covariance import torch as by_torch
from sot.ops.library import define
from sot.ops.precision import autocast_off
from sot.ops.registry import Operator, anything, log_once

CROSS_COVARIANCE = Operator({"numba": numba.accepts, "torch": anything, "reference": anything})


def _compute(
    tokens: Tensor, weight: Tensor, starts: Tensor | None, heads: int, left_dim: int, center: bool, backend: str
) -> tuple[Tensor, Tensor]:
    log_once("cross_covariance", backend)
    if backend == "numba":
        return numba.project(tokens, weight, starts, heads, left_dim, center)
    return by_torch.project(tokens, weight, heads, left_dim, center)


def _fake(tokens: Tensor, weight: Tensor, starts: Tensor | None, heads: int, left_dim: int, *rest: Any) -> Any:
    samples = tokens.shape[0] if starts is None else starts.shape[0] - 1
    out = tokens.new_empty(samples, heads, left_dim, weight.shape[0] // heads - left_dim)
    return out, tokens.new_empty(tokens.shape[0], tokens.shape[1], weight.shape[0])


def _flops(shape: Any, weight: Any, starts: Any, heads: int, left_dim: int, *rest: Any, **named: Any) -> int:
    batch, tokens, dim = shape
    return 2 * batch * tokens * (dim * weight[0] + heads * left_dim * (weight[0] // heads - left_dim))


_multiply = define(
    "cross_covariance(Tensor tokens, Tensor weight, Tensor? starts, int heads, int left_dim, bool center, str backend)"
    " -> (Tensor, Tensor)",
    _compute,
    _fake,
    _flops,
)


def _compute_gradient(tokens: Tensor, weight: Tensor, starts: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    projected, grad, wanted, backend = rest
    if backend == "numba":
        return numba.pull_back_to_tokens(tokens, weight, starts, projected, grad, *wanted)
    return by_torch.pull_back_to_tokens(tokens, weight, projected, grad, *wanted)


def _fake_gradient(
    tokens: Tensor, weight: Tensor, starts: Any, projected: Any, grad: Any, wanted: Any, *rest: Any
) -> Any:
    return tuple(x.new_empty(x.shape if needed else (0,)) for x, needed in zip((tokens, weight), wanted))


def _flops_gradient(
    shape: Any, weight: Any, starts: Any, projected: Any, grad: Any, wanted: Any, *rest: Any, **named: Any
) -> int:
    batch, tokens, dim = shape
    return 2 * batch * tokens * (dim * weight[0] * sum(wanted) + 2 * grad[1] * grad[2] * grad[3])


_pull_back = define(
    "cross_covariance_backward(Tensor tokens, Tensor weight, Tensor? starts, Tensor projected, Tensor grad,"
    " bool[] wanted, str backend) -> (Tensor, Tensor)",
    _compute_gradient,
    _fake_gradient,
    _flops_gradient,
)


class CrossProducts(torch.autograd.Function):
    """`Wᵢ ZᵀZ Rᵢᵀ`; saves the projected tokens and nothing that is not already there."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, starts: Tensor | None, *settings: Any) -> Tensor:
        out, projected = _multiply(tokens, weight, starts, *settings)
        ctx.save_for_backward(tokens, weight, projected, starts)
        *_, ctx.center, ctx.backend = settings
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight, projected, starts = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:2])
        with autocast_off(grad):
            if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the definition
                if starts is not None:
                    raise NotImplementedError("packed tokens have a first derivative only: pad them for a second one")
                heads, left_dim = grad.shape[1:3]
                output = reference.project(tokens, weight, heads, left_dim, ctx.center)
                inputs = [tensor for tensor, needed in zip((tokens, weight), wanted) if needed]
                given = iter(torch.autograd.grad(output, inputs, grad, create_graph=True))
                both = [next(given) if needed else None for needed in wanted]
            else:
                both = list(_pull_back(tokens, weight, starts, projected, grad, wanted, ctx.backend))
        return *(value if needed else None for value, needed in zip(both, wanted)), *[None] * 5


def cross_covariance(
    tokens: Tensor, weight: Tensor, heads: int, left_dim: int, center: bool = False, starts: Tensor | None = None
) -> Tensor:
    """`XᵀY (samples, heads, m, n)` of the tokens `(batch, tokens, dim)` projected by `weight (heads · (m + n), dim)`.

    `center` subtracts the mean of each channel of X and Y over the tokens first. With `starts (samples + 1,)` the batch
    is one sequence: the tokens of all samples, those of sample i from row `starts[i]` on to before `starts[i + 1]`.
    """
    backend = CROSS_COVARIANCE.choose(tokens, weight, heads, left_dim)
    if backend == "reference":
        return reference.project(tokens, weight, heads, left_dim, center)
    return CrossProducts.apply(tokens, weight, starts, heads, left_dim, center, backend)


def takes_packed(tokens: Tensor, weight: Tensor, heads: int, left_dim: int) -> bool:
    """Whether `cross_covariance` may be given `starts`: kernels can, torch wants padding."""
    return CROSS_COVARIANCE.choose(tokens, weight, heads, left_dim) == "numba"
