"""Projection and cross-products in pieces of the batch, on any device; on a CPU the pieces stay in its cache.

Centred X and Y need no other backward: the columns of each sum to zero, so the gradient of the other has mean zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sot.ops.cross_covariance.reference import cross_products, split_heads
from sot.ops.linear import ONEDNN

TOKENS_AT_A_TIME = 1568  # and thread; 8 images of 196: large enough for fast products, small enough for a cache


def _multiply(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """`out = rows @ weightᵀ`; of float32 on a CPU by oneDNN, which torch has but takes for compiled models only."""
    if ONEDNN is None or rows.dtype != torch.float32 or rows.device.type != "cpu":
        torch.mm(rows, weight.mT, out=out)
    else:
        out.copy_(ONEDNN(rows, weight, None, "none", [], ""))


def _pieces(tokens: Tensor) -> Iterator[slice]:
    size = max(1, TOKENS_AT_A_TIME * torch.get_num_threads() // tokens.shape[1])
    if tokens.device.type != "cpu":
        size = max(1, len(tokens))
    return (slice(start, start + size) for start in range(0, len(tokens), size))


def project(tokens: Tensor, weight: Tensor, heads: int, left_dim: int, center: bool) -> tuple[Tensor, Tensor]:
    """`XᵀY (batch, heads, m, n)`, and the projected tokens `(batch, tokens, heads · (m + n))` they are made of."""
    if tokens.device.type != "cpu":  # as few launches as can be
        projected = tokens @ weight.mT
        projected = projected - projected.mean(1, keepdim=True) if center else projected
        return cross_products(projected, heads, left_dim), projected
    batch, count, dim = tokens.shape
    width = len(weight)
    projected = tokens.new_empty(batch, count, width)
    out = tokens.new_empty(batch, heads, left_dim, width // heads - left_dim)
    for piece in _pieces(tokens):
        rows = projected[piece]
        _multiply(tokens[piece].reshape(-1, dim), weight, rows.view(-1, width))
        if center:
            rows -= rows.mean(1, keepdim=True)
        out[piece] = cross_products(rows, heads, left_dim)
    return out, projected


def pull_back(projected: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the projected tokens from that of their cross-products: `YGᵀ` and `XG`."""
    heads, left_dim = grad.shape[1:3]
    result = torch.empty_like(projected)
    left, right = split_heads(projected, heads, left_dim)
    d_left, d_right = split_heads(result, heads, left_dim)
    d_left.copy_(right @ grad.mT)
    d_right.copy_(left @ grad)
    return result


def pull_back_to_tokens(
    tokens: Tensor, weight: Tensor, projected: Tensor, grad: Tensor, of_tokens: bool, of_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of tokens and weight as far as they are wanted, of the others nothing, a piece at a time."""
    d_tokens = tokens.new_empty(tokens.shape if of_tokens else 0)
    d_weight = weight.new_empty(0)
    if of_weight:  # the first piece, if there is one, writes it
        d_weight = torch.empty_like(weight) if len(tokens) else torch.zeros_like(weight)
    dim, width = tokens.shape[2], len(weight)
    transposed = weight.mT
    if of_tokens and weight.device.type == "cpu":
        transposed = transposed.contiguous()
    for piece in _pieces(tokens):
        rows = pull_back(projected[piece], grad[piece]).view(-1, width)
        if of_tokens:
            _multiply(rows, transposed, d_tokens[piece].view(-1, dim))
        if of_weight:
            d_weight.addmm_(rows.mT, tokens[piece].reshape(-1, dim), beta=int(piece.start > 0))
    return d_tokens, d_weight
