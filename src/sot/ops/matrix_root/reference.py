"""The definition of iSQRT: the square root of a covariance by coupled Newton-Schulz iteration.

With C over its trace, Y₀ = C and Z₀ = I, a step is `T = (3I - ZY)/2`, `Y ← YT`, `Z ← TZ`: Y tends to the root of C and
Z to its inverse. All are polynomials of C, so they commute.
"""

from __future__ import annotations

import torch
from torch import Tensor


def square_root(spd: Tensor, num_iterations: int) -> Tensor:
    """The root of `(..., n, n)`; of a matrix that is not symmetric its symmetric part is taken."""
    spd = (spd + spd.mT) / 2
    trace = trace_or_one(spd)
    return iterate(spd / trace, num_iterations)[0] * trace.sqrt()


def iterate(unit: Tensor, num_iterations: int) -> tuple[Tensor, Tensor]:
    """Y and Z after so many steps from a matrix of trace one."""
    bias = 1.5 * torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device)
    step = bias - 0.5 * unit
    root, inverse = unit @ step, step
    for _ in range(num_iterations - 1):
        step = bias - 0.5 * (inverse @ root)
        root, inverse = root @ step, step @ inverse
    return root, inverse


def root_of_product(rows: Tensor, num_iterations: int) -> Tensor:
    """The root of `RᵀR (..., n, n)` for R `(..., tokens, n)`: cheaper, and closer, for fewer tokens than n.

    The root is `C q(C)` with a polynomial q, and `RᵀR q(RᵀR) = Rᵀ q(RRᵀ) R` asks it of the smaller product.
    """
    gram = rows @ rows.mT
    trace = trace_or_one(gram)
    inverse = iterate(gram / trace, num_iterations)[1]
    return rows.mT @ (inverse / trace.sqrt() @ rows)


def trace_or_one(spd: Tensor) -> Tensor:
    """The trace `(..., 1, 1)`, or one where it is zero: a zero matrix stays zero."""
    trace = spd.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    return torch.where(trace == 0, torch.ones_like(trace), trace)
