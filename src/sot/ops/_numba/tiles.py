"""Part of a matrix product at a time, four rows by three SIMD registers: twelve sums keep the multipliers busy."""

from __future__ import annotations

from typing import Any

import numba

from sot.ops._numba.lanes import LANES, load, routine, spread, store, zeros_like

Array = Any
Tile = Any  # four rows of three registers

FLAT = numba.float32[::1]
ROWS, COLUMNS = 4, 3 * LANES


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
