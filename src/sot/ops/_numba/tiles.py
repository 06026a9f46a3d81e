"""Matrix products, four rows by three SIMD registers at a time: twelve sums keep the multipliers busy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

from sot.ops._numba.lanes import LANES, load, routine, spread, store, zeros_like

Array = Any
Tile = Any  # four rows of three registers

FLAT = numba.float32[::1]
ROWS, COLUMNS = 4, 3 * LANES


class Place(NamedTuple):
    """Of a matrix in a flat array: where it begins, and how far its rows and its columns lie apart."""

    start: int
    row: int
    column: int


@routine
def tile(a: Array, x: int, row: int, step: int, b: Array, y: int, line: int, inner: int) -> Tile:
    """Four rows of `a`, times 24 columns of `b`.

    They begin at x and y; the rows of `a` lie `row` apart and its columns `step`, the rows of `b` lie `line` apart and
    its columns side by side; `inner` columns of the one meet as many rows of the other.
    """
    zero = zeros_like(b)
    c00, c01, c02, c10, c11, c12 = zero, zero, zero, zero, zero, zero
    c20, c21, c22, c30, c31, c32 = zero, zero, zero, zero, zero, zero
    for _ in range(inner):
        b0, b1, b2 = load(b, y), load(b, y + LANES), load(b, y + 2 * LANES)
        number = spread(a, x)
        c00, c01, c02 = c00 + number * b0, c01 + number * b1, c02 + number * b2
        number = spread(a, x + row)
        c10, c11, c12 = c10 + number * b0, c11 + number * b1, c12 + number * b2
        number = spread(a, x + 2 * row)
        c20, c21, c22 = c20 + number * b0, c21 + number * b1, c22 + number * b2
        number = spread(a, x + 3 * row)
        c30, c31, c32 = c30 + number * b0, c31 + number * b1, c32 + number * b2
        x += step
        y += line
    return (c00, c01, c02), (c10, c11, c12), (c20, c21, c22), (c30, c31, c32)


@routine
def put(out: Array, at: int, line: int, numbers: Tile) -> None:
    """Write a tile where it begins `at` and its rows lie `line` apart."""
    for row in numbers:
        store(out, at, row[0])
        store(out, at + LANES, row[1])
        store(out, at + 2 * LANES, row[2])
        at += line


@routine
def add(out: Array, at: int, line: int, numbers: Tile) -> None:
    """Add it to what is there."""
    for row in numbers:
        store(out, at, load(out, at) + row[0])
        store(out, at + LANES, load(out, at + LANES) + row[1])
        store(out, at + 2 * LANES, load(out, at + 2 * LANES) + row[2])
        at += line


@routine
def scaled(numbers: Tile, factor: Any) -> Tile:
    """A tile times a register."""
    a, b, c, d = numbers
    return (
        (a[0] * factor, a[1] * factor, a[2] * factor),
        (b[0] * factor, b[1] * factor, b[2] * factor),
        (c[0] * factor, c[1] * factor, c[2] * factor),
        (d[0] * factor, d[1] * factor, d[2] * factor),
    )


@routine
def matrix_product(
    out: Array, to: Place, a: Array, of: Place, b: Array, by: Place, shape: tuple[int, int, int]
) -> None:
    """`out = a b`, in tiles, or where there are fewer columns in four rows of two registers.

    What is left over is computed with what comes before it. The columns of `out` and `b` lie side by side. The `shape`
    is that of the product, at least 4 × 8, and what is summed over, last.
    """
    rows, columns, inner = shape
    if columns >= COLUMNS:
        for i in range(0, rows, ROWS):
            row = min(i, rows - ROWS)
            for j in range(0, columns, COLUMNS):
                column = min(j, columns - COLUMNS)
                numbers = tile(a, of.start + row * of.row, of.row, of.column, b, by.start + column, by.row, inner)
                put(out, to.start + row * to.row + column, to.row, numbers)
        return
    for i in range(0, rows, ROWS):
        row = min(i, rows - ROWS)
        for j in range(0, columns, 2 * LANES):
            left = max(0, min(j, columns - 2 * LANES))
            pair = left, min(left + LANES, columns - LANES)
            narrow_tile(out, to.start + row * to.row, to.row, a, of.start + row * of.row, of, b, by, pair, inner)


@routine
def narrow_tile(
    out: Array, at: int, line: int, a: Array, x: int, of: Place, b: Array, by: Place, pair: tuple[int, int], inner: int
) -> None:
    """Four rows of a product in two registers, which begin at the columns of the `pair`.

    Eight sums hide the latency of two that are added in each cycle.
    """
    zero = zeros_like(out)
    c00, c01, c10, c11, c20, c21, c30, c31 = zero, zero, zero, zero, zero, zero, zero, zero
    y, down = by.start, of.row
    left, right = pair
    for _ in range(inner):
        b0, b1 = load(b, y + left), load(b, y + right)
        a0, a1 = spread(a, x), spread(a, x + down)
        c00, c01, c10, c11 = c00 + a0 * b0, c01 + a0 * b1, c10 + a1 * b0, c11 + a1 * b1
        a2, a3 = spread(a, x + 2 * down), spread(a, x + 3 * down)
        c20, c21, c30, c31 = c20 + a2 * b0, c21 + a2 * b1, c30 + a3 * b0, c31 + a3 * b1
        x += of.column
        y += by.row
    for two in ((c00, c01), (c10, c11), (c20, c21), (c30, c31)):
        store(out, at + left, two[0])
        store(out, at + right, two[1])
        at += line
