"""Blocks: the matrices of a group of eight side by side, as flat arrays that SIMD registers are loaded from.

Element (i, j) of the eight lies at `(i * stride + j) * LANES`. Rows and columns are padded with zeros.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sot.ops._numba.lanes import LANES, load, routine, store, zeros_like

Array = Any
Register = Any

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
def four_rows(
    a: Array, x: int, a_row: int, b: Array, y: int, b_column: int, steps: tuple[int, int], inner: int
) -> tuple[tuple[Register, Register], ...]:
    """Four rows of `a` from x on, times two columns of `b` from y on: eight sums, as each waits for itself."""
    zero = zeros_like(b)
    c00, c01, c10, c11, c20, c21, c30, c31 = zero, zero, zero, zero, zero, zero, zero, zero
    for _ in range(inner):
        b0, b1 = load(b, y), load(b, y + b_column)
        number = load(a, x)
        c00, c01 = c00 + number * b0, c01 + number * b1
        number = load(a, x + a_row)
        c10, c11 = c10 + number * b0, c11 + number * b1
        number = load(a, x + 2 * a_row)
        c20, c21 = c20 + number * b0, c21 + number * b1
        number = load(a, x + 3 * a_row)
        c30, c31 = c30 + number * b0, c31 + number * b1
        x += steps[0]
        y += steps[1]
    return (c00, c01), (c10, c11), (c20, c21), (c30, c31)


@routine
def two_rows(
    a: Array, x: int, a_row: int, b: Array, y: int, b_column: int, steps: tuple[int, int], inner: int
) -> tuple[tuple[Register, Register], ...]:
    """The same with two rows."""
    zero = zeros_like(b)
    c00, c01, c10, c11 = zero, zero, zero, zero
    for _ in range(inner):
        a0, a1, b0, b1 = load(a, x), load(a, x + a_row), load(b, y), load(b, y + b_column)
        c00, c01, c10, c11 = c00 + a0 * b0, c01 + a0 * b1, c10 + a1 * b0, c11 + a1 * b1
        x += steps[0]
        y += steps[1]
    return (c00, c01), (c10, c11)


@routine
def put_rows(out: Array, at: int, line: int, pairs: tuple[tuple[Register, Register], ...]) -> None:
    """Write two columns that begin `at`, whose rows lie `line` apart."""
    for pair in pairs:
        store(out, at, pair[0])
        store(out, at + LANES, pair[1])
        at += line


@routine
def multiply(
    out: Array,
    a: Array,
    a_strides: tuple[int, int],
    b: Array,
    b_strides: tuple[int, int],
    shape: tuple[int, int, int],
    at_once: int = 4,
    lower: bool = False,
) -> None:
    """`out = a b`, two columns and two or four rows `at_once`; a transposed factor has its strides swapped.

    Four keep the multipliers busy, but of float64 their sums do not fit the registers of a processor without AVX-512.
    The `shape` is that of the product and what is summed over, last. Of a symmetric product `lower` is enough: that
    triangle, and what lies beside the diagonal.
    """
    rows, columns, inner = shape
    a_row, b_column, line = a_strides[0] * LANES, b_strides[1] * LANES, columns * LANES
    steps = a_strides[1] * LANES, b_strides[0] * LANES
    for i in range(0, rows, at_once):
        for j in range(0, min(i + at_once, columns) if lower else columns, 2):
            at, x, y = i * line + j * LANES, i * a_row, j * b_column
            if at_once == 4 and i + 2 < rows:
                put_rows(out, at, line, four_rows(a, x, a_row, b, y, b_column, steps, inner))
            else:
                put_rows(out, at, line, two_rows(a, x, a_row, b, y, b_column, steps, inner))
