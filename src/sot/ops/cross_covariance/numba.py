"""Projection and cross-products of float32 on a CPU by compiled kernels, where the tokens lie.

Samples are dense, `(batch, tokens, dim)`, or packed one after the other, `(1, tokens of all, dim)`, with `starts`: the
first row of each sample, and the end of the last. Each thread takes some samples through all products, a piece that
stays in its cache at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sot.ops._numba.threads import flat, on_threads, storage

LANES, TILE_ROWS, TILE_COLUMNS = 8, 4, 24  # of the kernels
TOKENS_AT_A_TIME = 256  # of small samples, for a product to be worth its panels


def accepts(tokens: Tensor, weight: Tensor, heads: int, left_dim: int) -> bool:
    """Whether the kernels can take tokens `(batch, tokens, dim)` and the matrix that projects them."""
    known = tokens.dtype == weight.dtype == torch.float32 and tokens.device.type == "cpu"
    whole = min(weight.shape) >= TILE_COLUMNS and len(weight) % TILE_ROWS == 0 and tokens.shape[1] >= TILE_ROWS
    return known and whole and min(left_dim, len(weight) // heads - left_dim) >= LANES


def _where(tokens: Tensor, starts: Tensor | None) -> Any:
    """Where the tokens of each sample are; copied if they are not in rows."""
    from sot.ops.cross_covariance.numba_kernels import Tokens

    batch, count, dim = tokens.shape
    rows = tokens if tokens.stride()[1:] == (dim, 1) else tokens.contiguous()
    if starts is None:
        numbers = torch.arange(batch + 1)
        begins, starts = numbers[:-1] * rows.stride(0), numbers * count
    else:
        begins = starts[:-1] * dim
    return Tokens(storage(rows), begins.numpy(), starts.numpy(), dim, TOKENS_AT_A_TIME)


def _packed(matrix: Tensor) -> Any:
    """A matrix `(k, n)` in panels, for many products with tokens on its left."""
    from sot.ops.cross_covariance.numba_kernels import pack_panels

    panels = flat(matrix.new_empty(matrix.shape[0] * _whole_tiles(matrix.shape[1])))
    pack_panels(storage(matrix), (*matrix.shape, *matrix.stride()), panels)
    return panels


def _whole_tiles(columns: int) -> int:
    return -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def project(
    tokens: Tensor, weight: Tensor, starts: Tensor | None, heads: int, left_dim: int, center: bool
) -> tuple[Tensor, Tensor]:
    """`XᵀY (samples, heads, m, n)`, and the projected tokens `(batch, tokens, heads · (m + n))`."""
    from sot.ops.cross_covariance import numba_kernels

    where, width = _where(tokens, starts), len(weight)
    projected = tokens.new_empty(*tokens.shape[:2], width)
    sizes = heads, left_dim, width // heads - left_dim
    out = tokens.new_empty(len(where.begins), *sizes)
    panels, rows, target = _packed(weight.detach().mT), flat(projected), flat(out)
    on_threads(lambda part: numba_kernels.project(where, panels, sizes, center, rows, target, part), len(out), 1)
    return out, projected


def pull_back_to_tokens(
    tokens: Tensor,
    weight: Tensor,
    starts: Tensor | None,
    projected: Tensor,
    grad: Tensor,
    of_tokens: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of tokens and weight as far as they are wanted, of the others nothing."""
    from sot.ops.cross_covariance import numba_kernels

    where, sizes = _where(tokens, starts), tuple(grad.shape[1:])
    d_tokens = tokens.new_empty(tokens.shape if of_tokens else 0)
    panels = _packed(weight.detach()) if of_tokens else flat(weight.new_empty(0))  # a frozen backbone wants none
    padded = (len(weight), _whole_tiles(weight.shape[1])) if of_weight else (0, 0)
    rows, given, target = flat(projected), flat(grad), flat(d_tokens)

    def run(part: tuple[int, int]) -> Tensor:
        total = weight.new_zeros(padded)
        numba_kernels.pull_back_to_tokens(where, panels, sizes, rows, given, target, flat(total), part)
        return total

    sums = on_threads(run, len(grad), 1)
    d_weight = sum(sums[1:], sums[0])[:, : weight.shape[1]].contiguous() if of_weight else weight.new_empty(0)
    return d_tokens, d_weight
