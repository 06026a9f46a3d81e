"""A start of projections from whitened principal directions of the word tokens, for docs/tried.md."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def start_whitened(projection: nn.Linear, tokens: Tensor) -> None:
    """Set W and R to rotations of whitened directions of `(n, D)` tokens; their outputs keep the size they had."""
    tokens, weight = tokens.double(), projection.weight
    values, directions = torch.linalg.eigh(torch.cov(tokens.T))
    count = len(weight) // 2
    kept = min(count, len(values))
    whitened = (directions[:, -kept:] / values[-kept:].sqrt()).T
    start = torch.cat([torch.linalg.qr(torch.randn(count, kept).double())[0] @ whitened for _ in range(2)])
    size = [(tokens @ each.double().T).square().mean().sqrt() for each in (weight, start)]
    weight.copy_(start * size[0] / size[1])
