"""Moment probing, a peer for frozen backbones (Gao et al., ICCV 2023)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sot.core.pooling import Pool, keep
from sot.ops.precision import at_least_float32, autocast_off

HEADS, WIDTH = 4, 128


class MomentProbing(Pool):
    """Multi-head convolutional cross-covariance (MHC³): neighbouring heads' products, rows of unit length, convolved.

    The words are reduced to four heads of 128 channels, each through the same LayerNorm and centred. The three matrices
    of heads 1–2, 2–3 and 3–4 pass two convolutions of stride 2: 128 → 63 → 31. As published, but for tokens of any
    width, with masks.
    """

    def __init__(self, dim: int) -> None:
        side = ((WIDTH - 1) // 2 - 1) // 2
        super().__init__(dim, (HEADS - 1) * side**2)
        self.reduce = nn.Linear(dim, HEADS * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        channels = HEADS - 1
        self.convolve = nn.Sequential(
            nn.Conv2d(channels, channels, 3, stride=2, bias=False),
            nn.GELU(),
            nn.Conv2d(channels, channels, 3, stride=2, bias=False),
        )

    def pool(self, tokens: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        reduced = self.reduce(tokens)
        heads = self.norm(reduced.view(*reduced.shape[:2], HEADS, WIDTH))
        rows = at_least_float32(heads).flatten(2)
        size = count.to(rows.dtype).unsqueeze(2)
        kept, _ = keep(rows, mask)  # the layers above have biases
        centred, _ = keep(kept - kept.sum(1, keepdim=True) / size, mask)
        by_head = centred.view(*centred.shape[:2], HEADS, WIDTH).transpose(1, 2)  # (batch, heads, tokens, width)
        with autocast_off(rows):
            products = by_head[:, :-1].mT @ by_head[:, 1:] / size.unsqueeze(1)
            unit = F.normalize(products, dim=-1)
        return torch.flatten(self.convolve(unit.to(self.reduce.weight.dtype)), 1).to(tokens.dtype)
