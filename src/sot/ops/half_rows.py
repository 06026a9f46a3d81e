"""Rows that are stored in half precision, scaled and shifted as they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sot.ops._numba.threads import flat
from sot.ops.registry import HAS_NUMBA, asked

LANES = 8


def scaled_rows(rows: Any, begins: Any, ends: Any, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Rows `begins[i]` to before `ends[i]` of an array of half precision, for all i, in float32.

    Times weight plus bias, if there are any.
    """
    if weight is None or bias is None:
        return _read(rows, begins, ends)
    if not _by_kernel(rows):
        return torch.addcmul(bias, _read(rows, begins, ends), weight)
    from sot.ops._numba import half_kernels

    out = weight.new_empty(int((ends - begins).sum()), rows.shape[1])
    half_kernels.scale(rows.view("u2").reshape(-1), begins, ends, flat(weight), flat(bias), flat(out))
    return out


def _by_kernel(rows: Any) -> bool:
    """Whether the kernel can read the array `(rows, width)`: of half precision, contiguous, of whole registers."""
    halves = rows.dtype.str == "<f2" and rows.flags.c_contiguous and rows.shape[1] % LANES == 0
    return halves and HAS_NUMBA and asked() in ("auto", "numba")


def _read(rows: Any, begins: Any, ends: Any) -> Tensor:
    counts = ends - begins
    before = np.cumsum(counts) - counts
    return torch.from_numpy(rows[np.repeat(begins - before, counts) + np.arange(counts.sum())]).float()
