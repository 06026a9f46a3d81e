"""The operators `sot::cross_covariance`, of projected tokens, and `sot::projected_covariance`, projection included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sot.ops.cross_covariance import numba, reference
from sot.ops.cross_covariance import torch as by_torch
from sot.ops.library import define
from sot.ops.precision import autocast_off
from sot.ops.registry import HAS_NUMBA, Operator, anything, log_once

CROSS_COVARIANCE = Operator(
    "cross_covariance",
    {
        **({"numba": lambda x, heads, m: numba.accepts(x, x.shape[2], heads, m)} if HAS_NUMBA else {}),
        "torch": anything,
        "reference": anything,
    },
)
PROJECTED_COVARIANCE = Operator(
    "projected_covariance",
    {**({"numba": numba.accepts_projection} if HAS_NUMBA else {}), "torch": anything, "reference": anything},
)


# --- of projected tokens -----------------------------------------------------------------------------------


def _compute(projected: Tensor, heads: int, left_dim: int, backend: str) -> Tensor:
    log_once("cross_covariance", backend)
    if backend == "numba":
        return numba.multiply(projected, None, heads, left_dim)
    return reference.cross_products(projected, heads, left_dim)


def _fake(projected: Tensor, heads: int, left_dim: int, backend: str) -> Tensor:
    return projected.new_empty(projected.shape[0], heads, left_dim, projected.shape[2] // heads - left_dim)


def _flops(shape: Any, heads: int, left_dim: int, *args: Any, **kwargs: Any) -> int:
    batch, tokens, width = shape
    return 2 * batch * tokens * heads * left_dim * (width // heads - left_dim)


_multiply = define(
    "cross_covariance(Tensor projected, int heads, int left_dim, str backend) -> Tensor", _compute, _fake, _flops
)


def _compute_gradient(projected: Tensor, grad: Tensor, backend: str) -> Tensor:
    if backend == "numba":
        return numba.pull_back(projected, None, grad)
    return by_torch.pull_back(projected, grad)


_pull_back = define(
    "cross_covariance_backward(Tensor projected, Tensor grad, str backend) -> Tensor",
    _compute_gradient,
    lambda projected, grad, backend: projected.new_empty(projected.shape),
    lambda shape, grad, *args, **kwargs: 2 * _flops(shape, *grad[1:3]),
)


class CrossProducts(torch.autograd.Function):
    """`XᵀY` of projected tokens."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, heads: int, left_dim: int, backend: str) -> Tensor:
        ctx.save_for_backward(projected)
        ctx.backend = backend
        result: Tensor = _multiply(projected, heads, left_dim, backend)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (projected,) = ctx.saved_tensors
        with autocast_off(grad):
            if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the definition
                output = reference.cross_products(projected, *grad.shape[1:3])
                return torch.autograd.grad(output, projected, grad, create_graph=True)[0], None, None, None
            return _pull_back(projected, grad, ctx.backend), None, None, None


def cross_covariance(projected: Tensor, heads: int, left_dim: int) -> Tensor:
    """`XᵀY (batch, heads, m, n)` of `(batch, tokens, heads · (m + n))`: X of all heads, then Y of all heads."""
    backend = CROSS_COVARIANCE.choose(projected, heads, left_dim)
    if backend == "reference":
        return reference.cross_products(projected, heads, left_dim)
    return CrossProducts.apply(projected, heads, left_dim, backend)


# --- projection included -----------------------------------------------------------------------------------


def _compute_projected(
    tokens: Tensor, weight: Tensor, starts: Tensor | None, heads: int, left_dim: int, center: bool, backend: str
) -> tuple[Tensor, Tensor]:
    log_once("projected_covariance", backend)
    if backend == "numba":
        return numba.project(tokens, weight, starts, heads, left_dim, center)
    return by_torch.project(tokens, weight, heads, left_dim, center)


