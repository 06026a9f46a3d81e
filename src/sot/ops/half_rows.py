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
    pieces = [rows[begin:end] for begin, end in zip(begins, ends)]
    read = torch.from_numpy(np.concatenate([rows[:0], *pieces])).float()
    if weight is None or bias is None:
        return read
    return torch.addcmul(bias.detach(), read, weight.detach(), out=read)  # in place: new memory costs as much again
