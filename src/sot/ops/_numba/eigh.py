"""Eigenvectors of symmetric float64 matrices, eight abreast: Householder reflections, then implicit QL.

All arithmetic of a lane is its own matrix's: what its neighbours hold changes no bit of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sot.ops._numba.lanes import LANES, any_of, fill, load, magnitude, root, routine, select, store, with_sign

Array = Any
Register = Any

ROUNDING = 2.0**-53
SWEEPS = 4  # that the vectors follow at once, while two of their rows are in the nearest cache
MAX_SWEEPS = 30  # for one eigenvalue; two are usual


@routine
def reflect(a: Array, row: int, count: int) -> tuple[Register, Register]:
    """Turn `count` numbers of a row into the vector u that reflects them onto the last: what remains there, 2/‖u‖²."""
    zero, one = fill(0.0), fill(1.0)
    last, square = row + (count - 1) * LANES, zero
    for j in range(count):
        x = load(a, row + j * LANES)
        square = square + x * x
    pivot = load(a, last)
    length = with_sign(root(square), pivot)
    store(a, last, pivot + length)
    square = square + pivot * length
    return -length, select(zero < square, one / select(zero < square, square, one), zero)


@routine
def multiply_symmetric(a: Array, count: int, stride: int, row: int, p: Array) -> Register:
    """`p = A u` of the lower triangle and the vector in a row; `uᵀ A u`."""
    along = fill(0.0)
    for j in range(count):
        at, u = j * stride * LANES, load(a, row + j * LANES)
        total = load(a, at + j * LANES) * u
        for k in range(j):
            x = load(a, at + k * LANES)
            total = total + x * load(a, row + k * LANES)
            store(p, k * LANES, load(p, k * LANES) + x * u)
        store(p, j * LANES, total)
    for j in range(count):
        along = along + load(p, j * LANES) * load(a, row + j * LANES)
    return along


@routine
def tridiagonalize(a: Array, n: int, stride: int, diagonal: Array, beside: Array, inverses: Array, p: Array) -> None:
    """Reflect the lower triangle from its last row up; row i keeps its vector u, `inverses` its 2/‖u‖²."""
    for i in range(n - 1, 1, -1):
        row = i * stride * LANES
        remaining, inverse = reflect(a, row, i)
        store(beside, (i - 1) * LANES, remaining)
        store(inverses, i * LANES, inverse)
        along = multiply_symmetric(a, i, stride, row, p) * inverse * fill(0.5)
        for j in range(i):
            store(p, j * LANES, (load(p, j * LANES) - along * load(a, row + j * LANES)) * inverse)
        for j in range(i):  # A -= u pᵀ + p uᵀ
            at, u, q = j * stride * LANES, load(a, row + j * LANES), load(p, j * LANES)
            for k in range(j + 1):
                x = load(a, at + k * LANES)
                store(a, at + k * LANES, x - u * load(p, k * LANES) - q * load(a, row + k * LANES))
    for i in range(n):
        store(diagonal, i * LANES, load(a, (i * stride + i) * LANES))
    if n > 1:
        store(beside, 0, load(a, stride * LANES))
    store(beside, (n - 1) * LANES, fill(0.0))


@routine
def accumulate(a: Array, n: int, stride: int, inverses: Array, vectors: Array) -> None:
    """The product of the reflections that `tridiagonalize` left in `a`, two columns at a time."""
    vectors[:] = 0
    for i in range(n):
        store(vectors, (i * stride + i) * LANES, fill(1.0))
    for i in range(2, n):
        row, inverse = i * stride * LANES, load(inverses, i * LANES)
        for j in range(0, i, 2):
            p0 = p1 = fill(0.0)
            for k in range(i):
                u, at = load(a, row + k * LANES), (k * stride + j) * LANES
                p0, p1 = p0 + u * load(vectors, at), p1 + u * load(vectors, at + LANES)
            p0, p1 = p0 * inverse, p1 * inverse
            for k in range(i):
                u, at = load(a, row + k * LANES), (k * stride + j) * LANES
                store(vectors, at, load(vectors, at) - u * p0)
                store(vectors, at + LANES, load(vectors, at + LANES) - u * p1)


@routine
def find_blocks(
    diagonal: Array, beside: Array, low: int, n: int, tolerance: Register
) -> tuple[Register, Register, Register]:
    """Lane by lane the first block that is not diagonal: its start and end, or n and -1, and how a sweep begins.

    Below `low` all lanes are diagonal, and stay so. `tests/eigh_scalar.py` has the same for one matrix.
    """
    zero, one = fill(0.0), fill(1.0)
    first, end, stop = fill(float(n)), fill(-1.0), fill(n - 1.0)
    corner = above = below = zero
    e = one
    last = following = load(diagonal, (n - 1) * LANES)
    for i in range(n - 2, low - 1, -1):
        index, here, coupling = fill(float(i)), load(diagonal, i * LANES), load(beside, i * LANES)
        small = magnitude(coupling) <= tolerance
        stop, last = select(small, index, stop), select(small, here, last)
        first, end, corner = select(small, first, index), select(small, end, stop), select(small, corner, last)
        above, e, below = select(small, above, here), select(small, e, coupling), select(small, below, following)
        following = here
    g = (below - above) / (e + e)  # the shift is the eigenvalue of the upper corner that is closer to it
    return first, end, corner - above + e / (g + with_sign(root(g * g + one), g))


@routine
def sweep(
    diagonal: Array, beside: Array, turns: Array, window: tuple[int, int], first: Register, end: Register, g: Register
) -> None:
    """One implicit QL step up the window; a lane turns between its own `first` and `end` only. Keeps (cos, sin).

    `tests/eigh_scalar.py` has the same for one matrix, and the source of the algorithm.
    """
    zero, one = fill(0.0), fill(1.0)
    s, c, q = one, one, load(diagonal, window[1] * LANES)
    for i in range(window[1] - 1, window[0] - 1, -1):
        here, below, index = i * LANES, (i + 1) * LANES, fill(float(i))
        on = (first <= index) & (index < end)
        d, e = load(diagonal, here), load(beside, here)
        f, b = s * e, c * e
        square = f * f + g * g
        inverse = root(square) * (one / select(zero < square, square, one))
        store(beside, below, select(on & (index + one < end), square * inverse, load(beside, below)))
        sine, cosine = f * inverse, select(zero < square, g * inverse, one)
        r = (d - q) * sine + (cosine + cosine) * b
        p = sine * r
        store(diagonal, below, select(on, q + p, load(diagonal, below)))
        g, q = select(on, cosine * r - b, g), select(on, d - p, d)
        s, c = select(on, sine, one), select(on, cosine, one)
        store(diagonal, here, q)
        store(beside, here, select(on, g, e))
        store(turns, 2 * here, c)
        store(turns, 2 * here + LANES, select(on, sine, zero))


@routine
def rotate(vectors: Array, stride: int, turns: Array, windows: Array) -> None:
    """Turn the columns as in several sweeps, two rows at a time, with the column that two turns share in registers."""
    for k in range(0, stride, 2):
        row, next_row = k * stride * LANES, (k + 1) * stride * LANES
        for j in range(len(windows)):
            start, stop, kept = windows[j, 0] * LANES, windows[j, 1] * LANES, j * 2 * stride * LANES
            x0, x1 = load(vectors, row + stop), load(vectors, next_row + stop)
            for at in range(stop - LANES, start - LANES, -LANES):
                c, s = load(turns, kept + 2 * at), load(turns, kept + 2 * at + LANES)
                y0, y1 = load(vectors, row + at), load(vectors, next_row + at)
                store(vectors, row + at + LANES, s * y0 + c * x0)
                store(vectors, next_row + at + LANES, s * y1 + c * x1)
                x0 = c * y0 - s * x0
                x1 = c * y1 - s * x1
            store(vectors, row + start, x0)
            store(vectors, next_row + start, x1)


@routine
def diagonalize(diagonal: Array, beside: Array, n: int, vectors: Array, stride: int, turns: Array) -> None:
    """Implicit QL of a tridiagonal block; `turns` has room for `SWEEPS` sweeps, after which the vectors follow."""
    tolerance = fill(0.0)
    for i in range(n):
        size = magnitude(load(diagonal, i * LANES)) + magnitude(load(beside, i * LANES))
        tolerance = select(tolerance < size, size, tolerance)
    tolerance = tolerance * fill(ROUNDING)
    windows, kept = np.empty((SWEEPS, 2), np.intp), 0
    low = 0
    for _ in range(MAX_SWEEPS * n):
        first, end, g = find_blocks(diagonal, beside, low, n, tolerance)
        while low < n and not any_of(first <= fill(float(low))):
            low += 1
        if low == n:
            break
        top = n - 1
        while not any_of(fill(float(top)) <= end):
            top -= 1
        sweep(diagonal, beside, turns[kept * 2 * stride * LANES :], (low, top), first, end, g)
        windows[kept] = low, top
        kept += 1
        if kept == SWEEPS:
            rotate(vectors, stride, turns, windows)
            kept = 0
    rotate(vectors, stride, turns, windows[:kept])
