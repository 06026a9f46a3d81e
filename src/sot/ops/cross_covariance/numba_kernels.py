"""Products of tokens where they lie: with a matrix, with each other, and head by head; compiled by numba.

A row of `projected` is one token: X of all heads, then Y of all heads. Numba's cache watches this file alone: delete
`__pycache__` after a change to one that it imports.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from sot.ops._numba.lanes import LANES, kernel, load, routine, spread, store, zeros_like
from sot.ops._numba.tiles import COLUMNS, FLAT, add, put, tile

Array = Any

SIZES = numba.types.UniTuple(numba.intp, 3)  # heads, m, n
SAMPLES = numba.types.UniTuple(numba.intp, 2)  # from the first to before the last
STARTS = numba.int64[::1]  # of each sample's tokens, and the end of the last's
ROWS = 4  # of a product at a time: eight sums hide the latency of two that are added in each cycle
TOKENS = 256  # of a sample at a time, for the panels of a sum of products to stay in the nearest cache


class Place(NamedTuple):
    """Of a matrix in a flat array: where it begins, and how far its rows and its columns lie apart."""

    start: int
    row: int
    column: int


@routine
def product(out: Array, to: Place, a: Array, of: Place, b: Array, by: Place, shape: tuple[int, int, int]) -> None:
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
    """Four rows of a product in two registers, which begin at the columns of the `pair`."""
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


@kernel(numba.void(FLAT, STARTS, SIZES, FLAT, SAMPLES))
def cross_products(
    projected: Array, starts: Array, sizes: tuple[int, int, int], out: Array, samples: tuple[int, int]
) -> None:
    """`XᵀY` of each head of a range of samples."""
    heads, m, n = sizes
    width = heads * (m + n)
    for sample in range(samples[0], samples[1]):
        first, tokens = starts[sample] * width, starts[sample + 1] - starts[sample]
        for head in range(heads):
            x = first + head * m
            y = first + heads * m + head * n
            at = (sample * heads + head) * m * n
            transposed, right = Place(x, 1, width), Place(y, width, 1)
            product(out, Place(at, n, 1), projected, transposed, projected, right, (m, n, tokens))


@routine
def transpose(matrix: Array, at: int, rows: int, columns: int, out: Array, to: int) -> None:
    """A matrix of `rows` × `columns` that begins `at`, to another place."""
    for i in range(rows):
        for j in range(columns):
            out[to + j * rows + i] = matrix[at + i * columns + j]


@routine
def pull_back_rows(
    projected: Array,
    row: int,
    grad: Array,
    first: int,
    transposed: Array,
    sizes: tuple[int, int, int],
    out: Array,
    to: int,
) -> None:
    """Some tokens of a sample, all heads of them: memory is read and written in its order."""
    heads, m, n = sizes
    width, size = heads * (m + n), m * n
    x, y, behind = row, row + heads * m, to - row
    for head in range(heads):
        at = head * size
        left, right = Place(x, width, 1), Place(y, width, 1)
        product(out, Place(x + behind, width, 1), projected, right, transposed, Place(at, m, 1), (ROWS, m, n))
        product(out, Place(y + behind, width, 1), projected, left, grad, Place(first + at, n, 1), (ROWS, n, m))
        x += m
        y += n


@kernel(numba.void(FLAT, FLAT, STARTS, SIZES, FLAT, SAMPLES))
def pull_back(
    projected: Array,
    grad: Array,
    starts: Array,
    sizes: tuple[int, int, int],
    out: Array,
    samples: tuple[int, int],
) -> None:
    """The gradient of `projected` from that of `cross_products`, `YGᵀ` and `XG`, for a range of samples.

    The rows of `out` begin with the first of these samples.
    """
    heads, m, n = sizes
    width, size = heads * (m + n), m * n
    transposed = np.empty(heads * size, np.float32)
    few, pulled = np.zeros(ROWS * width, np.float32), np.empty(ROWS * width, np.float32)
    shift = starts[samples[0]] * width
    for sample in range(samples[0], samples[1]):
        begin, tokens = starts[sample] * width, starts[sample + 1] - starts[sample]
        first = sample * heads * size
        for head in range(heads):
            transpose(grad, first + head * size, m, n, transposed, head * size)
        if tokens >= ROWS:
            for token in range(0, tokens, ROWS):
                row = begin + min(token, tokens - ROWS) * width
                pull_back_rows(projected, row, grad, first, transposed, sizes, out, row - shift)
        else:
            for at in range(tokens * width):
                few[at] = projected[begin + at]
            pull_back_rows(few, 0, grad, first, transposed, sizes, pulled, 0)
            for at in range(tokens * width):
                out[begin - shift + at] = pulled[at]


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


class Sizes(NamedTuple):
    """Of a product with tokens: the widths of both operands, and numbers from a sample to the next in both."""

    samples: int
    tokens: int
    width: int
    columns: int
    pitch: int
    other_pitch: int


SIX = numba.types.NamedUniTuple(numba.intp, 6, Sizes)


@kernel(numba.void(FLAT, SIX, FLAT, FLAT))
def times_panels(left: Array, sizes: Sizes, panels: Array, out: Array) -> None:
    """Tokens times a packed matrix, at least 4 of each sample, to `out`, the other operand."""
    width, columns = sizes.width, sizes.columns
    for sample in range(sizes.samples):
        panel = 0
        for j in range(0, columns, COLUMNS):
            at = sample * sizes.other_pitch + min(j, columns - COLUMNS)
            for i in range(0, sizes.tokens, ROWS):
                row = min(i, sizes.tokens - ROWS)
                x = sample * sizes.pitch + row * width
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


@kernel(numba.void(FLAT, FLAT, SIX, FLAT))
def add_products(left: Array, right: Array, sizes: Sizes, out: Array) -> None:
    """`out += Σ AᵀB` over the samples; `out` is padded to whole tiles, and A has a multiple of 4 columns."""
    tokens, width, columns = sizes.tokens, sizes.width, sizes.columns
    line = (columns + COLUMNS - 1) // COLUMNS * COLUMNS
    pieces = (tokens + TOKENS - 1) // TOKENS
    most = (tokens + pieces - 1) // max(pieces, 1)  # tokens at a time
    lefts = np.empty((width + LANES - 1) // LANES * LANES * most, np.float32)  # in panels too: a tile reads few lines
    panel = np.empty(most * COLUMNS, np.float32)
    for sample in range(sizes.samples):
        for start in range(0, tokens, most):
            count = min(most, tokens - start)
            x, y = sample * sizes.pitch + start * width, sample * sizes.other_pitch + start * columns
            for i in range(0, width, LANES):
                gather(left, x + i, width, min(LANES, width - i), lefts, i * count, LANES, count)
            for j in range(0, columns, COLUMNS):
                gather(right, y + j, columns, min(COLUMNS, columns - j), panel, 0, COLUMNS, count)
                for i in range(0, width, ROWS):
                    at = i // LANES * LANES * count + i % LANES
                    add(out, i * line + j, line, tile(lefts, at, 1, LANES, panel, 0, COLUMNS, count))
