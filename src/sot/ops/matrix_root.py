"""iSQRT: the square root of a covariance by coupled Newton-Schulz iteration, on any device.

With C over its trace, Y₀ = C and Z₀ = I, a step is `T = (3I - ZY)/2`, `Y ← YT`, `Z ← TZ`: Y tends to the root of C and
Z to its inverse. All are polynomials of C, so they commute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sot.ops.precision import at_least_float32, autocast_off

PIECE = 2**16  # numbers of a batch that pass the iteration at once on a CPU, so that all of its products stay in cache


def matrix_root(spd: Tensor, num_iterations: int) -> Tensor:
    """The square root of `(..., n, n)` in at least float32."""
    full = at_least_float32(spd)
    with autocast_off(full):
        if full.device.type != "cpu" or torch.compiler.is_compiling():
            return square_root(full, num_iterations).to(spd.dtype)
        pieces = torch.split(full.reshape(-1, *full.shape[-2:]), max(1, PIECE // full.shape[-1] ** 2))
        roots = torch.cat([square_root(piece, num_iterations) for piece in pieces])
    return roots.view(full.shape).to(spd.dtype)


def square_root(spd: Tensor, num_iterations: int) -> Tensor:
    """The root of `(..., n, n)`; of a matrix that is not symmetric its symmetric part is taken."""
    spd = (spd + spd.mT) / 2
    trace = _trace_or_one(spd)
    root, _, step = _iterate(spd / trace, num_iterations)
    return root @ step * trace.sqrt()


def root_of_product(rows: Tensor, num_iterations: int) -> Tensor:
    """The root of `RᵀR (..., n, n)` for R `(..., tokens, n)`: cheaper, and closer, for fewer tokens than n.

    The root is `C q(C)` with a polynomial q, and `RᵀR q(RᵀR) = Rᵀ q(RRᵀ) R` asks it of the smaller product.
    """
    full = at_least_float32(rows)
    with autocast_off(full):
        gram = full @ full.mT
        trace = _trace_or_one(gram)
        _, inverse, step = _iterate(gram / trace, num_iterations)
        inverse = step if inverse is None else step @ inverse
        return (full.mT @ (inverse / trace.sqrt() @ full)).to(rows.dtype)


def _iterate(unit: Tensor, num_iterations: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Y, Z and the step T that is still to be taken as the last of so many; of one step Z is none yet, which is I."""
    bias = 1.5 * torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device)
    root, inverse, step = unit, None, bias - 0.5 * unit
    for _ in range(num_iterations - 1):
        root, inverse = root @ step, step if inverse is None else step @ inverse
        step = bias - 0.5 * (inverse @ root)
    return root, inverse, step


def _trace_or_one(spd: Tensor) -> Tensor:
    """The trace `(..., 1, 1)`, or one where it is zero: a zero matrix stays zero."""
    trace = spd.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    return torch.where(trace == 0, torch.ones_like(trace), trace)
