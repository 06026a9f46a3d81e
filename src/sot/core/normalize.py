"""Normalisation of (cross-)covariance matrices: section 3.3 of the paper.

Every function takes matrices of shape `(..., m, n)` with any batch shape, computes in at least float32
whatever the autocast state, and returns the type it was given. A matrix with a NaN or an infinity comes
back as NaN and leaves its neighbours alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sot.core.checks import check_exponent, check_matrix
from sot.core.newton_schulz import matrix_square_root, product_singular_value_power_norm, square_root_of_product
from sot.core.power_iteration import fast_singular_value_power_norm
from sot.core.precision import at_least_float32
from sot.core.spectral import matrix_power_norm, singular_value_power_norm

__all__ = [
    "element_power_norm",
    "fast_singular_value_power_norm",
    "matrix_power_norm",
    "matrix_square_root",
    "product_singular_value_power_norm",
    "singular_value_power_norm",
    "square_root_of_product",
]


def element_power_norm(matrix: Tensor, exponent: float = 0.5, eps: float = 1e-6) -> Tensor:
    """Signed power of each element, then each matrix divided by its Frobenius norm; smooth within `eps` of zero."""
    if not torch.jit.is_scripting():
        check_matrix(matrix)
        check_exponent(exponent)
    full = at_least_float32(matrix)
    powered = full * (full.square() + eps**2).pow((exponent - 1) / 2)
    return F.normalize(powered.flatten(-2), dim=-1).view_as(full).to(matrix.dtype)
