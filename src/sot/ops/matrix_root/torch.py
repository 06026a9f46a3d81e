"""The iteration with sums inside of the products and none wasted, and its gradient, on any device.

Everything is a polynomial of one symmetric matrix, so symmetric, and the gradient is the derivative of that polynomial
in the direction of the incoming one, symmetric too. Hence any factor may be transposed: products AᵀB are the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sot.ops.matrix_root.reference import trace_or_one

PIECE = 2**18  # numbers of a tensor that passes the iteration at once on a CPU, so that it stays in the cache
FEW = 8  # more iterations, and the rounding that transposed factors add, half as much again by each, would be seen


class States(NamedTuple):
    """What the iteration came through, each `(batch, n, n)`."""

    roots: Sequence[Tensor]  # before each step, and the result
    steps: Sequence[Tensor]
    inverses: Sequence[Tensor]  # before each step from the second on; the first is the first step

    @classmethod
    def of(cls, tensors: Sequence[Tensor], num_iterations: int) -> States:
        """From the list that `make_states` made."""
        roots, rest = tensors[: num_iterations + 1], tensors[num_iterations + 1 :]
        steps, inverses = rest[:num_iterations], rest[num_iterations:]
        return cls(roots, steps, [steps[0], *inverses])

    def piece(self, part: slice) -> States:
        """Those of a part of the batch."""
        return States(*([tensor[part] for tensor in each] for each in self))


def make_states(spd: Tensor, num_iterations: int) -> list[Tensor]:
    """Room for the states, with zeros up to a multiple of four rows and columns, which products are faster for."""
    size = spd.shape[1] + -spd.shape[1] % 4
    count = (num_iterations + 1) + num_iterations + max(0, num_iterations - 2)
    return [spd.new_empty(spd.shape[0], size, size) for _ in range(count)]


def square_root(spd: Tensor, num_iterations: int) -> tuple[Tensor, list[Tensor]]:
    """The root of `(batch, n, n)`, and the states."""
    size, kept = spd.shape[1], make_states(spd, num_iterations)
    states, trace = States.of(kept, num_iterations), trace_or_one(spd)
    bias = 1.5 * torch.eye(kept[0].shape[1], dtype=spd.dtype, device=spd.device)
    for part in _pieces(kept[0]):
        _iterate(_symmetric(spd[part], trace[part]), states.piece(part), bias)
    return states.roots[-1][:, :size, :size] * trace.sqrt(), kept


def _iterate(unit: Tensor, states: States, bias: Tensor) -> None:
    roots, steps, inverses = states
    left = _factor(len(steps))
    roots[0].copy_(unit)
    torch.add(bias, roots[0], alpha=-0.5, out=steps[0])
    for k in range(1, len(steps)):
        torch.bmm(left(roots[k - 1]), steps[k - 1], out=roots[k])
        if k > 1:
            torch.bmm(left(steps[k - 1]), inverses[k - 2], out=inverses[k - 1])
        torch.baddbmm(bias, left(inverses[k - 1]), roots[k], alpha=-0.5, out=steps[k])
    torch.bmm(left(roots[-2]), steps[-1], out=roots[-1])


def pull_back(spd: Tensor, grad: Tensor, kept: Sequence[Tensor], num_iterations: int) -> Tensor:
    """The gradient of `square_root`."""
    states, out = States.of(kept, num_iterations), torch.empty_like(spd)
    for part in _pieces(kept[0]):
        out[part] = _pull_back(spd[part], grad[part], states.piece(part))
    return out


def _pull_back(spd: Tensor, grad: Tensor, states: States) -> Tensor:
    roots, steps, inverses = states
    size, trace = spd.shape[1], trace_or_one(spd)
    left = _factor(len(steps))

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
    d_spd = d_root[:, :size, :size] / trace
    d_spd.diagonal(dim1=-2, dim2=-1).add_((d_trace / trace)[..., 0])
    return d_spd


def _pieces(states: Tensor) -> Iterator[slice]:
    batch = states.shape[0]
    at_once = max(1, PIECE // states[0].numel()) if states.device.type == "cpu" and batch else max(1, batch)
    return (slice(start, start + at_once) for start in range(0, batch, at_once))


def _factor(num_iterations: int) -> Callable[[Tensor], Tensor]:
    """How a symmetric factor is given on the left."""
    return (lambda matrix: matrix.mT) if num_iterations <= FEW else (lambda matrix: matrix)


def _symmetric(matrix: Tensor, divisor: Tensor) -> Tensor:
    """The symmetric part, divided, with zeros up to a multiple of four."""
    result = (matrix + matrix.mT).div_(2 * divisor)
    missing = -matrix.shape[-1] % 4
    return nn.functional.pad(result, (0, missing, 0, missing)) if missing else result


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Of each two matrices, `(batch, 1, 1)`."""
    return torch.bmm(left.flatten(1)[:, None], right.flatten(1)[:, :, None])
