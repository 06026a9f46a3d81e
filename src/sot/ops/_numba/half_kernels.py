"""Rows that are stored in half precision, scaled and shifted as they are read, compiled by numba.

Numba's cache watches this file alone: delete `__pycache__` after a
change to one that it imports.
"""

from __future__ import annotations

from typing import Any

import numba

from sot.ops._numba.lanes import LANES, kernel, load, load_halves, store
from sot.ops._numba.tiles import FLAT

Array = Any

HALVES = numba.types.Array(numba.uint16, 1, "C", readonly=True)  # a memory map that may only be read, too
INDICES = numba.types.Array(numba.int64, 1, "A", readonly=True)  # any slice


@kernel(numba.void(HALVES, INDICES, INDICES, FLAT, FLAT, FLAT))
def scale(halves: Array, begins: Array, ends: Array, weight: Array, bias: Array, out: Array) -> None:
    """`x · weight + bias` of rows `begins[i]` to before `ends[i]` for all i, one after the other."""
    width, to = weight.size, 0
    for k in range(begins.size):
        for at in range(begins[k] * width, ends[k] * width, width):
            for j in range(0, width, LANES):
                store(out, to + j, load_halves(halves, at + j) * load(weight, j) + load(bias, j))
            to += width
