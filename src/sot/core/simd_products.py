"""svPN of exponent ½ by matrix products only, eight matrices abreast, compiled by numba.

Loaded by `sot.core.simd` where numba is installed; numba's cache watches this file alone: delete `__pycache__` after a
change to one that it imports. The steps are those of `sot.core.newton_schulz`: rows (a, b, c) of x ↦ ax + bx³ + cx⁵.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sot.core.simd_blocks import BATCH, GROUPS, pack, strides, unpack
from sot.core.simd_lanes import (
    LANES,
    fill,
    kernel,
    load,
    root,
    routine,
    select,
    store,
    to_double,
    to_single,
    zeros_like,
)

Array = Any
Pair = tuple[Array, Array]
Register = Any

STEPS = numba.types.UniTuple(numba.float64[:, ::1], 2)  # to the polar factor, to the square root
TILE = 3  # rows and columns of a product at a time: nine sums and six factors fit in sixteen registers


@routine
def padded(number: int) -> int:
    """Rounded up to whole tiles."""
    return -(-number // TILE) * TILE


@routine
def put(out: Array, row: int, line: int, c0: Register, c1: Register, c2: Register) -> None:
    """Three numbers, one in each `line` from a `row` on."""
    store(out, row, c0)
    store(out, row + line, c1)
    store(out, row + 2 * line, c2)


@routine
def combine(
    out: Array,
    factor: float,
    a: Array,
    a_strides: tuple[int, int],
    b: Array,
    shape: tuple[int, int, int],
    share: float,
    addend: Array,
    symmetric: bool,
) -> None:
    """`out = factor · a b + share · addend`; of what is `symmetric` one triangle is computed, and mirrored.

    A transposed `a` has its strides swapped. The `shape` is that of the product and what is summed over, last.
    """
    zero, times, part = zeros_like(out), to_single(fill(factor)), to_single(fill(share))
    rows, columns, inner = shape
    line, a_row, a_inner = columns * LANES, a_strides[0] * LANES, a_strides[1] * LANES
    for i in range(0, rows, TILE):
        for j in range(0, i + TILE if symmetric else columns, TILE):
            c00, c01, c02, c10, c11, c12, c20, c21, c22 = zero, zero, zero, zero, zero, zero, zero, zero, zero
            x, y = i * a_row, j * LANES
            for _ in range(inner):
                b0, b1, b2 = load(b, y), load(b, y + LANES), load(b, y + 2 * LANES)
                a0 = load(a, x)
                c00, c01, c02 = c00 + a0 * b0, c01 + a0 * b1, c02 + a0 * b2
                a1 = load(a, x + a_row)
                c10, c11, c12 = c10 + a1 * b0, c11 + a1 * b1, c12 + a1 * b2
                a2 = load(a, x + 2 * a_row)
                c20, c21, c22 = c20 + a2 * b0, c21 + a2 * b1, c22 + a2 * b2
                x += a_inner
                y += line
            if symmetric and i == j:
                c01, c02, c12 = c10, c20, c21
            at = i * line + j * LANES
            if share != 0:
                top, middle, low = at, at + line, at + 2 * line
                c00 = times * c00 + part * load(addend, top)
                c01 = times * c01 + part * load(addend, top + LANES)
                c02 = times * c02 + part * load(addend, top + 2 * LANES)
                c10 = times * c10 + part * load(addend, middle)
                c11 = times * c11 + part * load(addend, middle + LANES)
                c12 = times * c12 + part * load(addend, middle + 2 * LANES)
                c20 = times * c20 + part * load(addend, low)
                c21 = times * c21 + part * load(addend, low + LANES)
                c22 = times * c22 + part * load(addend, low + 2 * LANES)
            put(out, at, line, c00, c10, c20)
            put(out, at + LANES, line, c01, c11, c21)
            put(out, at + 2 * LANES, line, c02, c12, c22)
            if symmetric and i != j:
                at = j * line + i * LANES
                put(out, at, LANES, c00, c10, c20)
                put(out, at + line, LANES, c01, c11, c21)
                put(out, at + 2 * line, LANES, c02, c12, c22)


@routine
def add_identity(block: Array, columns: int, times: float) -> None:
    """A multiple of it, in place."""
    for at in range(0, block.size, (columns + 1) * LANES):
        store(block, at, load(block, at) + to_single(fill(times)))


@routine
def symmetrize(block: Array, columns: int) -> None:
    """The mean with the transpose, in place."""
    half = to_single(fill(0.5))
    for i in range(columns):
        for j in range(i):
            at, mirrored = (i * columns + j) * LANES, (j * columns + i) * LANES
            mean = (load(block, at) + load(block, mirrored)) * half
            store(block, at, mean)
            store(block, mirrored, mean)


@routine
def or_one(value: Register) -> Register:
    """The value, or one for a zero."""
    one = to_single(fill(1.0))
    return select(value == to_single(fill(0.0)), one, value)


@routine
def largest_of(block: Array) -> Register:
    """The largest magnitude in each lane, or NaN in one with a number that is not finite."""
    zero = zeros_like(block)
    largest, poison = zero, zero
    for at in range(0, block.size, LANES):
        x = load(block, at)
        poison = poison + x * zero
        largest = select(largest < x, x, largest)
        largest = select(largest < -x, -x, largest)
    return largest + poison


@routine
def divide(block: Array, divisor: Register) -> None:
    """All numbers, in place."""
    for at in range(0, block.size, LANES):
        store(block, at, load(block, at) / divisor)


@routine
def scale(block: Array, gram: Array, shape: tuple[int, int, int]) -> Register:
    """Divide by ‖QᵀQ‖^½, in the Frobenius norm; the Gram matrix of the result; the root of the divisor."""
    largest = or_one(largest_of(block))
    divide(block, largest)
    combine(gram, 1.0, block, strides(shape[1])[1], block, shape, 0.0, gram, True)
    total = zeros_like(gram)
    for at in range(0, gram.size, LANES):
        x = load(gram, at)
        total = total + x * x
    bound = root(to_double(or_one(total)))
    divide(gram, to_single(bound))
    divide(block, to_single(root(bound)))
    return root(to_double(largest) * root(bound))


@routine
def polar_factor(q: Array, gram: Array, steps: Array, rooms: Pair, step: Array, m: int, n: int) -> Array:
    """P of a scaled Q, whose Gram matrix is given, in one of the rooms."""
    columns = padded(n)
    across, down = strides(columns)
    polar = q
    for k in range(len(steps)):
        a, b, c = steps[k]
        if k > 0:
            combine(gram, 1.0, polar, down, polar, (columns, columns, m), 0.0, gram, True)
        combine(step, c, gram, down, gram, (columns, columns, n), b, gram, True)
        add_identity(step, columns, a - 1)  # the last steps are near zero, so that P + P·step is rounded once
        room = rooms[k % 2]
        combine(room, 1.0, polar, across, step, (padded(m), columns, n), 1.0, polar, False)
        polar = room
    return polar


@routine
def square_root(spd: Array, steps: Array, rooms: Pair, inverses: Pair, product: Array, step: Array, n: int) -> Array:
    """The root of a symmetric H, in one of the rooms.

    Polynomials of H commute, so all products are symmetric; but mirroring the inverse times the root, or its square,
    lets the rounding where H is singular grow tenfold.
    """
    columns = padded(n)
    (across, down), shape = strides(columns), (columns, columns, n)
    base, inverse = spd, inverses[0]
    for k in range(len(steps)):
        a, b, c = steps[k]
        if k == 0:
            product[:] = spd
        else:
            combine(product, 1.0, inverse, down, base, shape, 0.0, product, False)
        combine(step, c, product, across, product, shape, b, product, k == 0)
        add_identity(step, columns, a - 1)
        room = rooms[k % 2]
        combine(room, 1.0, base, down, step, shape, 1.0, base, True)
        base = room
        if k == 0:
            inverse[:] = step
            add_identity(inverse, columns, 1.0)
        elif k + 1 < len(steps):
            room = inverses[k % 2]
            combine(room, 1.0, step, across, inverse, shape, 1.0, inverse, True)
            inverse = room
    return base


@kernel(numba.void(BATCH, STEPS, BATCH, GROUPS))
def power(matrix: Array, steps: Pair, out: Array, groups: tuple[int, int]) -> None:
    """`out = P H^½` for a range of groups: the polar factor P by the first steps, the root of H = PᵀQ by the others."""
    m, n = matrix.shape[1], matrix.shape[2]
    rows, columns = padded(m), padded(n)
    size, square = rows * columns * LANES, columns * columns * LANES
    q, polars = np.empty(size, np.float32), (np.empty(size, np.float32), np.empty(size, np.float32))
    gram, step, spd = np.empty(square, np.float32), np.empty(square, np.float32), np.empty(square, np.float32)
    roots = np.empty(square, np.float32), np.empty(square, np.float32)
    inverses = np.empty(square, np.float32), np.empty(square, np.float32)
    across, down = strides(columns)
    for group in range(groups[0], groups[1]):
        pack(matrix, group * LANES, q, columns)
        scale_back = scale(q, gram, (columns, columns, m))
        polar = polar_factor(q, gram, steps[0], polars, step, m, n)
        combine(spd, 1.0, polar, down, q, (columns, columns, m), 0.0, gram, False)
        symmetrize(spd, columns)
        root_of_spd = square_root(spd, steps[1], roots, inverses, gram, step, n)
        combine(q, 1.0, polar, across, root_of_spd, (rows, columns, n), 0.0, q, False)
        for at in range(0, size, LANES):
            store(q, at, to_single(to_double(load(q, at)) * scale_back))
        unpack(q, columns, out, group * LANES)
