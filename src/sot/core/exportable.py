"""svPN as exporters can write it, for runtimes that have no decompositions: matrix products in double precision."""

from __future__ import annotations

import torch
from torch import Tensor

from sot.core.checks import check_matrix

ROOTS = {0.5: 1, 0.25: 2}  # how many square roots make a power
# Odd quintics (a, b, c): x ↦ ax + bx³ + cx⁵, each the best approximation of 1 on the image of the one before, from
# [1e-6, 1] for singular values and from [1e-3, 1] for the roots of eigenvalues. All but the last leave room of 1 %
# above, for they are steep there and would carry away what rounding has pushed out.
POLAR_STEPS = (
    (8.429958497, -24.53804855, 17.8564509),
    (4.214926859, -3.067227158, 0.5580126933),
    (4.214688116, -3.067066141, 0.5579949271),
    (4.213682178, -3.066387675, 0.5579200669),
    (4.209448701, -3.063531903, 0.5576049722),
    (4.191720245, -3.051564788, 0.5562846361),
    (4.118999013, -3.00233776, 0.5508546455),
    (3.844649735, -2.814461788, 0.5301546127),
    (3.079921253, -2.267205629, 0.4702824062),
    (2.135406598, -1.497632049, 0.3893515215),
    (1.866987306, -1.229150471, 0.3622458658),
    (1.875286949, -1.250573841, 0.3752868926),
)
ROOT_STEPS = (
    (8.386464162, -24.36964994, 17.72511652),
    (4.142307387, -3.018140425, 0.5525975308),
    (3.928593997, -2.872330368, 0.5365258516),
    (3.276250649, -2.411783145, 0.4860086015),
    (2.279034613, -1.626978742, 0.402424662),
    (1.87891462, -1.242749948, 0.3641525582),
    (1.875739192, -1.251476448, 0.3757372538),
)


def exportable_singular_value_power_norm(matrix: Tensor, exponent: float = 0.5) -> Tensor:
    """`Σ λᵢ^α uᵢ vᵢᵀ` of `(..., m, n)` for α = ½ or ¼: `P H^α` from the polar factor P and H = PᵀQ.

    Trained heads have singular values far below the largest: down to a millionth they come out to rounding, smaller
    ones too small, and those that rounding makes of zeros, below 10⁻⁷, as zeros.
    """
    check_matrix(matrix)
    if exponent not in ROOTS:
        raise ValueError(f"the exponent must be one of {', '.join(map(str, ROOTS))}, got {exponent}")
    wide = matrix.shape[-2] < matrix.shape[-1]
    tall = (matrix.mT if wide else matrix).double()
    size = tall.square().sum((-2, -1), keepdim=True).sqrt()  # at least λ₁; no float32 overflows as a double
    size = torch.where(size == 0, torch.ones_like(size), size)  # a zero matrix stays zero
    scaled = tall / size

    polar = scaled
    for a, b, c in POLAR_STEPS:
        gram = polar.mT @ polar
        polar = a * polar + polar @ (b * gram + c * gram @ gram)
    gram = polar.mT @ polar
    square = gram @ gram
    polar = polar @ (3 * square - 2 * square @ gram)  # x⁵(3 - 2x²): one stays, what is near zero vanishes

    power = polar.mT @ scaled
    for _ in range(ROOTS[exponent]):
        power = _square_root((power + power.mT) / 2)
    result = (polar @ power * size**exponent).to(matrix.dtype)
    return result.mT if wide else result


def _square_root(spd: Tensor) -> Tensor:
    """Of eigenvalues in [0, 1], beside its inverse: each step takes the product of the two nearer to one."""
    root, inverse = spd, torch.eye(spd.shape[-1], dtype=spd.dtype, device=spd.device)
    for a, b, c in ROOT_STEPS:
        product = inverse @ root
        step = b * product + c * product @ product
        root, inverse = a * root + root @ step, a * inverse + step @ inverse
    return root
