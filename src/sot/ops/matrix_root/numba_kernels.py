"""Square roots of covariances by Newton-Schulz iteration, one matrix after another in the cache, compiled by numba.

Numba's cache watches this file alone: delete `__pycache__` after a
change to one that it imports. The matrices of an iteration are slots of one array, each `size` × `size`, padded with
zeros to a multiple of eight.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sot.ops._numba.blocks import BATCH, GROUPS
from sot.ops._numba.lanes import LANES, fill, kernel, routine, to_single
from sot.ops._numba.tiles import COLUMNS, ROWS, add, put, scaled, tile

Array = Any

NONE = (0, 0)


@routine
def multiply(work: Array, out: int, first: tuple[int, int], second: tuple[int, int], size: int, scale: float) -> None:
    """`out = scale · (a b + c d)` from the pairs of slots `first` and `second`, which may be NONE."""
    factor, square = to_single(fill(scale)), size * size
    for i in range(0, size, ROWS):
        for j in range(0, size, COLUMNS):
            column = min(j, size - COLUMNS)
            at = out * square + i * size + column
            x, y = first[0] * square + i * size, first[1] * square + column
            put(work, at, size, scaled(tile(work, x, size, 1, work, y, size, size), factor))
            if second != NONE:
                x, y = second[0] * square + i * size, second[1] * square + column
                add(work, at, size, scaled(tile(work, x, size, 1, work, y, size, size), factor))


@routine
def scaled_copy(work: Array, out: int, source: int, size: int, scale: float) -> None:
    """One slot into another."""
    square, factor = size * size, np.float32(scale)
    for k in range(square):
        work[out * square + k] = factor * work[source * square + k]


@routine
def read(matrix: Array, work: Array, slot: int, size: int, scale: float) -> None:
    """The symmetric part of a matrix, scaled, into a slot whose padding is zero."""
    half, at = 0.5 * scale, slot * size * size  # in float64, which takes what is huge and tiny
    for i in range(len(matrix)):
        for j in range(i + 1):
            value = np.float32(half * (np.float64(matrix[i, j]) + matrix[j, i]))
            work[at + i * size + j] = value
            work[at + j * size + i] = value


@routine
def inner(work: Array, one: int, other: int, size: int) -> float:
    """Of two slots."""
    total, square = 0.0, size * size
    for k in range(square):
        total += np.float64(work[one * square + k]) * work[other * square + k]
    return total


@routine
def trace_of(matrix: Array) -> float:
    """Its trace; zero is that of a matrix which stays zero."""
    total = 0.0
    for i in range(len(matrix)):
        total += matrix[i, i]
    return total


@routine
def slot_of_inverse(k: int, steps: int) -> int:
    """Of the inverse root before step k, from 1; the first is the first step."""
    return steps if k == 1 else 2 * steps + k - 1


@routine
def iterate(matrix: Array, divisor: float, work: Array, size: int, steps: int) -> int:
    """Slot k is the root before step k, slot `steps + k` the step; the slot of the result comes back."""
    read(matrix, work, 0, size, 1 / divisor)
    for k in range(steps):
        step = steps + k
        if k == 0:
            scaled_copy(work, step, 0, size, -0.5)
        else:
            inverse = slot_of_inverse(k, steps)
            if k > 1:
                multiply(work, inverse, (step - 1, slot_of_inverse(k - 1, steps)), NONE, size, 1.0)
            multiply(work, k, (k - 1, step - 1), NONE, size, 1.0)
            multiply(work, step, (inverse, k), NONE, size, -0.5)
        for i in range(len(matrix)):
            work[step * size * size + i * (size + 1)] += np.float32(1.5)
    multiply(work, 3 * steps - 1, (steps - 1, 2 * steps - 1), NONE, size, 1.0)
    return 3 * steps - 1


@routine
def padded(count: int) -> int:
    """How many rows and columns a slot has for so many."""
    return max(COLUMNS, (count + LANES - 1) // LANES * LANES)


@kernel(numba.void(BATCH, numba.intp, BATCH, GROUPS))
def square_root(spd: Array, steps: int, out: Array, part: tuple[int, int]) -> None:
    """Of each matrix in a range."""
    count = spd.shape[1]
    size = padded(count)
    work = np.zeros(3 * steps * size * size, np.float32)
    for number in range(part[0], part[1]):
        trace = trace_of(spd[number])
        result = iterate(spd[number], 1.0 if trace == 0 else trace, work, size, steps)
        scale = np.float32(np.sqrt(trace))
        for i in range(count):
            for j in range(count):
                out[number, i, j] = scale * work[(result * size + i) * size + j]


@kernel(numba.void(BATCH, BATCH, numba.intp, BATCH, GROUPS))
def pull_back(spd: Array, grad: Array, steps: int, out: Array, part: tuple[int, int]) -> None:
    """The derivative of the iteration, which is done again, in the direction of the gradient: all is symmetric."""
    count = spd.shape[1]
    size = padded(count)
    work = np.zeros((3 * steps + 5) * size * size, np.float32)
    d_root, d_step, d_inverse, new_root, new_inverse = (
        3 * steps,
        3 * steps + 1,
        3 * steps + 2,
        3 * steps + 3,
        3 * steps + 4,
    )
    for number in range(part[0], part[1]):
        trace = trace_of(spd[number])
        divisor = 1.0 if trace == 0 else trace
        result = iterate(spd[number], divisor, work, size, steps)
        read(grad[number], work, d_root, size, np.sqrt(divisor))
        of_trace = 0.5 * inner(work, d_root, result, size)
        scaled_copy(work, d_step, d_root, size, -0.5)
        scaled_copy(work, d_inverse, d_step, size, 1.0)
        for k in range(steps):
            if k > 1:
                pairs = (d_step, slot_of_inverse(k - 1, steps)), (steps + k - 1, d_inverse)
                multiply(work, new_inverse, *pairs, size, 1.0)
                d_inverse, new_inverse = new_inverse, d_inverse
            if k > 0:
                multiply(work, d_step, (d_inverse, k), (slot_of_inverse(k, steps), d_root), size, -0.5)
            multiply(work, new_root, (d_root, steps + k), (k, d_step), size, 1.0)
            d_root, new_root = new_root, d_root
        of_trace = 0.0 if trace == 0 else of_trace - inner(work, d_root, 0, size)
        for i in range(count):
            for j in range(count):
                out[number, i, j] = work[(d_root * size + i) * size + j] / divisor
            out[number, i, i] += of_trace / divisor
