"""svPN and its gradient of float32 on a CPU by compiled kernels, eight matrices abreast in SIMD lanes.

Its parts are blocks `(groups, ..., LANES)`: the eight matrices of a group side by side, rows and columns padded to even
numbers. The kernels are compiled for some seconds the first time on a machine, and kept beside the package or in the
user's cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from sot.ops._numba.threads import array, on_threads
from sot.ops.svpn.slopes import relative, slopes
from sot.ops.svpn.torch import LEFT_EPS, Parts

LANES = 8
MAX_COLUMNS = 64  # more of them outgrow the caches


def accepts(matrix: Tensor, exponent: float, symmetric: bool) -> bool:
    """Whether the kernels can take a batch `(batch, m >= n, n)`."""
    known = matrix.dtype == torch.float32 and matrix.device.type == "cpu"
    return known and matrix.shape[2] <= MAX_COLUMNS and not symmetric


def part_shapes(matrix: Tensor) -> tuple[tuple[int, ...], ...]:
    """Shapes of the blocks of U, λ and V."""
    rows, columns = matrix.shape[1] + matrix.shape[1] % 2, matrix.shape[2] + matrix.shape[2] % 2
    groups = (matrix.shape[0] + LANES - 1) // LANES
    return (groups, rows, columns, LANES), (groups, columns, LANES), (groups, columns, columns, LANES)


def power(matrix: Tensor, exponent: float, keep: bool) -> tuple[Tensor, Parts | None]:
    """`U diag(λ^α) Vᵀ`, and blocks of U, λ and V to `keep`; uᵢ is zero where λᵢ counts as zero."""
    from sot.ops.svpn import numba_kernels

    shapes, out = part_shapes(matrix), matrix.new_empty(matrix.shape)
    kept = tuple(matrix.new_empty(shape) for shape in shapes) if keep else None
    source, target = array(matrix), array(out)

    def run(part: tuple[int, int]) -> None:
        blocks = kept or tuple(matrix.new_empty((1, *shape[1:])) for shape in shapes)
        numba_kernels.power(source, exponent, LEFT_EPS, target, _arrays(*blocks), part)

    on_threads(run, shapes[0][0])
    return out, kept  # type: ignore[return-value]


def pull_back(grad: Tensor, parts: Parts, exponent: float, eps: float) -> Tensor:
    """The gradient of `power`; what its slopes are made of is computed by the kernel for the exponents ½ and ¼."""
    from sot.ops.svpn import numba_kernels

    pairs, factors = _nothing(), _nothing()
    if exponent not in (0.5, 0.25):
        unit, ratio, scale = relative(parts[1], exponent, eps)
        pairs, factors = _arrays(*slopes(unit, exponent, eps)), _arrays(ratio, scale)
    out = grad.new_empty(grad.shape)
    given = array(grad), _arrays(*parts), pairs, factors, eps, exponent == 0.25, array(out)
    on_threads(lambda part: numba_kernels.pull_back(*given, part), len(parts[0]))
    return out


def _arrays(*blocks: Tensor) -> tuple[Any, ...]:
    return tuple(array(block.contiguous().flatten(1)) for block in blocks)


@cache
def _nothing() -> tuple[Any, ...]:
    """In place of slopes that the kernel makes itself."""
    return _arrays(torch.empty(0, 1), torch.empty(0, 1))
