"""Large matrix products on a CPU by the fastest library that torch has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sot.core.precision import is_observed

# oneDNN's product of dense float32 matrices, as torch.compile calls it; what torch itself calls is slower by a tenth
_ONEDNN: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch._C._has_mkldnn else None


def times_transposed(rows: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """`rows @ weightᵀ` of contiguous matrices, without a gradient."""
    if _ONEDNN is None or not torch.backends.mkldnn.enabled or rows.dtype != torch.float32 or is_observed():
        return torch.mm(rows, weight.mT, out=out)
    product: Tensor = _ONEDNN(rows, weight, None, "none", [], "")
    return product if out is None else out.copy_(product)
