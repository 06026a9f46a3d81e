"""Products of tokens where they lie: with a matrix, with each other, and head by head; compiled by numba.

Loaded by `sot.core.simd` where numba is installed; numba's cache watches this file alone: delete `__pycache__` after a
change to one that it imports. A row of `projected` is one token: X of all heads, then Y of all heads.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sot.core.simd_lanes import LANES, kernel, load, routine, spread, store, zeros_like
from sot.core.simd_tiles import COLUMNS, FLAT, add, put, tile

Array = Any

SIZES = numba.types.UniTuple(numba.intp, 3)  # heads, m, n
STARTS = numba.int64[::1]  # of each sample's tokens, and the end of the last's
ROWS = 4  # of a product at a time: eight sums hide the latency of two that are added in each cycle
TOKENS = 256  # of a sample at a time, for the panels of a sum of products to stay in the nearest cache


@routine
def product(
    out: Array,
    to: tuple[int, int],
    a: Array,
    of: tuple[int, int, int],
    b: Array,
    by: tuple[int, int],
    shape: tuple[int, int, int],
) -> None:
    """`out = a b`, in tiles, or where there are fewer columns in four rows of two registers.

    What is left over is computed with what comes before it.

    `to`, `of` and `by` say where a matrix begins and how far its rows lie apart; `of` also its columns, which in the
    others lie side by side. The `shape` is that of the product, at least 4 × 8, and what is summed over, last.
    """
    rows, columns, inner = shape
    if columns >= COLUMNS:
        for i in range(0, rows, ROWS):
            row = min(i, rows - ROWS)
            for j in range(0, columns, COLUMNS):
                column = min(j, columns - COLUMNS)
                numbers = tile(a, of[0] + row * of[1], of[1], of[2], b, by[0] + column, by[1], inner)
                put(out, to[0] + row * to[1] + column, to[1], numbers)
        return
    zero = zeros_like(out)
    for i in range(0, rows, ROWS):
        row = min(i, rows - ROWS)
        for j in range(0, columns, 2 * LANES):
            left = max(0, min(j, columns - 2 * LANES))
            right = min(left + LANES, columns - LANES)
            c00, c01, c10, c11, c20, c21, c30, c31 = zero, zero, zero, zero, zero, zero, zero, zero
            x, y = of[0] + row * of[1], by[0]
            for _ in range(inner):
                b0, b1 = load(b, y + left), load(b, y + right)
                a0, a1 = spread(a, x), spread(a, x + of[1])
                c00, c01, c10, c11 = c00 + a0 * b0, c01 + a0 * b1, c10 + a1 * b0, c11 + a1 * b1
                a2, a3 = spread(a, x + 2 * of[1]), spread(a, x + 3 * of[1])
                c20, c21, c30, c31 = c20 + a2 * b0, c21 + a2 * b1, c30 + a3 * b0, c31 + a3 * b1
                x += of[2]
                y += by[1]
            at = to[0] + row * to[1]
            store(out, at + left, c00)
            store(out, at + right, c01)
            store(out, at + to[1] + left, c10)
            store(out, at + to[1] + right, c11)
            store(out, at + 2 * to[1] + left, c20)
            store(out, at + 2 * to[1] + right, c21)
            store(out, at + 3 * to[1] + left, c30)
            store(out, at + 3 * to[1] + right, c31)


@kernel(numba.void(FLAT, STARTS, SIZES, FLAT))
def cross_products(projected: Array, starts: Array, sizes: tuple[int, int, int], out: Array) -> None:
    """`XᵀY` of each head of each sample."""
    heads, m, n = sizes
    width = heads * (m + n)
    for sample in range(starts.size - 1):
        first, tokens = starts[sample] * width, starts[sample + 1] - starts[sample]
        for head in range(heads):
            x = first + head * m
            y = first + heads * m + head * n
            at = (sample * heads + head) * m * n
            product(out, (at, n), projected, (x, 1, width), projected, (y, width), (m, n, tokens))


@routine
def transpose(matrix: Array, at: int, rows: int, columns: int, out: Array, to: int) -> None:
    """A matrix of `rows` × `columns` that begins `at`, to another place."""
    for i in range(rows):
        for j in range(columns):
            out[to + j * rows + i] = matrix[at + i * columns + j]


@routine
def pull_back_rows(
    projected: Array, row: int, grad: Array, first: int, transposed: Array, sizes: tuple[int, int, int], out: Array
) -> None:
    """Some tokens of a sample, all heads of them: memory is read and written in its order."""
    heads, m, n = sizes
    width, size = heads * (m + n), m * n
    x, y = row, row + heads * m
    for head in range(heads):
        at = head * size
        product(out, (x, width), projected, (y, width, 1), transposed, (at, m), (ROWS, m, n))
        product(out, (y, width), projected, (x, width, 1), grad, (first + at, n), (ROWS, n, m))
        x += m
        y += n


@kernel(numba.void(FLAT, FLAT, STARTS, SIZES, FLAT))
def pull_back(projected: Array, grad: Array, starts: Array, sizes: tuple[int, int, int], out: Array) -> None:
    """The gradient of `projected`, laid out like it, from that of `cross_products`: `YGᵀ` and `XG`."""
    heads, m, n = sizes
    width, size = heads * (m + n), m * n
    transposed = np.empty(heads * size, np.float32)
    few, pulled = np.zeros(ROWS * width, np.float32), np.empty(ROWS * width, np.float32)
    for sample in range(starts.size - 1):
        begin, tokens = starts[sample] * width, starts[sample + 1] - starts[sample]
        first = sample * heads * size
        for head in range(heads):
            transpose(grad, first + head * size, m, n, transposed, head * size)
        if tokens >= ROWS:
            for token in range(0, tokens, ROWS):
                row = begin + min(token, tokens - ROWS) * width
                pull_back_rows(projected, row, grad, first, transposed, sizes, out)
        else:
            for at in range(tokens * width):
                few[at] = projected[begin + at]
            pull_back_rows(few, 0, grad, first, transposed, sizes, pulled)
            for at in range(tokens * width):
                out[begin + at] = pulled[at]


@kernel(numba.void(FLAT, numba.types.UniTuple(numba.intp, 4), FLAT))
def pack(matrix: Array, layout: tuple[int, int, int, int], out: Array) -> None:
    """Panels of 24 columns, the last with what comes before it: `layout` is rows, columns, and their distances."""
    rows, columns, down, across = layout
    at = 0
    for j in range(0, columns, COLUMNS):
        first = min(j, columns - COLUMNS) * across
        for i in range(rows):
            for column in range(COLUMNS):
                out[at] = matrix[first + i * down + column * across]
                at += 1


OPERANDS = numba.types.UniTuple(numba.intp, 6)


@kernel(numba.void(FLAT, OPERANDS, FLAT, FLAT))
def times_panels(left: Array, sizes: tuple[int, int, int, int, int, int], panels: Array, out: Array) -> None:
    """Tokens times a packed matrix, at least 4 of each sample.

    The sizes are samples, tokens, their width, the width of the result, and numbers from a sample to the next in both.
    """
    samples, tokens, width, columns, left_pitch, out_pitch = sizes
    for sample in range(samples):
        panel = 0
        for j in range(0, columns, COLUMNS):
            at = sample * out_pitch + min(j, columns - COLUMNS)
            for i in range(0, tokens, ROWS):
                row = min(i, tokens - ROWS)
                x = sample * left_pitch + row * width
                put(out, at + row * columns, columns, tile(left, x, width, 1, panels, panel, COLUMNS, width))
            panel += COLUMNS * width


@routine
def gather(matrix: Array, at: int, line: int, columns: int, out: Array, to: int, width: int, rows: int) -> None:
    """Some columns from `at` on, side by side in a panel so wide from `to` on; what it has more of them is zero."""
    for _ in range(rows):
        if columns == width:
            for column in range(0, width, LANES):
                store(out, to + column, load(matrix, at + column))
        else:
            for column in range(width):
                out[to + column] = matrix[at + column] if column < columns else np.float32(0)
        at += line
        to += width


@kernel(numba.void(FLAT, FLAT, OPERANDS, FLAT))
def add_products(left: Array, right: Array, sizes: tuple[int, int, int, int, int, int], out: Array) -> None:
    """`out += Σ AᵀB` over the samples; `out` is padded to whole tiles, and A has a multiple of 4 columns.

    The sizes are samples, tokens, the widths of A and B, and numbers from a sample to the next in both.
    """
    samples, tokens, width, columns, left_pitch, right_pitch = sizes
    line = (columns + COLUMNS - 1) // COLUMNS * COLUMNS
    pieces = (tokens + TOKENS - 1) // TOKENS
    most = (tokens + pieces - 1) // max(pieces, 1)
    lefts = np.empty((width + LANES - 1) // LANES * LANES * most, np.float32)  # in panels too: a tile reads few lines
    panel = np.empty(most * COLUMNS, np.float32)
    for sample in range(samples):
        for start in range(0, tokens, most):
            count = min(most, tokens - start)
            x, y = sample * left_pitch + start * width, sample * right_pitch + start * columns
            for i in range(0, width, LANES):
                gather(left, x + i, width, min(LANES, width - i), lefts, i * count, LANES, count)
            for j in range(0, columns, COLUMNS):
                gather(right, y + j, columns, min(COLUMNS, columns - j), panel, 0, COLUMNS, count)
                for i in range(0, width, ROWS):
                    at = i // LANES * LANES * count + i % LANES
                    add(out, i * line + j, line, tile(lefts, at, 1, LANES, panel, 0, COLUMNS, count))