def _fake_projected(
    tokens: Tensor, weight: Tensor, starts: Tensor | None, heads: int, left_dim: int, center: bool, backend: str
) -> tuple[Tensor, Tensor]:
    samples = tokens.shape[0] if starts is None else starts.shape[0] - 1
    out = tokens.new_empty(samples, heads, left_dim, weight.shape[0] // heads - left_dim)
    return out, tokens.new_empty(tokens.shape[0], tokens.shape[1], weight.shape[0])


def _flops_projected(shape: Any, weight: Any, starts: Any, heads: int, left_dim: int, *args: Any, **kwargs: Any) -> int:
    batch, tokens, dim = shape
    return 2 * batch * tokens * dim * weight[0] + _flops((batch, tokens, weight[0]), heads, left_dim)


_project = define(
    "projected_covariance(Tensor tokens, Tensor weight, Tensor? starts, int heads, int left_dim, bool center,"
    " str backend) -> (Tensor, Tensor)",
    _compute_projected,
    _fake_projected,
    _flops_projected,
)


def _compute_projected_gradient(
    tokens: Tensor,
    weight: Tensor,
    starts: Tensor | None,
    projected: Tensor,
    grad: Tensor,
    wanted: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor]:
    if backend == "numba":
        return numba.pull_back_to_tokens(tokens, weight, starts, projected, grad, *wanted)
    return by_torch.pull_back_to_tokens(tokens, weight, projected, grad, *wanted)


def _fake_projected_gradient(
    tokens: Tensor,
    weight: Tensor,
    starts: Tensor | None,
    projected: Tensor,
    grad: Tensor,
    wanted: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor]:
    d_tokens, d_weight = (x.new_empty(x.shape if w else (0,)) for x, w in zip((tokens, weight), wanted))
    return d_tokens, d_weight


def _flops_projected_gradient(
    shape: Any, weight: Any, starts: Any, projected: Any, grad: Any, wanted: list[bool], *args: Any, **kwargs: Any
) -> int:
    batch, tokens, dim = shape
    return 2 * batch * tokens * dim * weight[0] * sum(wanted) + 2 * _flops(projected, *grad[1:3])


_pull_back_projected = define(
    "projected_covariance_backward(Tensor tokens, Tensor weight, Tensor? starts, Tensor projected, Tensor grad,"
    " bool[] wanted, str backend) -> (Tensor, Tensor)",
    _compute_projected_gradient,
    _fake_projected_gradient,
    _flops_projected_gradient,
)


class ProjectedCrossProducts(torch.autograd.Function):
    """`Wᵢ ZᵀZ Rᵢᵀ`; saves the projected tokens and nothing that is not already there."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor,
        starts: Tensor | None,
        heads: int,
        left_dim: int,
        center: bool,
        backend: str,
    ) -> Tensor:
        out, projected = _project(tokens, weight, starts, heads, left_dim, center, backend)
        ctx.save_for_backward(tokens, weight, projected, starts)
        ctx.center, ctx.backend = center, backend
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
                output = reference.projected_cross_products(tokens, weight, heads, left_dim, ctx.center)
                inputs = [tensor for tensor, needed in zip((tokens, weight), wanted) if needed]
                given = iter(torch.autograd.grad(output, inputs, grad, create_graph=True))
                both = [next(given) if needed else None for needed in wanted]
            else:
                both = list(_pull_back_projected(tokens, weight, starts, projected, grad, wanted, ctx.backend))
        return *(value if needed else None for value, needed in zip(both, wanted)), *[None] * 5


def projected_covariance(
    tokens: Tensor, weight: Tensor, heads: int, left_dim: int, center: bool = False, starts: Tensor | None = None
) -> Tensor:
    """`XᵀY (samples, heads, m, n)` of the tokens `(batch, tokens, dim)` projected by `weight (heads · (m + n), dim)`.

    `center` subtracts the mean of each channel of X and Y over the tokens first. With `starts (samples + 1,)` the batch
    is one sequence: the tokens of all samples, those of sample i from row `starts[i]` on to before `starts[i + 1]`.
    """
    backend = PROJECTED_COVARIANCE.choose(tokens, weight, heads, left_dim)
    if backend == "reference":
        return reference.projected_cross_products(tokens, weight, heads, left_dim, center)
    return ProjectedCrossProducts.apply(tokens, weight, starts, heads, left_dim, center, backend)


def takes_packed(tokens: Tensor, weight: Tensor, heads: int, left_dim: int) -> bool:
    """Whether `projected_covariance` may be given `starts`: kernels can, torch wants padding."""
    return PROJECTED_COVARIANCE.choose(tokens, weight, heads, left_dim) == "numba"
