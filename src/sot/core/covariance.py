"""Covariance of projected tokens, the costly part of second-order pooling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sot.core import simd
from sot.core.precision import at_least_float32, is_hooked
from sot.core.products import times_transposed

TOKENS_AT_A_TIME = 1568  # and thread; 8 images of 196: large enough for fast products, small enough for a cache


def covariance(left: Tensor, right: Tensor, count: Tensor, mask: Tensor | None, center: bool) -> Tensor:
    """`XᵀY / count` in at least float32: `(batch, tokens, heads, m), (…, n) -> (batch, heads, m, n)`.

    Masked rows of X and Y have to be zero; `center` subtracts the mean of each channel over the kept tokens first.
    """
    left, right = at_least_float32(left), at_least_float32(right)
    per_sample = count.to(left.dtype)[:, :, None, None]  # (batch, 1, 1, 1)
    if center:
        left = left - left.sum(1, keepdim=True) / per_sample
        right_mean = right.sum(1, keepdim=True) / per_sample
        if mask is not None:  # padding keeps y = 0, so that its x does not matter
            right_mean = right_mean * mask.to(right.dtype)[:, :, None, None]
        right = right - right_mean
    # (batch, heads, m, tokens) @ (batch, heads, tokens, n)
    return left.permute(0, 2, 3, 1) @ right.permute(0, 2, 1, 3) / per_sample


def split_heads(projected: Tensor, heads: int, left_dim: int) -> tuple[Tensor, Tensor]:
    """X `(batch, tokens, heads, m)` and Y `(…, n)` of `(batch, tokens, heads · (m + n))`: all Wᵢ first, then all Rᵢ."""
    batch, tokens, width = projected.shape
    right_dim = width // heads - left_dim
    left, right = torch.split(projected, [heads * left_dim, heads * right_dim], dim=-1)
    return left.view(batch, tokens, heads, left_dim), right.view(batch, tokens, heads, right_dim)


def is_plain(linear: nn.Module, tokens: Tensor) -> bool:
    """Whether calling the layer is `tokens @ weightᵀ` on a CPU and nothing else.

    Hooks, adapters, quantisers and offloaders all want to see the call; autocast changes its type.
    """
    if type(linear) is not nn.Linear or is_hooked(linear) or "forward" in vars(linear):
        return False
    if type(linear.weight) is not nn.Parameter or type(tokens) not in (Tensor, nn.Parameter):
        return False
    same = tokens.dtype == linear.weight.dtype and tokens.dtype in (torch.float32, torch.float64)
    return same and tokens.device.type == linear.weight.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def _chunks(tokens: Tensor) -> Iterator[slice]:
    size = max(1, TOKENS_AT_A_TIME * torch.get_num_threads() // tokens.shape[1])
    for start in range(0, tokens.shape[0], size):
        yield slice(start, start + size)


def _by_head(projected: Tensor, heads: int, left_dim: int) -> tuple[Tensor, Tensor]:
    left, right = split_heads(projected, heads, left_dim)
    return left.transpose(1, 2), right.transpose(1, 2)  # (batch, heads, tokens, m), (…, n)


def _starts(tokens: Tensor) -> Tensor:
    """The first row of each sample, and the end of the last."""
    return torch.arange(tokens.shape[0] + 1) * tokens.shape[1]


def _cross_products(projected: Tensor, heads: int, left_dim: int) -> Tensor:
    if simd.can_multiply_tokens(projected, heads, left_dim):
        return simd.cross_products(projected, _starts(projected), heads, left_dim)
    left, right = _by_head(projected, heads, left_dim)
    return left.mT @ right


def _pull_back(projected: Tensor, grad: Tensor, out: Tensor) -> Tensor:
    """Gradient of the projected tokens from that of their cross-products, in the first samples of `out`."""
    result = out[: len(projected)]
    heads, left_dim = grad.shape[1:3]
    if simd.can_multiply_tokens(projected, heads, left_dim):
        simd.pull_back_products(projected, _starts(projected), grad, result)
        return result
    left, right = _by_head(projected, heads, left_dim)
    d_left, d_right = _by_head(result, heads, left_dim)
    d_left.copy_(right @ grad.mT)
    d_right.copy_(left @ grad)
    return result


def _project(tokens: Tensor, weight: Tensor, panels: simd.Panels | None) -> Tensor:
    if panels is not None:
        return panels.times(tokens)
    rows = tokens.flatten(0, 1)  # word tokens are a slice of what the backbone gives: this copies
    return times_transposed(rows, weight).view(*tokens.shape[:2], weight.shape[0])


class _ProjectedCovariance(torch.autograd.Function):
    """`Wᵢ ZᵀZ Rᵢᵀ` in pieces of the batch; saves the projected tokens and nothing that is not already there.

    Centred X and Y need no other backward: the columns of each sum to zero, so the gradient of the other has mean zero.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, heads: int, left_dim: int, center: bool) -> Tensor:
        kept, right_dim = [], weight.shape[0] // heads - left_dim
        result = tokens.new_empty(tokens.shape[0], heads, left_dim, right_dim)
        panels = simd.Panels(weight.mT) if simd.can_multiply_rows(tokens, weight) else None
        for piece in _chunks(tokens):
            projected = _project(tokens[piece], weight, panels)
            if center:
                projected -= projected.mean(1, keepdim=True)
            kept.append(projected)
            result[piece] = _cross_products(projected, heads, left_dim)
        ctx.save_for_backward(tokens, weight, *kept)
        ctx.center = center
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        tokens, weight, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the definition
            left, right = _by_head(tokens @ weight.mT, *grad.shape[1:3])
            if ctx.center:
                left, right = left - left.mean(2, keepdim=True), right - right.mean(2, keepdim=True)
            inputs = [tensor for tensor, needed in zip((tokens, weight), ctx.needs_input_grad) if needed]
            grads = list(torch.autograd.grad(left.mT @ right, inputs, grad, create_graph=True))
            d_tokens = grads.pop(0) if ctx.needs_input_grad[0] else None
            return d_tokens, grads.pop() if grads else None, None, None, None
        backward = backward_by_kernels if simd.can_multiply_rows(tokens, weight) else _backward_by_torch
        pieces = _gradients(kept, grad)
        return *backward(tokens, weight, pieces, *ctx.needs_input_grad[:2]), None, None, None


