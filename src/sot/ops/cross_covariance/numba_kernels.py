"""Products of tokens where they lie: with a matrix, with each other, and head by head; compiled by numba.

A row of `projected` is one token: X of all heads, then Y of all heads. Numba's cache watches this file alone: delete
`__pycache__` after a change to one that it imports.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from sot.ops._numba.lanes import LANES, kernel, load, routine, store
from sot.ops._numba.tiles import COLUMNS, FLAT, ROWS, Place, add, matrix_product, put, tile

Array = Any

SIZES = numba.types.UniTuple(numba.intp, 3)  # heads, m, n
SAMPLES = numba.types.UniTuple(numba.intp, 2)  # from the first to before the last
WHOLE = numba.int64[::1]
TOKENS = 256  # of a sample at a time, for the panels of a sum of products to stay in the nearest cache


class Tokens(NamedTuple):
    """Tokens of samples that may lie apart: where each begins, and its first row of what is made of them all."""

    numbers: Array
    begins: Array
    starts: Array  # and the end of the last
    dim: int
    at_a_time: int  # at most, of samples that lie side by side


TOKENS_TYPE = numba.types.NamedTuple((FLAT, WHOLE, WHOLE, numba.intp, numba.intp), Tokens)


@routine
def cross_products(
    projected: Array, starts: Array, sizes: tuple[int, int, int], out: Array, one: int, end: int
) -> None:
    """`XᵀY` of each head of the samples from `one` to before the `end`."""
    heads, m, n = sizes
    width = heads * (m + n)
    for sample in range(one, end):
        first, tokens = starts[sample] * width, starts[sample + 1] - starts[sample]
        for head in range(heads):
            x = first + head * m
            y = first + heads * m + head * n
            at = (sample * heads + head) * m * n
            transposed, right = Place(x, 1, width), Place(y, width, 1)
            matrix_product(out, Place(at, n, 1), projected, transposed, projected, right, (m, n, tokens))


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
        matrix_product(out, Place(x + behind, width, 1), projected, right, transposed, Place(at, m, 1), (ROWS, m, n))
        matrix_product(out, Place(y + behind, width, 1), projected, left, grad, Place(first + at, n, 1), (ROWS, n, m))
        x += m
        y += n


@routine
def pull_back(
    projected: Array, grad: Array, starts: Array, sizes: tuple[int, int, int], out: Array, one: int, end: int
) -> None:
    """The gradient of `projected` from that of `cross_products`, `YGᵀ` and `XG`; the rows of `out` begin with `one`."""
    heads, m, n = sizes
    width, size = heads * (m + n), m * n
    transposed = np.empty((heads, n, m), np.float32)
    few, pulled = np.zeros(ROWS * width, np.float32), np.empty(ROWS * width, np.float32)
    shift = starts[one] * width
    for sample in range(one, end):
        begin, tokens = starts[sample] * width, starts[sample + 1] - starts[sample]
        first = sample * heads * size
        for head in range(heads):
            transposed[head] = grad[first + head * size : first + (head + 1) * size].reshape(m, n).T
        if tokens >= ROWS:
            for token in range(0, tokens, ROWS):
                row = begin + min(token, tokens - ROWS) * width
                pull_back_rows(projected, row, grad, first, transposed.reshape(-1), sizes, out, row - shift)
        else:
            few[: tokens * width] = projected[begin : begin + tokens * width]
            pull_back_rows(few, 0, grad, first, transposed.reshape(-1), sizes, pulled, 0)
            out[begin - shift : begin - shift + tokens * width] = pulled[: tokens * width]


@kernel(numba.void(FLAT, numba.types.UniTuple(numba.intp, 4), FLAT))
def pack_panels(matrix: Array, layout: tuple[int, int, int, int], out: Array) -> None:
    """Panels of 24 columns, the last with what comes before it: `layout` is rows, columns, and their distances."""
    rows, columns, down, across = layout
    at = 0
    for j in range(0, columns, COLUMNS):
        first = min(j, columns - COLUMNS) * across
        for i in range(rows):
            for column in range(COLUMNS):
                out[at] = matrix[first + i * down + column * across]
                at += 1


@routine
def times_panels(left: Array, x: int, shape: tuple[int, int, int], panels: Array, out: Array, to: int) -> None:
    """At least 4 rows from `x` on, times a packed matrix, to rows from `to` on.

    The `shape` is that of the product, and what is summed over, last.
    """
    rows, columns, inner = shape
    panel = 0
    for j in range(0, columns, COLUMNS):
        at = to + min(j, columns - COLUMNS)
        for i in range(0, rows, ROWS):
            row = min(i, rows - ROWS)
            put(out, at + row * columns, columns, tile(left, x + row * inner, inner, 1, panels, panel, COLUMNS, inner))
        panel += COLUMNS * inner


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


@routine
def add_products(left: Array, right: Array, y: int, shape: tuple[int, int, int], room: Array, out: Array) -> None:
    """`out += AᵀB`, A from the beginning and B from `y` on, in rows; `out` is padded to whole tiles.

    The `shape` is that of the product, a multiple of 4 first, and what is summed over, last.
    """
    width, columns, tokens = shape
    line = (columns + COLUMNS - 1) // COLUMNS * COLUMNS
    pieces = (tokens + TOKENS - 1) // TOKENS
    most = (tokens + pieces - 1) // pieces  # tokens at a time
    panel = (width + LANES - 1) // LANES * LANES * TOKENS  # in the room, behind the left ones
    for start in range(0, tokens, most):
        count = min(most, tokens - start)
        for i in range(0, width, LANES):  # in panels too: a tile reads few lines
            gather(left, start * width + i, width, min(LANES, width - i), room, i * count, LANES, count)
        for j in range(0, columns, COLUMNS):
            gather(right, y + start * columns + j, columns, min(COLUMNS, columns - j), room, panel, COLUMNS, count)
            for i in range(0, width, ROWS):
                at = i // LANES * LANES * count + i % LANES
                add(out, i * line + j, line, tile(room, at, 1, LANES, room, panel, COLUMNS, count))


@routine
def piece_end(tokens: Tokens, first: int, end: int) -> int:
    """Before which sample a piece ends that begins with the `first`: samples that lie apart are not put together."""
    last, row = first + 1, tokens.starts[first]
    while last < end and tokens.starts[last + 1] - row <= tokens.at_a_time:
        if tokens.begins[last] != tokens.begins[first] + (tokens.starts[last] - row) * tokens.dim:
            break
        last += 1
    return last


@routine
def subtract_mean(projected: Array, starts: Array, width: int, one: int, end: int) -> None:
    """Of each column over the tokens of each sample."""
    for sample in range(one, end):
        mean = np.zeros(width)
        for row in range(starts[sample], starts[sample + 1]):
            for column in range(width):
                mean[column] += projected[row * width + column]
        mean /= max(1, starts[sample + 1] - starts[sample])
        for row in range(starts[sample], starts[sample + 1]):
            for column in range(width):
                projected[row * width + column] -= mean[column]


@kernel(numba.void(TOKENS_TYPE, FLAT, SIZES, numba.boolean, FLAT, FLAT, SAMPLES))
def project(
    tokens: Tokens,
    panels: Array,
    sizes: tuple[int, int, int],
    center: bool,
    projected: Array,
    out: Array,
    samples: tuple[int, int],
) -> None:
    """Multiply the tokens of a range of samples with a packed matrix, and with each other, a piece at a time."""
    width, dim, starts = sizes[0] * (sizes[1] + sizes[2]), tokens.dim, tokens.starts
    first = samples[0]
    while first < samples[1]:
        last = piece_end(tokens, first, samples[1])
        row, count = starts[first], starts[last] - starts[first]
        if 0 < count < ROWS:  # with rows before or after it, which come out the same
            row, count = min(row, starts[-1] - ROWS), ROWS
        x = tokens.begins[first] + (row - starts[first]) * dim
        if count > 0:
            times_panels(tokens.numbers, x, (count, width, dim), panels, projected, row * width)
        if center:
            subtract_mean(projected, starts, width, first, last)
        cross_products(projected, starts, sizes, out, first, last)
        first = last


@kernel(numba.void(TOKENS_TYPE, FLAT, SIZES, FLAT, FLAT, FLAT, FLAT, SAMPLES))
def pull_back_to_tokens(
    tokens: Tokens,
    panels: Array,
    sizes: tuple[int, int, int],
    projected: Array,
    grad: Array,
    d_tokens: Array,
    d_weight: Array,
    samples: tuple[int, int],
) -> None:
    """The gradient of `project` for a range of samples: of tokens, if there are panels, and of the weight, if wanted.

    That of the weight is added to `d_weight`, which is padded to whole tiles or empty.
    """
    width, dim, starts = sizes[0] * (sizes[1] + sizes[2]), tokens.dim, tokens.starts
    longest = tokens.at_a_time  # more are in a piece only if it is one sample
    for sample in range(samples[0], samples[1]):
        longest = max(longest, starts[sample + 1] - starts[sample])
    pulled = np.zeros(longest * width, np.float32)
    few = np.empty(ROWS * dim, np.float32)
    room = np.empty(((width + LANES - 1) // LANES * LANES + COLUMNS) * TOKENS, np.float32)
    first = samples[0]
    while first < samples[1]:
        last = piece_end(tokens, first, samples[1])
        at, count = starts[first] * dim, starts[last] - starts[first]
        pull_back(projected, grad, starts, sizes, pulled, first, last)
        if len(panels) > 0 and count >= ROWS:
            times_panels(pulled, 0, (count, dim, width), panels, d_tokens, at)
        elif len(panels) > 0:
            times_panels(pulled, 0, (ROWS, dim, width), panels, few, 0)
            d_tokens[at : at + count * dim] = few[: count * dim]
        if len(d_weight) > 0 and count > 0:
            add_products(pulled, tokens.numbers, tokens.begins[first], (width, dim, count), room, d_weight)
        first = last
