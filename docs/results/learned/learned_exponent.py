"""Train sot_7 on CIFAR-10 with one learned exponent a head, in place of a fixed one.

python docs/results/learned/learned_exponent.py START RATE SEED --data cifar10 --out RUN

α = sigmoid(RATE · parameter), so that RATE scales how fast it moves. Prints the exponents after training.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import sot.core.normalizers as normalizers
from sot.cli.main import main
from sot.ops.svpn.slopes import relative
from sot.ops.svpn.torch import LEFT_EPS, decompose_by_gram

EPS = 1e-5


def slopes(unit: Tensor, ratio: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of `sot.ops.svpn.slopes`, for an exponent `(batch, 1, 1)` of each matrix."""
    beta = (exponent - 1) / 2
    a, b = torch.maximum(unit.unsqueeze(2), unit.unsqueeze(1)), torch.minimum(unit.unsqueeze(2), unit.unsqueeze(1))
    square = b.square() + EPS**2
    z = (a - b) * (a + b) / square
    growth = torch.where(z == 0, beta, torch.expm1(beta * torch.log1p(z)) / torch.where(z == 0, 1, z))
    difference = (a.square() + EPS**2).pow(beta) + b * (a + b) * square.pow(beta - 1) * growth
    total, weighted = unit.unsqueeze(2) + unit.unsqueeze(1), unit * ratio
    mean = (weighted.unsqueeze(2) + weighted.unsqueeze(1)) / torch.where(total == 0, 1, total)
    mean = torch.where(total == 0, EPS ** (2 * beta), mean)
    return (difference + mean) / 2, (difference - mean) / 2


class Power(torch.autograd.Function):
    """`U diag(λ^α) Vᵀ` of matrices `(batch, m, n)` and exponents `(batch,)`; dλ^α/dα = λ^α ln λ, 0 at zero."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, exponent: Tensor) -> Tensor:
        left, values, right = decompose_by_gram(matrix)
        zero = values <= LEFT_EPS * values.amax(-1, keepdim=True)
        powers = values.pow(exponent[:, None]).masked_fill(zero, 0)
        ctx.save_for_backward(left, values, right, powers, exponent)
        return (left * powers.unsqueeze(-2)) @ right

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        left, values, right, powers, exponent = ctx.saved_tensors
        unit, ratio, scale = relative(values, exponent[:, None], EPS)
        same, swapped = slopes(unit, ratio, exponent[:, None, None])
        kept = left * (unit > LEFT_EPS).unsqueeze(-2)
        mapped = torch.bmm(grad * scale.unsqueeze(-1), right.mT)
        inner = torch.bmm(kept.mT, mapped)
        middle = torch.bmm(kept, same * inner + swapped * inner.mT)
        of_matrix = torch.bmm(middle + torch.baddbmm(mapped, kept, inner, alpha=-1) * ratio.unsqueeze(-2), right)
        along = (left * (grad @ right.mT)).sum(-2)
        logarithm = torch.where(powers > 0, values, 1).log()
        return of_matrix, (along * powers * logarithm).sum(-1)


class LearnedPowerNorm(nn.Module):
    """Exact svPN with a learned exponent in (0, 1) for each of six heads."""

    def __init__(self, start: float, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.raw = nn.Parameter(torch.full((6,), math.log(start / (1 - start)) / rate))

    def forward(self, matrix: Tensor) -> Tensor:
        exponent = torch.sigmoid(self.raw * self.rate).expand(matrix.shape[:2]).reshape(-1)
        return Power.apply(matrix.flatten(0, 1), exponent).view_as(matrix)


if __name__ == "__main__":
    start, rate, seed, *options = sys.argv[1:]
    normalizers.NORMS["svpn"] = lambda settings: LearnedPowerNorm(float(start), float(rate))
    sys.argv = ["sot", "train", "--model", "sot_7", "--recipe", "ablation_cpu", "--head", "norm=svpn,exponent=0.25"]
    sys.argv += ["--set", f"seed={seed}", "--logger", "none", *options]
    try:
        main()
    finally:
        weights = load_file(Path(options[options.index("--out") + 1]) / "model.safetensors")
        raw = next(value for name, value in weights.items() if name.endswith("norm.raw"))
        print([round(value, 3) for value in torch.sigmoid(raw * float(rate)).tolist()])
