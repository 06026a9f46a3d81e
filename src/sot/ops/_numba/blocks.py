"""Blocks: the matrices of a group of eight side by side, as flat arrays that SIMD registers are loaded from.

Element (i, j) of the eight lies at `(i * stride + j) * LANES`. Rows and columns are padded with zeros.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sot.ops._numba.lanes import LANES, load, routine, store, zeros_like

Array = Any

BATCH = numba.float32[:, :, :]  # as torch has them
GROUPS = numba.types.UniTuple(numba.intp, 2)  # from the first to before the last


@routine
def pack(tensor: Array, first: int, block: Array, stride: int) -> None:
    """Interleave `LANES` matrices from the `first` on; those past the end are zero."""
    count, rows, columns = tensor.shape
    lanes = min(LANES, count - first)
    if lanes * rows * columns < block.size:
        block[:] = 0
    for lane in range(lanes):
        for i in range(rows):
            for j in range(columns):
                block[(i * stride + j) * LANES + lane] = tensor[first + lane, i, j]


@routine
def unpack(block: Array, stride: int, tensor: Array, first: int) -> None:
    """The inverse of `pack`."""
    count, rows, columns = tensor.shape
    lanes = min(LANES, count - first)
    for lane in range(lanes):
        for i in range(rows):
            for j in range(columns):
                tensor[first + lane, i, j] = block[(i * stride + j) * LANES + lane]


@routine
def strides(columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of a block and of its transpose; not the constant 1, for which numba would compile every product anew."""
    one = np.intp(1)
    return (columns, one), (one, columns)


@routine
def multiply(
    out: Array,
    a: Array,
    a_strides: tuple[int, int],
    b: Array,
    b_strides: tuple[int, int],
    shape: tuple[int, int, int],
    lower: bool = False,
) -> None:
    """`out = a b`, two rows and two columns at a time; a transposed factor has its strides swapped.

    The `shape` is that of the product and what is summed over, last. Of a symmetric product `lower` is enough: that
    triangle, and what lies beside the diagonal.
    """
    zero = zeros_like(out)
    rows, columns, inner = shape
    a_row, a_inner = a_strides[0] * LANES, a_strides[1] * LANES
    b_inner, b_column = b_strides[0] * LANES, b_strides[1] * LANES
    for i in range(0, rows, 2):
        for j in range(0, i + 2 if lower else columns, 2):
            c00, c01, c10, c11 = zero, zero, zero, zero
            x, y = i * a_row, j * b_column
            for _ in range(inner):
                a0, a1 = load(a, x), load(a, x + a_row)
                b0, b1 = load(b, y), load(b, y + b_column)
                c00 = c00 + a0 * b0
                c01 = c01 + a0 * b1
                c10 = c10 + a1 * b0
                c11 = c11 + a1 * b1
                x += a_inner
                y += b_inner
            at, below = (i * columns + j) * LANES, ((i + 1) * columns + j) * LANES
            store(out, at, c00)
            store(out, at + LANES, c01)
            store(out, below, c10)
            store(out, below + LANES, c11)
