"""What the gradient of svPN is made of: divided differences of the smooth power, without a special case.

The smooth power is `f(λ) = λ g(λ)`, `g = (λ² + ε²)^((α-1)/2)`. With `E = (fᵢ-fⱼ)/(λᵢ-λⱼ)` and `F = (fᵢ+fⱼ)/(λᵢ+λⱼ)`,
`A = (E+F)/2` and `B = (E-F)/2`, so that `E∘sym(T) + F∘anti(T) = A∘T + B∘Tᵀ`. All are functions of λ/λ₁, `(batch, k,
...)`, so that no scale can overflow. The kernels have α = ½ and ¼ once more.
"""

from __future__ import annotations

import torch
from torch import Tensor


def relative(values: Tensor, exponent: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of singular values `(batch, k, ...)`: λ/λ₁, g(λ/λ₁), and λ₁^(α-1), to which the gradient is proportional.

    A zero matrix has no direction to shrink along: its last factor is zero.
    """
    largest = values.amax(1, keepdim=True)
    alive = largest > torch.finfo(values.dtype).tiny
    unit = values / torch.where(alive, largest, 1)
    ratio = (unit.square() + eps**2).pow((exponent - 1) / 2)
    scale = torch.where(alive, torch.where(alive, largest, 1).pow(exponent - 1), 0)
    return unit, ratio, scale


def slopes(unit: Tensor, exponent: float, eps: float) -> tuple[Tensor, Tensor]:
    """A and B, `(batch, k, k, ...)`."""
    special = {0.5: half_slopes, 0.25: quarter_slopes}.get(exponent)
    return any_slopes(unit, exponent, eps) if special is None else special(unit, eps)


def half_slopes(unit: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """For α = ½ without powers of pairs: with s = (λ²+ε²)^¼ every difference of powers factors.

    A = (s²+t²+st + ε²/st) / ((s+t)(s²+t²)), B = -λμ / (st(s+t)(s²+t²)), where t and μ belong to the other index.
    """
    root = (unit.square() + eps**2).sqrt().sqrt()
    s, t = root.unsqueeze(2), root.unsqueeze(1)
    small, share = _of_pairs(eps / root), _of_pairs(unit / root)
    squares = s.square() + t.square()
    inverse = (squares * (s + t)).reciprocal()
    return (squares + s * t + small) * inverse, -share * inverse


def quarter_slopes(unit: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """For α = ¼ in the same way: with s = (λ²+ε²)^⅛, n = s²+st+t² and d = (s+t)(s²+t²)(s⁴+t⁴),

    A = (s⁴+s³t+s²t²+st³+t⁴ + ε²n/s³t³) / d and B = -λμ n / (s³t³ d).
    """
    root = (unit.square() + eps**2).sqrt().sqrt().sqrt()
    s, t = root.unsqueeze(2), root.unsqueeze(1)
    small, share = _of_pairs(eps / root.pow(3)), _of_pairs(unit / root.pow(3))
    product, squares = s * t, s.square() + t.square()
    fourths = squares.square() - 2 * product.square()
    inverse = ((s + t) * squares * fourths).reciprocal()
    cubic = squares + product  # n
    return (fourths + product * cubic + small * cubic) * inverse, -share * cubic * inverse


def _of_pairs(values: Tensor) -> Tensor:
    """Products of each two."""
    return values.unsqueeze(2) * values.unsqueeze(1)


def any_slopes(unit: Tensor, exponent: float, eps: float) -> tuple[Tensor, Tensor]:
    """For any α: with a >= b and z = (a²-b²)/(b²+ε²), E = g(a) + b(a+b) g(b)/(b²+ε²) · ((1+z)^β - 1)/z.

    The last factor tends to β = (α-1)/2 on ties.
    """
    beta = (exponent - 1) / 2
    a = torch.maximum(unit.unsqueeze(2), unit.unsqueeze(1))
    b = torch.minimum(unit.unsqueeze(2), unit.unsqueeze(1))
    b_square = b.square() + eps**2
    z = (a - b) * (a + b) / b_square
    tie = z == 0
    growth = torch.where(tie, beta, torch.expm1(beta * torch.log1p(z)) / torch.where(tie, 1, z))
    difference = (a.square() + eps**2).pow(beta) + b * (a + b) * b_square.pow(beta - 1) * growth

    weighted = unit * (unit.square() + eps**2).pow(beta)
    total = unit.unsqueeze(2) + unit.unsqueeze(1)
    mean = (weighted.unsqueeze(2) + weighted.unsqueeze(1)) / torch.where(total == 0, 1, total)
    mean = torch.where(total == 0, eps ** (2 * beta), mean)
    return (difference + mean) / 2, (difference - mean) / 2
