"""What every normalisation and pooling refuses, in one sentence that names the value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sot.core.choices import NORMS, SYMMETRIC_ONLY

if TYPE_CHECKING:  # settings are checked before torch is loaded
    from torch import Tensor


def is_number(value: Any) -> bool:
    """Whether it can be compared with numbers and is no truth value, which Python counts among them."""
    return hasattr(value, "__float__") and not isinstance(value, bool)


def check_exponent(exponent: float) -> None:
    """Raise ValueError unless `0 < exponent <= 1`."""
    if not is_number(exponent) or not 0 < exponent <= 1:
        raise ValueError(f"exponent must be in (0, 1], got {exponent!r}")


def check_positive(**counts: int) -> None:
    """Raise ValueError unless every count is an integer of at least 1."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {count!r}")


def check_bool(**switches: bool) -> None:
    """Raise ValueError unless every switch is one."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")


def check_num_values(num_values: int, left_dim: int, right_dim: int) -> None:
    """Raise ValueError for more singular values than a matrix `(left_dim, right_dim)` has."""
    smaller = min(left_dim, right_dim)
    if num_values > smaller:
        raise ValueError(f"num_values must be at most min(left_dim, right_dim) = {smaller}, got {num_values}")


def check_cross_norm(norm: str | None) -> None:
    """Raise ValueError for a norm that is defined for covariances alone."""
    if norm in SYMMETRIC_ONLY:
        accepted = ", ".join(name for name in dict.fromkeys([*NORMS.own, *NORMS]) if name not in SYMMETRIC_ONLY)
        raise ValueError(f"norm {norm!r} needs a covariance, a cross-covariance accepts: {accepted}")


def check_matrix(matrix: Tensor, square: bool = False) -> None:
    """Raise ValueError unless the tensor holds floating point matrices, square ones if asked."""
    if matrix.ndim < 2 or not matrix.is_floating_point() or 0 in matrix.shape[-2:]:
        got = f"{matrix.dtype} of shape {tuple(matrix.shape)}"
        raise ValueError(f"expected floating point matrices (..., m, n) with m, n >= 1, got {got}")
    if square and matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"expected square matrices (..., n, n), got shape {tuple(matrix.shape)}")
