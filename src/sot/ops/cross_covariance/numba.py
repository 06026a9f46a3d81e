"""Projection and cross-products of float32 on a CPU by compiled kernels, where the tokens lie.

Samples are dense, `(batch, tokens, dim)`, or packed one after the other, `(1, tokens of all, dim)`, with `starts`: the
first row of each sample, and the end of the last. Each thread takes some samples through all products, a piece that
stays in its cache at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sot.ops._numba.threads import flat, on_threads, storage
from sot.ops.cross_covariance.torch import TOKENS_AT_A_TIME

LANES, TILE_ROWS, TILE_COLUMNS = 8, 4, 24  # of the kernels


def accepts(tokens: Tensor, weight: Tensor, heads: int, left_dim: int) -> bool:
    """Whether the kernels can take tokens `(batch, tokens, dim)` and the matrix that projects them."""
    known = tokens.dtype == weight.dtype == torch.float32 and tokens.device.type == "cpu"
    whole = min(weight.shape) >= TILE_COLUMNS and len(weight) % TILE_ROWS == 0 and tokens.shape[1] >= TILE_ROWS
    return known and whole and min(left_dim, len(weight) // heads - left_dim) >= LANES


class Piece(NamedTuple):
    """Some samples: which, and which rows of the projected tokens they have."""

    samples: tuple[int, int]
    rows: slice


class TokenRows(NamedTuple):
    """Where the tokens of each sample are."""

    tokens: Tensor  # (batch, tokens, dim), each token a row
    starts: Tensor  # (samples + 1), int64
    is_packed: bool

    @classmethod
    def of(cls, tokens: Tensor, starts: Tensor | None) -> TokenRows:
        """Tokens that are in rows, copied if they are not."""
        rows = tokens if tokens.stride()[1:] == (tokens.shape[2], 1) else tokens.contiguous()
        if starts is not None:
            return cls(rows, starts, True)
        return cls(rows, torch.arange(tokens.shape[0] + 1) * tokens.shape[1], False)

    def pieces(self, samples: tuple[int, int]) -> Iterator[Piece]:
        """Samples of some tokens at a time."""
        starts, first = self.starts.tolist(), samples[0]
        while first < samples[1]:
            last = bisect_right(starts, starts[first] + TOKENS_AT_A_TIME) - 1
            last = min(samples[1], max(first + 1, last))
            yield Piece((first, last), slice(starts[first], starts[last]))
            first = last

    def view(self, piece: Piece, like: Tensor) -> Tensor:
        """Of a tensor laid out like the tokens, what belongs to a piece."""
        return like[:, piece.rows] if self.is_packed else like[piece.samples[0] : piece.samples[1]]


class Panels:
    """A matrix `(k, n)`, packed for many products with tokens on its left."""

    def __init__(self, matrix: Tensor) -> None:
        from sot.ops.cross_covariance import numba_kernels

        self.kernels, self.columns = numba_kernels, matrix.shape[1]
        self.packed = flat(matrix.new_empty(matrix.shape[0] * _whole_tiles(matrix.shape[1])))
        numba_kernels.pack(storage(matrix), (*matrix.shape, *matrix.stride()), self.packed)

    def times(self, tokens: Tensor, out: Tensor) -> None:
        """`tokens @ matrix` of `(batch, tokens, k)` into `out`; both are in rows, and their samples may lie apart."""
        batch, count, width = tokens.shape
        sizes = self.kernels.Sizes(batch, count, width, self.columns, tokens.stride(0), out.stride(0))
        self.kernels.times_panels(storage(tokens), sizes, self.packed, storage(out))


def _whole_tiles(columns: int) -> int:
    return -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def _at_least_a_tile(tokens: Tensor, piece: Piece, out: Tensor) -> tuple[Tensor, Tensor]:
    """Of packed tokens a piece, with rows before or after it if it has fewer than a tile; they come out the same."""
    rows = piece.rows
    if rows.stop - rows.start < TILE_ROWS:
        first = min(rows.start, tokens.shape[1] - TILE_ROWS)
        rows = slice(first, first + TILE_ROWS)
    return tokens[:, rows], out[:, rows]


def project(
    tokens: Tensor, weight: Tensor, starts: Tensor | None, heads: int, left_dim: int, center: bool
) -> tuple[Tensor, Tensor]:
    """`XᵀY (samples, heads, m, n)`, and the projected tokens `(batch, tokens, heads · (m + n))`."""
    samples, width = TokenRows.of(tokens, starts), len(weight)
    projected = tokens.new_empty(*tokens.shape[:2], width)
    sizes = heads, left_dim, width // heads - left_dim
    out = tokens.new_empty(len(samples.starts) - 1, *sizes)
    panels = Panels(weight.detach().mT)
    rows, target, bounds = flat(projected), flat(out), samples.starts.numpy()

    def run(part: tuple[int, int]) -> None:
        for piece in samples.pieces(part):
            _project_piece(samples, piece, panels, projected)
            if center:
                centred = samples.view(piece, projected).detach().numpy()
                centred -= centred.mean(1, keepdims=True)
            panels.kernels.cross_products(rows, bounds, sizes, target, piece.samples)

    on_threads(run, len(out))
    return out, projected


def _project_piece(samples: TokenRows, piece: Piece, panels: Panels, out: Tensor) -> None:
    if piece.rows.start == piece.rows.stop:
        return
    if samples.is_packed:
        panels.times(*_at_least_a_tile(samples.tokens, piece, out))
    else:
        panels.times(samples.view(piece, samples.tokens), samples.view(piece, out))


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
    samples = TokenRows.of(tokens, starts)
    d_tokens = tokens.new_empty(tokens.shape if of_tokens else 0)
    panels = Panels(weight.detach()) if of_tokens else None  # a frozen backbone has no use for it
    padded = (len(weight), _whole_tiles(weight.shape[1])) if of_weight else None

    def run(part: tuple[int, int]) -> Tensor | None:
        return _pull_back_part(samples, part, projected, grad, panels, d_tokens, padded)

    sums = [total for total in on_threads(run, len(grad)) if total is not None]
    d_weight = sum(sums[1:], sums[0])[:, : weight.shape[1]].contiguous() if sums else weight.new_empty(0)
    return d_tokens, d_weight


def _pull_back_part(
    samples: TokenRows,
    part: tuple[int, int],
    projected: Tensor,
    grad: Tensor,
    panels: Panels | None,
    d_tokens: Tensor,
    padded: tuple[int, int] | None,
) -> Tensor | None:
    """For some samples: the gradient of their tokens is written, that of the weight comes back, padded to tiles."""
    from sot.ops.cross_covariance import numba_kernels

    total = None if padded is None else grad.new_zeros(padded)
    rows, given, bounds, sizes = flat(projected), flat(grad), samples.starts.numpy(), tuple(grad.shape[1:])
    room: Any = None
    for piece in samples.pieces(part):
        count = piece.rows.stop - piece.rows.start
        if count == 0:
            continue
        if room is None or len(room) < max(count, TILE_ROWS):
            room = projected.new_zeros(max(count, TILE_ROWS), projected.shape[2])
        numba_kernels.pull_back(rows, given, bounds, sizes, flat(room), piece.samples)
        of_piece = samples.view(piece, samples.tokens)
        pulled = room[:count].view(*of_piece.shape[:2], -1)
        if panels is not None:
            _multiply_back(panels, pulled, room, samples.view(piece, d_tokens))
        if total is not None:
            sizes_of_both = *pulled.shape, of_piece.shape[2], pulled.stride(0), of_piece.stride(0)
            layout = numba_kernels.Sizes._make(sizes_of_both)
            numba_kernels.add_products(flat(pulled), storage(of_piece), layout, flat(total))
    return total


def _multiply_back(panels: Panels, pulled: Tensor, room: Tensor, out: Tensor) -> None:
    if pulled.shape[1] >= TILE_ROWS:
        panels.times(pulled, out)
        return
    few = room.new_empty(1, TILE_ROWS, out.shape[2])  # of packed tokens: fewer than a tile, with what else is there
    panels.times(room[:TILE_ROWS].unsqueeze(0), few)
    out.copy_(few[:, : out.shape[1]])
