"""Cases of `sot bench normalize`: each normalisation by itself, on cross-covariances of random tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sot.bench.cases import HEADS, SIZES, Case, Size, forward_and_backward
from sot.bench.references import deflated_power, published_root, svd_power
from sot.core.normalize import fast_singular_value_power_norm, matrix_square_root, singular_value_power_norm

EXPONENT = 0.25  # of the default head


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
    exact = svd_power(matrix.double(), EXPONENT)
    error = (actual.double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    return f"error {error.median():.1e}, worst {error.max():.1e}"


def normalize_cases(sizes: tuple[Size, ...] = SIZES) -> list[Case]:
    """Four cases a size: beside the published norm, beside SVD twice, and the square root of a covariance."""
    return [case for size in sizes for case in (*_power_cases(size), _root_case(size))]


def _power_cases(size: Size) -> list[Case]:
    matrix, start = cross_covariances(size), torch.randn(size.head_dim)
    inputs, both = [matrix.requires_grad_()], [matrix, start.requires_grad_()]
    grad, fixed = torch.randn_like(matrix), matrix.detach()
    svd, exact = partial(svd_power, exponent=EXPONENT), partial(singular_value_power_norm, exponent=EXPONENT)
    ours = forward_and_backward(exact, inputs, grad)
    notes = {"SVD": errors(svd(fixed), fixed), "ours": errors(exact(fixed), fixed)}
    published = {
        "published": forward_and_backward(deflated_power, both, grad),
        "ours": ours,
        "ours, fast": forward_and_backward(fast_singular_value_power_norm, both, grad),
    }
    decomposed = {
        "SVD": forward_and_backward(svd, inputs, grad),
        "ours": ours,
        "ours, exponent 0.5": forward_and_backward(singular_value_power_norm, inputs, grad),
    }
    forward = {"SVD": lambda: svd(fixed), "ours": lambda: exact(fixed)}
    return [
        Case(f"{size.name}: svPN, forward and backward", published, "published"),
        Case(f"{size.name}: exact svPN, forward and backward", decomposed, "SVD", notes),
        Case(f"{size.name}: exact svPN, forward", forward, "SVD", notes),
    ]


def _root_case(size: Size) -> Case:
    spd = covariances(size)
    inputs, grad = [spd.requires_grad_()], torch.randn_like(spd)
    functions = {
        "published": forward_and_backward(published_root, inputs, grad),
        "ours": forward_and_backward(matrix_square_root, inputs, grad),
    }
    title = f"{size.name}: square root of covariances of {size.covariance_dim}, forward and backward"
    return Case(title, functions, "published")
