"""Eigenvectors of symmetric float64 matrices, eight abreast: Householder reflections, then implicit QL.

All arithmetic of a lane is its own matrix's: what its neighbours hold changes no bit of it.
"""

from __future__ import annotations

from typing import Any

from sot.core.simd_lanes import LANES, any_of, fill, load, magnitude, root, routine, select, store, with_sign

Array = Any
Register = Any

ROUNDING = 2.0**-53
MAX_SWEEPS = 60  # for one eigenvalue; two or three are usual


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
def accumulate(a: Array, n: int, stride: int, inverses: Array, vectors: Array, p: Array) -> None:
    """The product of the reflections that `tridiagonalize` left in `a`."""
    zero, one = fill(0.0), fill(1.0)
    vectors[:] = 0
    for i in range(n):
        store(vectors, (i * stride + i) * LANES, one)
    for i in range(2, n):
        row, inverse = i * stride * LANES, load(inverses, i * LANES)
        for j in range(i):
            store(p, j * LANES, zero)
        for k in range(i):
            at, u = k * stride * LANES, load(a, row + k * LANES)
            for j in range(i):
                store(p, j * LANES, load(p, j * LANES) + u * load(vectors, at + j * LANES))
        for k in range(i):
            at, u = k * stride * LANES, load(a, row + k * LANES) * inverse
            for j in range(i):
                store(vectors, at + j * LANES, load(vectors, at + j * LANES) - u * load(p, j * LANES))


@routine
def sweep(
    diagonal: Array, beside: Array, cosines: Array, sines: Array, low: int, top: int, end: Register, shifted: Register
) -> None:
    """One implicit QL step from `end`, each lane's own, down to `low`; a lane that is not there yet does not turn."""
    zero, one = fill(0.0), fill(1.0)
    g, s, c, p = shifted, one, one, zero
    for i in range(top - 1, low - 1, -1):
        here, below = i * LANES, (i + 1) * LANES
        turns, inside = fill(float(i)) < end, fill(i + 1.0) < end
        e, d = load(beside, here), load(diagonal, below)
        f, b = s * e, c * e
        r = root(f * f + g * g)
        store(beside, below, select(inside, r, load(beside, below)))
        inverse = one / select(zero < r, r, one)
        sine, cosine = f * inverse, select(zero < r, g * inverse, one)
        q = d - p
        r = (load(diagonal, here) - q) * sine + (cosine + cosine) * b
        store(diagonal, below, select(turns, q + sine * r, d))
        g, p = select(turns, cosine * r - b, g), select(turns, sine * r, p)
        s, c = select(turns, sine, one), select(turns, cosine, one)
        store(cosines, here, c)
        store(sines, here, select(turns, sine, zero))
    store(diagonal, low * LANES, load(diagonal, low * LANES) - p)
    store(beside, low * LANES, select(fill(float(low)) < end, g, load(beside, low * LANES)))


@routine
def rotate(vectors: Array, stride: int, cosines: Array, sines: Array, low: int, top: int) -> None:
    """Turn the columns as in `sweep`, two rows at a time, with the column that two turns share kept in registers."""
    for k in range(0, stride, 2):
        row, next_row = k * stride * LANES, (k + 1) * stride * LANES
        x0, x1 = load(vectors, row + top * LANES), load(vectors, next_row + top * LANES)
        for i in range(top - 1, low - 1, -1):
            at = i * LANES
            c, s = load(cosines, at), load(sines, at)
            y0, y1 = load(vectors, row + at), load(vectors, next_row + at)
            store(vectors, row + at + LANES, s * y0 + c * x0)
            store(vectors, next_row + at + LANES, s * y1 + c * x1)
            x0 = c * y0 - s * x0
            x1 = c * y1 - s * x1
        store(vectors, row + low * LANES, x0)
        store(vectors, next_row + low * LANES, x1)


@routine
def split_off(diagonal: Array, beside: Array, n: int, low: int, tolerance: Register) -> tuple[Register, Register]:
    """Lane by lane: where the block that starts at `low` ends, and the diagonal there."""
    end, last = fill(n - 1.0), load(diagonal, (n - 1) * LANES)
    for i in range(n - 2, low - 1, -1):
        small = magnitude(load(beside, i * LANES)) <= tolerance
        end = select(small, fill(float(i)), end)
        last = select(small, load(diagonal, i * LANES), last)
    return end, last


@routine
def diagonalize(
    diagonal: Array, beside: Array, n: int, vectors: Array, stride: int, cosines: Array, sines: Array
) -> None:
    """Implicit QL: eigenvalue after eigenvalue, until it stands alone in every lane."""
    tolerance = fill(0.0)
    for i in range(n):
        size = magnitude(load(diagonal, i * LANES)) + magnitude(load(beside, i * LANES))
        tolerance = select(tolerance < size, size, tolerance)
    tolerance = tolerance * fill(ROUNDING)
    for low in range(n - 1):
        for _ in range(MAX_SWEEPS):
            end, last = split_off(diagonal, beside, n, low, tolerance)
            unfinished = fill(float(low)) < end
            if not any_of(unfinished):
                break
            top = n - 1
            while not any_of(fill(float(top)) <= end):
                top -= 1
            here, e = load(diagonal, low * LANES), select(unfinished, load(beside, low * LANES), fill(1.0))
            g = (load(diagonal, (low + 1) * LANES) - here) / (e + e)
            g = last - here + e / (g + with_sign(root(g * g + fill(1.0)), g))
            sweep(diagonal, beside, cosines, sines, low, top, end, g)
            rotate(vectors, stride, cosines, sines, low, top)
