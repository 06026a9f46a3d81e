"""Which poolings and norms a head may name. Ours are known before torch is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sot.plugins import Choices

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from sot.core.head_config import HeadConfig
    from sot.core.normalizers import NormSettings
    from sot.core.pooling import Pool

OUR_POOLS = ("mgcrp", "gcp", "gap", "max", "attn", "ep", "mhc3")
OUR_NORMS = ("svpn", "svpn_fast", "svpn_matmul", "mpn", "isqrt", "epn", "ln", "scale", "none")
SYMMETRIC_ONLY = frozenset({"mpn", "isqrt"})  # norms of covariances, not of cross-covariances
POOLS: Choices[Callable[[int, HeadConfig], Pool]] = Choices("pool", OUR_POOLS, "sot.core.head")
NORMS: Choices[Callable[[NormSettings], nn.Module]] = Choices("norm", OUR_NORMS, "sot.core.normalizers")
