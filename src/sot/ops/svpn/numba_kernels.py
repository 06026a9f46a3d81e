"""svPN and its gradient with eight matrices abreast, one in each lane of a SIMD register, compiled by numba.

Rows and columns are padded to an even number.
Numba's cache watches this file alone: delete `__pycache__` after a change to one that it imports.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sot.ops._numba.blocks import BATCH, GROUPS, multiply, pack, strides, unpack
from sot.ops._numba.eigh import SWEEPS, accumulate, diagonalize, tridiagonalize
from sot.ops._numba.lanes import (
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
)

Array = Any
Register = Any

TINY = float(np.finfo(np.float32).tiny)  # a largest singular value up to this has no direction to shrink along


@routine
def unpack_finite(block: Array, out: Array) -> Register:
    """The block in float64, and NaN in each lane with a number that is not finite, where zeros stand for them all."""
    zero = fill(0.0)
    poison = zero
    for at in range(0, block.size, LANES):
        poison = poison + to_double(load(block, at)) * zero
    for at in range(0, block.size, LANES):
        store(out, at, select(poison == zero, to_double(load(block, at)), zero))
    return poison


@routine
def measure(images: Array, rows: int, columns: int, poison: Register, lengths: Array) -> Register:
    """Lengths of the columns λᵢuᵢ; the largest."""
    largest = fill(0.0)
    for j in range(columns):
        total = fill(0.0)
        for i in range(rows):
            x = load(images, (i * columns + j) * LANES)
            total = total + x * x
        total = root(total) + poison
        store(lengths, j * LANES, total)
        largest = select(largest < total, total, largest)
    return largest


@routine
def weigh(lengths: Array, exponent: float, smallest: Register, powers: Array, inverses: Array) -> None:
    """λ^(α-1) and 1/λ, or zero up to the smallest."""
    zero, one = fill(0.0), fill(1.0)
    if exponent != 0.5 and exponent != 0.25:
        for k in range(lengths.size):
            powers[k] = lengths[k] ** exponent
    for at in range(0, lengths.size, LANES):
        length = load(lengths, at)
        inverse = one / select(length == zero, one, length)
        power = root(length) if exponent == 0.5 else root(root(length)) if exponent == 0.25 else load(powers, at)
        store(powers, at, select(length <= smallest, zero, power * inverse))  # a NaN stays one
        store(inverses, at, select(smallest < length, inverse, zero))


@routine
def scale_columns(block: Array, factors: Array, out: Array) -> None:
    """Columns times factors, rounded to float32."""
    for row in range(0, block.size, factors.size):
        for at in range(0, factors.size, LANES):
            store(out, row + at, to_single(load(block, row + at) * load(factors, at)))


@routine
def round_to_single(block: Array, out: Array) -> None:
    """The block in float32."""
    for at in range(0, block.size, LANES):
        store(out, at, to_single(load(block, at)))


@routine
def mix(products: Array, same: Array, swapped: Array, ratio: Array, out: Array) -> None:
    """`A∘T + B∘Tᵀ - T diag(ratio)`."""
    line = ratio.size
    for i in range(0, line // LANES):
        for j in range(0, line // LANES):
            at, mirrored = i * line + j * LANES, j * line + i * LANES
            x = (load(same, at) - load(ratio, j * LANES)) * load(products, at)
            store(out, at, x + load(swapped, at) * load(products, mirrored))


@routine
def slopes_of_half(s: Register, t: Register, small: Register) -> tuple[Register, Register]:
    """A, and B over -λμ/st, as `half_slopes` has them for α = ½; `small` is ε²/st."""
    squares = s * s + t * t
    inverse = to_single(fill(1.0)) / (squares * (s + t))
    return (squares + s * t + small) * inverse, inverse


@routine
def slopes_of_quarter(s: Register, t: Register, small: Register) -> tuple[Register, Register]:
    """A, and B over -λμ/s³t³, likewise for α = ¼; `small` is ε²/s³t³."""
    product, squares = s * t, s * s + t * t
    fourths = squares * squares - to_single(fill(2.0)) * product * product
    inverse = to_single(fill(1.0)) / ((s + t) * squares * fourths)
    cubic = squares + product
    return (fourths + product * cubic + small * cubic) * inverse, cubic * inverse


@routine
def relate(
    values: Array, eps: float, quarter: bool, roots: Array, small: Array, shares: Array, ratio: Array
) -> Register:
    """What `mix_by_root` takes of the singular values, as `sot.ops.svpn.slopes` has it; λ₁^(α-1)."""
    zero, one, largest = fill(0.0), fill(1.0), fill(0.0)
    for at in range(0, values.size, LANES):
        value = to_double(load(values, at))
        largest = select(largest < value, value, largest)
    alive = fill(TINY) < largest
    largest = select(alive, largest, one)
    for at in range(0, values.size, LANES):
        unit = to_double(load(values, at)) / largest
        s = root(root(unit * unit + fill(eps * eps)))
        if quarter:
            s = root(s)
        inverse = one / (s * s * s if quarter else s)
        store(roots, at, to_single(s))
        store(small, at, to_single(fill(eps) * inverse))
        store(shares, at, to_single(unit * inverse))
        store(ratio, at, to_single(inverse))  # (λ²+ε²)^((α-1)/2)
    s = root(largest)
    return to_single(select(alive, one / (s * root(s) if quarter else s), zero))


@routine
def mix_by_root(
    products: Array, roots: Array, small: Array, shares: Array, quarter: bool, ratio: Array, out: Array
) -> None:
    """`mix` for α = ½ or a `quarter`, with A and B made of what `relate` gives."""
    line = roots.size
    for i in range(0, line // LANES):
        s = load(roots, i * LANES)
        for j in range(i + 1):
            at, mirrored, t = i * line + j * LANES, j * line + i * LANES, load(roots, j * LANES)
            both = load(small, i * LANES) * load(small, j * LANES)
            same, inverse = slopes_of_quarter(s, t, both) if quarter else slopes_of_half(s, t, both)
            swapped = load(shares, i * LANES) * load(shares, j * LANES) * inverse
            x, y = load(products, at), load(products, mirrored)
            store(out, at, (same - load(ratio, j * LANES)) * x - swapped * y)
            store(out, mirrored, (same - load(ratio, i * LANES)) * y - swapped * x)


@routine
def doubles(size: int) -> Array:
    """Room for so many numbers from the beginning of a cache line on: eight of them are one line, not two halves."""
    room = np.empty(size + LANES, np.float64)
    first = (-room.ctypes.data // 8) % LANES
    return room[first : first + size]


PAIR, TRIPLE = (numba.types.UniTuple(numba.float32[:, ::1], count) for count in (2, 3))  # of blocks


@kernel(numba.void(BATCH, numba.float64, numba.float64, BATCH, TRIPLE, GROUPS))
def power(
    matrix: Array, exponent: float, left_eps: float, out: Array, kept: tuple[Array, ...], groups: tuple[int, int]
) -> None:
    """`out = U diag(λ^α) Vᵀ` for a range of groups; `kept` takes their U, λ and V, in turns if it has room for fewer.

    V comes from QᵀQ in float64, λᵢ is ‖Qvᵢ‖ and uᵢ = Qvᵢ/λᵢ, or zero for λᵢ up to `left_eps` of the largest.
    """
    n = matrix.shape[2]
    rows, columns = matrix.shape[1] + matrix.shape[1] % 2, n + n % 2
    size, square, line = rows * columns * LANES, columns * columns * LANES, columns * LANES
    packed, scaled = np.empty(size, np.float32), np.empty(size, np.float32)
    q, images, gram, v = doubles(size), doubles(size), doubles(square), doubles(square)
    diagonal, beside, lengths = doubles(line), doubles(line), doubles(line)
    work, more, turns = doubles(line), doubles(line), doubles(2 * SWEEPS * line)
    across, down = strides(columns)
    for group in range(groups[0], groups[1]):
        slot = group % kept[0].shape[0]
        left, values, right = kept[0][slot], kept[1][slot], kept[2][slot]
        pack(matrix, group * LANES, packed, columns)
        poison = unpack_finite(packed, q)
        multiply(gram, q, down, q, across, (columns, columns, rows), at_once=2, lower=True)
        tridiagonalize(gram, n, columns, diagonal, beside, work, more)
        accumulate(gram, n, columns, work, v)
        diagonalize(diagonal, beside, n, v, columns, turns)

        multiply(images, q, across, v, across, (rows, columns, columns), at_once=2)
        largest = measure(images, rows, columns, poison, lengths)
        weigh(lengths, exponent, largest * fill(left_eps), work, more)
        scale_columns(images, work, scaled)
        scale_columns(images, more, left)
        round_to_single(lengths, values)
        round_to_single(v, right)
        multiply(packed, scaled, across, right, down, (rows, columns, columns))
        unpack(packed, columns, out, group * LANES)


@kernel(numba.void(BATCH, TRIPLE, PAIR, PAIR, numba.float64, numba.boolean, BATCH, GROUPS))
def pull_back(
    grad: Array,
    kept: tuple[Array, ...],
    slopes: tuple[Array, ...],
    factors: tuple[Array, ...],
    eps: float,
    quarter: bool,
    out: Array,
    groups: tuple[int, int],
) -> None:
    """`out = scale · (U (A∘T + B∘Tᵀ) + (GV - UT) diag(ratio)) Vᵀ`, `T = UᵀGV`, for a range of groups.

    `kept` has U, λ and V. A and B are the `slopes`, ratio and scale the `factors`; if those are empty, all of them are
    made of λ and `eps`, for α = ½ or a `quarter`.
    """
    rows, columns = grad.shape[1] + grad.shape[1] % 2, grad.shape[2] + grad.shape[2] % 2
    size, square, line = rows * columns * LANES, columns * columns * LANES, columns * LANES
    packed, mapped, result = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    products, middle = np.empty(square, np.float32), np.empty(square, np.float32)
    roots, small = np.empty(line, np.float32), np.empty(line, np.float32)
    shares, ratio = np.empty(line, np.float32), np.empty(line, np.float32)
    across, down = strides(columns)
    for group in range(groups[0], groups[1]):
        left, right = kept[0][group], kept[2][group]
        pack(grad, group * LANES, packed, columns)
        multiply(mapped, packed, across, right, across, (rows, columns, columns))
        multiply(products, left, down, mapped, across, (columns, columns, rows))
        if len(slopes[0]) > 0:
            ratio, scale = factors[0][group], load(factors[1][group], 0)
            mix(products, slopes[0][group], slopes[1][group], ratio, middle)
        else:
            scale = relate(kept[1][group], eps, quarter, roots, small, shares, ratio)
            mix_by_root(products, roots, small, shares, quarter, ratio, middle)
        multiply(result, left, across, middle, across, (rows, columns, columns))
        for row in range(0, size, line):
            for at in range(0, line, LANES):
                x = load(result, row + at) + load(mapped, row + at) * load(ratio, at)
                store(result, row + at, x * scale)
        multiply(packed, result, across, right, down, (rows, columns, columns))
        unpack(packed, columns, out, group * LANES)
