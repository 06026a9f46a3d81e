"""Rows that are stored in half precision, scaled and shifted once they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def scaled_rows(rows: Any, begins: Any, ends: Any, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Rows `begins[i]` to before `ends[i]` of an array of half precision, for all i, in float32.

    Times weight plus bias, if there are any.
    """
    counts = ends - begins
    before = np.cumsum(counts) - counts
    read = torch.from_numpy(rows[np.repeat(begins - before, counts) + np.arange(counts.sum())]).float()
    return read if weight is None or bias is None else torch.addcmul(bias, read, weight)
