"""svPN as exporters can write it, for runtimes that have no decompositions: matrix products in double precision."""

from __future__ import annotations

import torch
from torch import Tensor

Steps = tuple[tuple[float, float, float], ...]
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


FORMER_POLAR_STEPS = (  # from [0.004, 1] and [0.06, 1]
    (8.340982, -24.59737, 18.22303),
    (3.977995, -2.965435, 0.5642721),
    (3.327478, -2.495237, 0.5108134),
    (2.308564, -1.675994, 0.4195739),
    (1.892113, -1.268886, 0.3768936),
    (1.874873, -1.249744, 0.374871),
)
FORMER_ROOT_STEPS = (
    (6.484369, -17.30368, 12.43398),
    (2.413681, -1.7686, 0.4296406),
    (1.905256, -1.283222, 0.3783374),
    (1.874709, -1.249409, 0.3747),
)


def power(matrix: Tensor, exponent: float) -> Tensor:
    """`Σ λᵢ^α uᵢ vᵢᵀ` of `(batch, m >= n, n)` for α = ½ or ¼: `P H^α` from the polar factor P and H = PᵀQ.

    Trained heads have singular values far below the largest: down to a millionth they come out to rounding, smaller
    ones too small, and those that rounding makes of zeros, below 10⁻⁷, as zeros.
    """
    double = matrix.double()
    size = _or_one(double.square().sum((-2, -1), keepdim=True)).sqrt()  # ≥ λ₁; no float32 overflows as a double
    scaled = double / size
    polar = _polar(scaled, POLAR_STEPS)
    gram = polar.mT @ polar
    square = gram @ gram
    polar = polar @ (3 * square - 2 * square @ gram)  # x⁵(3 - 2x²): one stays, what is near zero vanishes
    root = polar.mT @ scaled
    for _ in range(ROOTS[exponent]):
        root = _square_root((root + root.mT) / 2, ROOT_STEPS)
    return (polar @ root * size**exponent).to(matrix.dtype)


def former_power(matrix: Tensor) -> Tensor:
    """`Σ λᵢ^½ uᵢ vᵢᵀ` of `(..., m, n)` as `svpn_matmul` had it: too small below 0.004 of the largest."""
    if matrix.shape[-2] < matrix.shape[-1]:
        return former_power(matrix.mT).mT
    double = matrix.double()  # which autocast leaves alone
    gram = double.mT @ double
    size = _or_one(gram.square().sum((-2, -1), keepdim=True)).sqrt().sqrt()
    scaled = double / size
    polar = _polar(scaled, FORMER_POLAR_STEPS)
    root = polar.mT @ scaled
    return (polar @ _square_root((root + root.mT) / 2, FORMER_ROOT_STEPS) * size.sqrt()).to(matrix.dtype)


def _or_one(size: Tensor) -> Tensor:
    return torch.where(size == 0, torch.ones_like(size), size)  # a zero matrix stays zero; a root of it has no slope


def _polar(scaled: Tensor, steps: Steps) -> Tensor:
    """The polar factor of a matrix whose singular values are in [0, 1]."""
    for a, b, c in steps:
        gram = scaled.mT @ scaled
        scaled = a * scaled + scaled @ (b * gram + c * gram @ gram)
    return scaled


def _square_root(spd: Tensor, steps: Steps) -> Tensor:
    """Of eigenvalues in [0, 1], beside its inverse: each step takes the product of the two nearer to one."""
    root, inverse = spd, torch.eye(spd.shape[-1], dtype=spd.dtype, device=spd.device)
    for a, b, c in steps:
        product = inverse @ root
        step = b * product + c * product @ product
        root, inverse = a * root + root @ step, a * inverse + step @ inverse
    return root
