"""The gradient of svPN of exponent ½ by matrix products, eight matrices abreast, compiled by numba.

The products act on singular values alone, as one odd function f: its divided differences give the gradient as in
`sot.core.spectral`, from eigenvectors, for less than the products backwards. See `simd_products.py` for the rest.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sot.core.simd_blocks import BATCH, GROUPS, multiply, pack, strides, unpack
from sot.core.simd_lanes import LANES, fill, kernel, load, root, routine, select, store, to_double, to_single
from sot.core.simd_products import STEPS

Array = Any
Pair = tuple[Array, Array]
Register = Any


@routine
def value_and_slope(x: Register, steps: Pair) -> tuple[Register, Register]:
    """What the products make of a singular value, and the derivative of it."""
    p, dp = x, fill(1.0)
    for k in range(len(steps[0])):
        a, b, c, square = fill(steps[0][k, 0]), fill(steps[0][k, 1]), fill(steps[0][k, 2]), p * p
        dp = dp * (a + square * (fill(3.0) * b + fill(5.0) * c * square))
        p = p * (a + square * (b + c * square))
    y, dy, z, dz = p * x, dp * x + p, fill(1.0), fill(0.0)  # root and inverse root
    for k in range(len(steps[1])):
        a, b, c = fill(steps[1][k, 0]), fill(steps[1][k, 1]), fill(steps[1][k, 2])
        product, change = z * y, dz * y + z * dy
        step, change = a + product * (b + c * product), change * (b + fill(2.0) * c * product)
        y, dy, z, dz = y * step, dy * step + y * change, z * step, dz * step + z * change
    return p * y, dp * y + p * dy


@routine
def quotient(numerator: Register, denominator: Register, limit: Register) -> Register:
    """The limit where the denominator is zero."""
    none = denominator == fill(0.0)
    return select(none, limit, numerator / select(none, fill(1.0), denominator))


@routine
def relate(values: Array, steps: Pair, x: Array, f: Array, slopes: Array) -> Register:
    """Singular values over their bound s = (Σ λ⁴)^¼, the function and its slope there; s^-½."""
    total = fill(0.0)
    for at in range(0, values.size, LANES):
        square = to_double(load(values, at)) * to_double(load(values, at))
        total = total + square * square
    bound = root(root(select(total == fill(0.0), fill(1.0), total)))
    for at in range(0, values.size, LANES):
        unit = to_double(load(values, at)) / bound
        value, slope = value_and_slope(unit, steps)
        store(x, at, unit)
        store(f, at, value)
        store(slopes, at, slope)
    return root(fill(1.0) / bound)


@routine
def weigh(t: Array, x: Array, f: Array, slopes: Array, ratio: Array, out: Array) -> None:
    """`A∘T + B∘Tᵀ - T diag(ratio)` as in `sot.core.spectral`, and through the bound `diag(x³) Σ Tᵢᵢ(fᵢ/2 - xᵢfᵢ')`."""
    line, half, moved = x.size, fill(0.5), fill(0.0)
    for at in range(0, line, LANES):
        moved = moved + to_double(load(t, at // LANES * line + at)) * (
            half * load(f, at) - load(x, at) * load(slopes, at)
        )
        store(ratio, at, quotient(load(f, at), load(x, at), load(slopes, at)))
    for i in range(0, line, LANES):
        x0, f0, slope = load(x, i), load(f, i), load(slopes, i)
        for j in range(0, i, LANES):
            at, mirrored = i // LANES * line + j, j // LANES * line + i
            difference = half * quotient(f0 - load(f, j), x0 - load(x, j), slope)
            mean = half * quotient(f0 + load(f, j), x0 + load(x, j), slope)
            same, swapped = difference + mean, difference - mean
            left, right = to_double(load(t, at)), to_double(load(t, mirrored))
            store(out, at, to_single((same - load(ratio, j)) * left + swapped * right))
            store(out, mirrored, to_single((same - load(ratio, i)) * right + swapped * left))
        at = i // LANES * line + i
        store(out, at, to_single((slope - load(ratio, i)) * to_double(load(t, at)) + moved * x0 * x0 * x0))


BLOCKS = numba.types.UniTuple(numba.float32[:, ::1], 3)


@kernel(numba.void(BATCH, BLOCKS, STEPS, BATCH, GROUPS))
def pull_back(grad: Array, kept: tuple[Array, ...], steps: Pair, out: Array, groups: tuple[int, int]) -> None:
    """The gradient of `simd_products.power` from U, λ and V in blocks of even size, for a range of groups."""
    rows, columns = grad.shape[1] + grad.shape[1] % 2, grad.shape[2] + grad.shape[2] % 2
    size, square, line = rows * columns * LANES, columns * columns * LANES, columns * LANES
    packed, mapped, result = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    products, middle = np.empty(square, np.float32), np.empty(square, np.float32)
    x, f, slopes, ratio = np.empty(line), np.empty(line), np.empty(line), np.empty(line)
    across, down = strides(columns)
    for group in range(groups[0], groups[1]):
        left, values, right = kept[0][group], kept[1][group], kept[2][group]
        pack(grad, group * LANES, packed, columns)
        multiply(mapped, packed, across, right, across, (rows, columns, columns))
        multiply(products, left, down, mapped, across, (columns, columns, rows))
        scale_back = relate(values, steps, x, f, slopes)
        weigh(products, x, f, slopes, ratio, middle)
        multiply(result, left, across, middle, across, (rows, columns, columns))
        for row in range(0, size, line):
            for at in range(0, line, LANES):
                total = to_double(load(result, row + at)) + to_double(load(mapped, row + at)) * load(ratio, at)
                store(result, row + at, to_single(total * scale_back))
        multiply(packed, result, across, right, down, (rows, columns, columns))
        unpack(packed, columns, out, group * LANES)
