"""The iteration with sums inside of the products and none wasted, and its gradient, on any device.

Everything is a polynomial of one symmetric matrix, so symmetric, and the gradient is the derivative of that polynomial
in the direction of the incoming one, symmetric too. Hence any factor may be transposed: products AᵀB are the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sot.ops.matrix_root.reference import trace_or_one

PIECE = 2**18  # numbers of a tensor that passes the iteration at once on a CPU, so that it stays in the cache
FEW = 8  # more iterations, and the rounding that transposed factors add, half as much again by each, would be seen

Matrices = Sequence[Tensor]  # each (batch, n, n)


def make_states(spd: Tensor, num_iterations: int) -> list[Tensor]:
    """Room for what the iteration comes through; `_states` says what is what."""
    count = (num_iterations + 1) + num_iterations + max(0, num_iterations - 2)
    return [spd.new_empty(spd.shape) for _ in range(count)]


def _states(kept: Matrices, num_iterations: int) -> Iterator[tuple[slice, Matrices, Matrices, Matrices]]:
    """Piece by piece of the batch: roots before each step and the result, steps, inverse roots from the second step on.

    The first of the inverse roots is the first step.
    """
    batch = kept[0].shape[0]
    at_once = max(1, PIECE // kept[0][0].numel()) if kept[0].device.type == "cpu" and batch else max(1, batch)
    for start in range(0, batch, at_once):
        piece = slice(start, start + at_once)
        states = [each[piece] for each in kept]
        roots, steps = states[: num_iterations + 1], states[num_iterations + 1 : 2 * num_iterations + 1]
        yield piece, roots, steps, [steps[0], *states[2 * num_iterations + 1 :]]


def square_root(spd: Tensor, num_iterations: int) -> tuple[Tensor, list[Tensor]]:
    """The root of `(batch, n, n)`, and the states."""
    kept, trace, left = make_states(spd, num_iterations), trace_or_one(spd), _factor(num_iterations)
    bias = 1.5 * torch.eye(spd.shape[1], dtype=spd.dtype, device=spd.device)
    for piece, roots, steps, inverses in _states(kept, num_iterations):
        roots[0].copy_(_symmetric(spd[piece], trace[piece]))
        torch.add(bias, roots[0], alpha=-0.5, out=steps[0])
        for k in range(1, num_iterations):
            torch.bmm(left(roots[k - 1]), steps[k - 1], out=roots[k])
            if k > 1:
                torch.bmm(left(steps[k - 1]), inverses[k - 2], out=inverses[k - 1])
            torch.baddbmm(bias, left(inverses[k - 1]), roots[k], alpha=-0.5, out=steps[k])
        torch.bmm(left(roots[-2]), steps[-1], out=roots[-1])
    return kept[num_iterations] * trace.sqrt(), kept


def pull_back(spd: Tensor, grad: Tensor, kept: Matrices, num_iterations: int) -> Tensor:
    """The gradient of `square_root`."""
    out = torch.empty_like(spd)
    for piece, *states in _states(kept, num_iterations):
        out[piece] = _pull_back(spd[piece], grad[piece], *states)
    return out


def _pull_back(spd: Tensor, grad: Tensor, roots: Matrices, steps: Matrices, inverses: Matrices) -> Tensor:
    trace, left = trace_or_one(spd), _factor(len(steps))

    def derivative(a: Tensor, d_a: Tensor, b: Tensor, d_b: Tensor, scale: float = 1.0) -> Tensor:
        """That of `scale · ab`."""
        return torch.baddbmm(b, left(d_a), b, beta=0, alpha=scale).baddbmm_(left(a), d_b, alpha=scale)

    d_root = _symmetric(grad, trace.rsqrt())
    of_scale = 0.5 * _inner(d_root, roots[-1])  # of the root of the trace that the result is multiplied by
    d_step = d_inverse = -0.5 * d_root
    half = torch.baddbmm(d_root, left(d_root), roots[0], beta=0.75, alpha=-0.5)  # of Y(3I - Y)/2, which commute
    d_root = half + half.mT
    for k in range(1, len(steps)):
        if k > 1:
            d_inverse = derivative(steps[k - 1], d_step, inverses[k - 2], d_inverse)
        d_step = derivative(inverses[k - 1], d_inverse, roots[k], d_root, -0.5)
        d_root = derivative(roots[k], d_root, steps[k], d_step)
    alive = spd.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] != 0
    d_trace = torch.where(alive, of_scale - _inner(d_root, roots[0]), 0)
    d_spd = d_root / trace
    d_spd.diagonal(dim1=-2, dim2=-1).add_((d_trace / trace)[..., 0])
    return d_spd


def _factor(num_iterations: int) -> Callable[[Tensor], Tensor]:
    """How a symmetric factor is given on the left."""
    return (lambda matrix: matrix.mT) if num_iterations <= FEW else (lambda matrix: matrix)


def _symmetric(matrix: Tensor, divisor: Tensor) -> Tensor:
    """The symmetric part, divided."""
    return (matrix + matrix.mT).div_(2 * divisor)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Of each two matrices, `(batch, 1, 1)`."""
    return torch.bmm(left.flatten(1)[:, None], right.flatten(1)[:, :, None])
