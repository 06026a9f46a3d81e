"""Singular values of the pooled matrices before and after their normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sot.core.head import SecondOrderHead
from sot.core.pooling import CovariancePool, CrossCovariancePool
from sot.explain.evidence import exact_norm, factors, pooled_tokens
from sot.models.tokens import Tokens


@dataclass(frozen=True)
class Spectrum:
    """Singular values `(heads, values)` of each head, largest first."""

    before: NDArray[np.float64]
    after: NDArray[np.float64]


@torch.no_grad()
def singular_spectrum(head: SecondOrderHead, tokens: Tokens) -> Spectrum:
    """The spectrum of each head's (cross-)covariance of one sample, and what the normalisation makes of it."""
    pool: Any = head.pool
    if not isinstance(pool, CrossCovariancePool | CovariancePool):
        raise ValueError(f"a spectrum needs second-order pooling (mgcrp or gcp), the head has {head.config.pool}")
    words, mask, _ = pooled_tokens(head, tokens)
    left, right = factors(pool, words, mask)
    pooled = torch.einsum("jhm,jhn->hmn", left, right)
    normalized = exact_norm(pool.norm)(pooled.unsqueeze(0))[0]
    return Spectrum(*(torch.linalg.svdvals(matrix).cpu().numpy() for matrix in (pooled, normalized)))
