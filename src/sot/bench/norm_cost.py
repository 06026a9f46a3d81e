"""Cases of `sot bench normalize`: each normalisation by itself, on cross-covariances of random tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sot.bench.cases import HEADS, SIZES, Case, Size, forward_and_backward
from sot.bench.references import deflated_power, published_root, svd_power
from sot.core.normalize import (
    fast_singular_value_power_norm,
    matrix_square_root,
    product_singular_value_power_norm,
    singular_value_power_norm,
)

GOALS = {  # by size: exact forward and backward, matrix products only forward
    "Tiny": (0.25, 0.20),
    "Small": (0.40, 0.25),
    "Base": (0.60, 0.35),
}


def cross_covariances(size: Size) -> Tensor:
    """`(batch · heads, m, m)` of tokens projected at random."""
    tokens = torch.randn(size.batch, size.tokens, size.token_dim)
    projected = tokens @ torch.randn(size.token_dim, 2 * HEADS * size.head_dim) / size.token_dim**0.5
    left, right = projected.unflatten(-1, (2, HEADS, size.head_dim)).permute(2, 0, 3, 1, 4)
    return (left.mT @ right / size.tokens).flatten(0, 1)


def covariances(size: Size) -> Tensor:
    """`(batch, n, n)` of random tokens."""
    tokens = torch.randn(size.batch, size.tokens, size.covariance_dim)
    return tokens.mT @ tokens / size.tokens


def errors(actual: Tensor, matrix: Tensor) -> str:
    """Median and largest relative error over the batch, against SVD in float64."""
    exact = svd_power(matrix.double())
    error = (actual.double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    return f"error {error.median():.1e}, worst {error.max():.1e}"


def normalize_cases(sizes: tuple[Size, ...] = SIZES) -> list[Case]:
    """Four cases a size: fast, exact, by products only, and the square root of a covariance."""
    return [case for size in sizes for case in _of_size(size)]


def _of_size(size: Size) -> list[Case]:
    matrix, start, spd = cross_covariances(size), torch.randn(size.head_dim), covariances(size)
    inputs, both, root = [matrix.requires_grad_()], [matrix, start.requires_grad_()], [spd.requires_grad_()]
    grad, root_grad, fixed = torch.randn_like(matrix), torch.randn_like(spd), matrix.detach()
    fourth_root = partial(singular_value_power_norm, exponent=0.25)
    exact_goal, product_goal = GOALS.get(size.name, (None, None))
    notes = {
        "SVD": errors(svd_power(fixed), fixed),
        "ours": errors(singular_value_power_norm(fixed), fixed),
        "products only": errors(product_singular_value_power_norm(fixed), fixed),
    }
    return [
        Case(
            f"{size.name}: fast svPN, forward and backward",
            {
                "published": forward_and_backward(deflated_power, both, grad),
                "ours": forward_and_backward(fast_singular_value_power_norm, both, grad),
            },
            "published",
            {"ours": 0.35},
        ),
        Case(
            f"{size.name}: exact svPN, forward and backward",
            {
                "SVD": forward_and_backward(svd_power, inputs, grad),
                "ours": forward_and_backward(singular_value_power_norm, inputs, grad),
                "ours, exponent 0.25": forward_and_backward(fourth_root, inputs, grad),
                "products only": forward_and_backward(product_singular_value_power_norm, inputs, grad),
            },
            "SVD",
            {} if exact_goal is None else {"ours": exact_goal},
            notes,
        ),
        Case(
            f"{size.name}: exact svPN, forward",
            {
                "SVD": lambda: svd_power(fixed),
                "ours": lambda: singular_value_power_norm(fixed),
                "products only": lambda: product_singular_value_power_norm(fixed),
            },
            "SVD",
            {} if product_goal is None else {"products only": product_goal},
            notes,
        ),
        Case(
            f"{size.name}: square root of covariances of {size.covariance_dim}, forward and backward",
            {
                "published": forward_and_backward(published_root, root, root_grad),
                "ours": forward_and_backward(matrix_square_root, root, root_grad),
            },
            "published",
            {"ours": 0.60},
        ),
    ]
