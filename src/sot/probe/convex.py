"""Linear classifiers of frozen features, solved to their optimum for many folds and penalties at once.

The objective is the mean loss of the samples of a fold plus `penalty / 2 · |W|²`; the bias goes free. The second
derivative of every loss here is bounded by a constant times that of least squares, so that one matrix a penalty,
factored once, makes steps that need no search for their length, and all folds take them together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CURVATURE = {"softmax": 0.5, "sigmoid": 0.25, "identity": 1.0}  # bounds of the second derivative of each loss
STEPS, TOLERANCE = 500, 1e-3


def mean_outputs(logits: Tensor, link: str) -> Tensor:
    """What the loss compares with the targets: probabilities, or the number itself."""
    if link == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if link == "sigmoid" else logits


def losses(logits: Tensor, targets: Tensor, link: str) -> Tensor:
    """Of each sample, `(..., samples)`."""
    targets = targets.expand_as(logits)
    if link == "softmax":
        return -(logits.log_softmax(-1) * targets).sum(-1)
    if link == "sigmoid":
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(-1)
    return (logits - targets).square().mean(-1) / 2


class Blocks:
    """Groups of features `(samples, width)` of one set, each centred and of unit length on average.

    A mixture is a weight for each group: its share of the squared length of a sample.
    """

    def __init__(self, groups: Sequence[Tensor]) -> None:
        self.means = [group.mean(0) for group in groups]
        centred = [group - mean for group, mean in zip(groups, self.means)]
        self.scales = [1 / each.square().sum(1).mean().sqrt().clamp_min(1e-12) for each in centred]
        self.groups = [each * scale for each, scale in zip(centred, self.scales)]
        self.samples = len(groups[0])
        self.is_dual = self.samples < sum(group.shape[1] for group in groups)
        self.products = self._products()

    def _products(self) -> list[Tensor]:
        """Of samples, by group, or of all features with each other: whichever is the smaller."""
        if self.is_dual:
            return [group @ group.T for group in self.groups]
        features = torch.cat(self.groups, dim=1)
        return [features.T @ features]

    def factors(self, mixture: Sequence[float]) -> Tensor:
        """By which each feature is multiplied."""
        parts = [weight**0.5 * group.new_ones(group.shape[1]) for weight, group in zip(mixture, self.groups)]
        return torch.cat(parts)

    def system(self, mixture: Sequence[float]) -> tuple[Tensor, Tensor]:
        """`A (samples, m)` from coefficients to logits, and the products `(m, m)` that bound the curvature."""
        if self.is_dual:
            kernel = torch.stack([weight * product for weight, product in zip(mixture, self.products)]).sum(0)
            return kernel, kernel
        factors = self.factors(mixture)
        used = factors.nonzero()[:, 0]  # what has no share is no part of the problem
        features = torch.cat(self.groups, dim=1) if len(used) == len(factors) else self._used(mixture)
        products = self.products[0].index_select(0, used).index_select(1, used)
        return features * factors[used], products * factors[used] * factors[used, None]

    def _used(self, mixture: Sequence[float]) -> Tensor:
        return torch.cat([group for share, group in zip(mixture, self.groups) if share], dim=1)

    def linear(self, mixture: Sequence[float], coefficients: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and bias for the features as they came; `coefficients` are `(m, outputs)`."""
        factors = self.factors(mixture)
        if self.is_dual:
            coefficients = torch.cat(self.groups, dim=1).T @ coefficients * factors[:, None]
        elif len(coefficients) < len(factors):
            everything = coefficients.new_zeros(len(factors), coefficients.shape[1])
            coefficients = everything.index_copy_(0, factors.nonzero()[:, 0], coefficients)
        scales = torch.cat([scale.expand(len(mean)) for scale, mean in zip(self.scales, self.means)])
        weight = (coefficients * (factors * scales)[:, None]).T
        return weight, bias - weight @ torch.cat(self.means)


def solve(
    blocks: Blocks,
    mixture: Sequence[float],
    targets: Tensor,
    folds: Tensor,
    penalties: Sequence[float],
    link: str = "softmax",
    tolerance: float = TOLERANCE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Optima for `folds (folds, samples)`, True for what is fitted, and all penalties.

    What comes back: logits of all samples `(penalties, folds, samples, outputs)`, coefficients `(penalties, m, folds,
    outputs)`, and biases `(penalties, 1, folds, outputs)`.
    """
    matrix, products = blocks.system(mixture)
    samples, outputs, size = blocks.samples, targets.shape[1], matrix.shape[1]
    shares = (folds / folds.sum(1, keepdim=True)).T[None, :, :, None]  # (1, samples, folds, 1)
    bound = CURVATURE[link] * float(shares.max())  # of a fold's mean loss, by the products of all samples
    strength = matrix.new_tensor(list(penalties))[:, None, None]
    factor = torch.linalg.cholesky(bound * products + strength * torch.eye(size))
    wanted = targets[None, :, None, :]
    coefficients = matrix.new_zeros(len(penalties), size, len(folds), outputs)
    bias = _start(wanted, shares, link).repeat(len(penalties), 1, 1, 1)
    ahead, ahead_bias, momentum = coefficients, bias, matrix.new_ones(len(penalties), 1, len(folds), 1)
    for _ in range(STEPS):
        logits = (matrix @ ahead.flatten(2)).view(len(penalties), samples, len(folds), outputs) + ahead_bias
        rest = shares * (mean_outputs(logits, link) - wanted)
        slope = rest.flatten(2) if blocks.is_dual else matrix.T @ rest.flatten(2)
        step = torch.cholesky_solve(slope + strength * ahead.flatten(2), factor).view_as(coefficients)
        moved, moved_bias = ahead - step, ahead_bias - rest.sum(1, keepdim=True) / (bound * samples)
        change, change_bias = moved - coefficients, moved_bias - bias
        against = (step * change).sum((1, 3), keepdim=True) > 0  # went uphill: take the speed out
        momentum = torch.where(against, torch.ones_like(momentum), momentum)
        following = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        speed = (momentum - 1) / following
        ahead, ahead_bias = moved + speed * change, moved_bias + speed * change_bias
        coefficients, bias, momentum = moved, moved_bias, following
        if _is_small(step, coefficients, tolerance):
            break
    logits = (matrix @ coefficients.flatten(2)).view(len(penalties), samples, len(folds), outputs) + bias
    return logits.transpose(1, 2), coefficients, bias


def _start(wanted: Tensor, shares: Tensor, link: str) -> Tensor:
    """The best biases where nothing else is known, `(1, 1, folds, outputs)`."""
    mean = (shares * wanted).sum(1, keepdim=True)
    if link == "identity":
        return mean
    mean = mean.clamp(1e-6, 1 - 1e-6)
    return mean.log() if link == "softmax" else mean.logit()


def _is_small(step: Tensor, coefficients: Tensor, tolerance: float) -> bool:
    stepped, length = (each.square().sum((1, 3)).sqrt() for each in (step, coefficients))
    return bool((stepped <= tolerance * length.clamp_min(1e-6)).all())
