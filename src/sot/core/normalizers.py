"""The normalisations as modules over `(..., left_dim, right_dim)`, under the paper's short names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sot.core import normalize
from sot.core.checks import check_exponent, check_num_values, check_positive
from sot.core.choices import NORMS as NORMS
from sot.core.choices import SYMMETRIC_ONLY as SYMMETRIC_ONLY
from sot.ops.svpn.export import former_power

LARGE = 1e15  # its square fits float32


class _PowerNorm(nn.Module):
    def __init__(self, exponent: float = 0.5) -> None:
        super().__init__()
        check_exponent(exponent)
        self.exponent = exponent


class SingularValuePowerNorm(_PowerNorm):
    """Exact svPN; see `singular_value_power_norm`."""

    def forward(self, matrix: Tensor) -> Tensor:
        return normalize.singular_value_power_norm(matrix, self.exponent)


class FastSingularValuePowerNorm(_PowerNorm):
    """Approximate svPN, one learned start vector for all samples and heads; see `fast_singular_value_power_norm`."""

    def __init__(self, right_dim: int, exponent: float = 0.5, num_values: int = 1, num_iterations: int = 1) -> None:
        super().__init__(exponent)
        check_positive(right_dim=right_dim, num_values=num_values, num_iterations=num_iterations)
        self.num_values, self.num_iterations = num_values, num_iterations
        self.start = nn.Parameter(torch.empty(right_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the start vector anew."""
        nn.init.normal_(self.start)

    def forward(self, matrix: Tensor) -> Tensor:
        return normalize.fast_singular_value_power_norm(
            matrix, self.start, self.exponent, self.num_values, self.num_iterations
        )


class FormerProductNorm(nn.Module):
    """svPN of exponent ½ by matrix products, for models that were saved with it; new ones take `svpn`."""

    def __init__(self, exponent: float = 0.5) -> None:
        super().__init__()
        if exponent != 0.5:
            raise ValueError(f"svpn_matmul has exponent 0.5 only, got {exponent}; svpn takes any")

    def forward(self, matrix: Tensor) -> Tensor:
        return former_power(matrix)


class MatrixPowerNorm(_PowerNorm):
    """Exact power of a covariance; see `matrix_power_norm`."""

    def forward(self, spd: Tensor) -> Tensor:
        return normalize.matrix_power_norm(spd, self.exponent)


class MatrixSquareRoot(nn.Module):
    """Newton-Schulz square root of a covariance; see `matrix_square_root`."""

    def __init__(self, num_iterations: int = 5) -> None:
        super().__init__()
        check_positive(num_iterations=num_iterations)
        self.num_iterations = num_iterations

    def forward(self, spd: Tensor) -> Tensor:
        return normalize.matrix_square_root(spd, self.num_iterations)


class ElementPowerNorm(_PowerNorm):
    """Signed power of each element, then unit length; see `element_power_norm`."""

    def forward(self, matrix: Tensor) -> Tensor:
        return normalize.element_power_norm(matrix, self.exponent)


class RowLayerNorm(nn.LayerNorm):
    """LayerNorm of each row, as the paper's LN; keeps the type of the matrix whatever the type of its parameters."""

    def forward(self, matrix: Tensor) -> Tensor:
        weight, bias = self.weight.to(matrix.dtype), self.bias.to(matrix.dtype)
        largest = matrix.abs().amax(-1, keepdim=True)
        matrix = matrix / (largest / LARGE).clamp_min(1)  # else its variance overflows
        return F.layer_norm(matrix, self.normalized_shape, weight, bias, self.eps)


class LearnedScale(nn.Module):
    """One learned positive factor `1/τ`, kept positive as an exponential; starts at `right_dim ** -0.5`."""

    def __init__(self, right_dim: int) -> None:
        super().__init__()
        check_positive(right_dim=right_dim)
        self.right_dim = right_dim
        self.log_scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at `right_dim ** -0.5`."""
        nn.init.constant_(self.log_scale, -0.5 * math.log(self.right_dim))

    def forward(self, matrix: Tensor) -> Tensor:
        return matrix * self.log_scale.to(matrix.dtype).exp()


@dataclass(frozen=True)
class NormSettings:
    """What a normalisation may need to know; `num_iterations` of None is the method's own default."""

    left_dim: int
    right_dim: int
    exponent: float = 0.5
    num_values: int = 1
    num_iterations: int | None = None


OURS: dict[str, Callable[[NormSettings], nn.Module]] = {
    "svpn": lambda s: SingularValuePowerNorm(s.exponent),
    "svpn_fast": lambda s: FastSingularValuePowerNorm(
        s.right_dim, s.exponent, s.num_values, 1 if s.num_iterations is None else s.num_iterations
    ),
    "svpn_matmul": lambda s: FormerProductNorm(s.exponent),
    "mpn": lambda s: MatrixPowerNorm(s.exponent),
    "isqrt": lambda s: MatrixSquareRoot(5 if s.num_iterations is None else s.num_iterations),
    "epn": lambda s: ElementPowerNorm(s.exponent),
    "ln": lambda s: RowLayerNorm(s.right_dim),
    "scale": lambda s: LearnedScale(s.right_dim),
    "none": lambda s: nn.Identity(),
}
NORMS.update(OURS)


def build_norm(name: str, settings: NormSettings) -> nn.Module:
    """The normalisation registered under `name` for matrices `(left_dim, right_dim)`."""
    build = NORMS.find(name)
    check_positive(left_dim=settings.left_dim, right_dim=settings.right_dim, num_values=settings.num_values)
    check_exponent(settings.exponent)
    check_num_values(settings.num_values, settings.left_dim, settings.right_dim)
    return build(settings)
