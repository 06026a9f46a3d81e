"""Tokens of samples one after the other, without padding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Tokens of all samples, `(tokens, dim)`: those of sample i are `tokens[starts[i] : starts[i + 1]]`."""

    tokens: Tensor
    starts: Tensor  # (batch + 1), int64

    @property
    def counts(self) -> Tensor:
        """How many tokens each sample has, `(batch, 1)` float32, at least 1."""
        return self.starts.diff().clamp_min(1).float().unsqueeze(1)

    def padded(self) -> tuple[Tensor, Tensor | None]:
        """`(batch, longest, dim)` with zeros, and the mask of what is none; no mask where all have as many."""
        counts, dim = self.starts.diff(), self.tokens.shape[1]
        longest = max(1, int(counts.max())) if len(counts) else 1
        if len(self.tokens) == len(counts) * longest:
            return self.tokens.view(len(counts), longest, dim), None
        mask = torch.arange(longest) < counts.unsqueeze(1)
        padded = self.tokens.new_zeros(mask.numel(), dim)
        return padded.index_copy_(0, mask.flatten().nonzero()[:, 0], self.tokens).view(*mask.shape, dim), mask