Pieces = Iterable[tuple[slice, Tensor]]
Gradients = tuple[Tensor | None, Tensor | None]


def _gradients(kept: list[Tensor], grad: Tensor) -> Pieces:
    """Those of the projected tokens, piece by piece, each valid until the next, and where in the batch it lies."""
    start = 0
    out = torch.empty_like(kept[0]) if kept else grad  # one for all pieces, the first being the largest
    for projected in kept:  # not by _chunks: the number of threads may have changed
        piece = slice(start, start + len(projected))
        yield piece, _pull_back(projected, grad[piece], out)
        start = piece.stop


def backward_by_kernels(tokens: Tensor, weight: Tensor, pieces: Pieces, of_tokens: bool, of_weight: bool) -> Gradients:
    """Gradients of tokens and weight, as far as they are wanted, from those of the projected tokens."""
    d_tokens = tokens.new_empty(tokens.shape) if of_tokens else None
    d_weight = simd.SumOfProducts(weight) if of_weight else None
    panels = simd.Panels(weight) if of_tokens else None  # a frozen backbone has no use for it
    for piece, d_projected in pieces:
        if d_tokens is not None and panels is not None:
            panels.times(d_projected, d_tokens[piece])
        if d_weight is not None:
            d_weight.add(d_projected, tokens[piece])
    return d_tokens, None if d_weight is None else d_weight.result()


def _backward_by_torch(tokens: Tensor, weight: Tensor, pieces: Pieces, of_tokens: bool, of_weight: bool) -> Gradients:
    d_tokens = tokens.new_empty(tokens.shape) if of_tokens else None
    d_weight = torch.zeros_like(weight) if of_weight else None
    transposed = weight.mT.contiguous() if of_tokens else weight
    for piece, d_projected in pieces:
        rows = d_projected.flatten(0, 1)
        if d_tokens is not None:
            times_transposed(rows, transposed, out=d_tokens[piece].flatten(0, 1))
        if d_weight is not None:
            d_weight.addmm_(rows.mT, tokens[piece].flatten(0, 1))
    return d_tokens, d_weight


def projected_covariance(tokens: Tensor, weight: Tensor, heads: int, left_dim: int, center: bool = False) -> Tensor:
    """`XᵀY (batch, heads, m, n)` of the tokens `(batch, tokens, dim)` projected by `weight (heads · (m + n), dim)`.

    `center` subtracts the mean of each channel of X and Y over the tokens first.
    """
    return _ProjectedCovariance.apply(tokens, weight, heads, left_dim, center)
