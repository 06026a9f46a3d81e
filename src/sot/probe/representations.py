"""What the linear layers of a head read of cached tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sot.core.head import SecondOrderHead
from sot.probe.features import Array, Features
from sot.probe.heads import norm_taken_out, read_for

ROWS_AT_A_TIME = 256


@torch.inference_mode()
def representations(head: SecondOrderHead, features: Features, rows: Array) -> Tensor:
    """What the linear layers of a head read of some samples."""
    parts = []
    with norm_taken_out(head) as norm:
        order = np.argsort(features.lengths[rows], kind="stable")  # like lengths together: little is padded
        for start in range(0, len(rows), ROWS_AT_A_TIME):
            batch = read_for(head, features, rows[order[start : start + ROWS_AT_A_TIME]], norm)
            parts.append(head(*batch, pre_logits=True))
    sorted_rows = torch.cat(parts)
    return torch.empty_like(sorted_rows).index_copy_(0, torch.from_numpy(order), sorted_rows)
