"""The head that `sot.Classifier` fits: whitened words, their covariance, and what is plain beside it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sot.core.head import HeadConfig, SecondOrderHead
from sot.core.pooling import CovariancePool
from sot.probe.budget import Budget
from sot.probe.choice import FEW, Chosen, choose, draw_folds, hits, standard_error
from sot.probe.convex import Blocks, losses, solve
from sot.probe.features import Array, Features
from sot.probe.fitting import Target, head_outputs, train_head
from sot.probe.heads import representations, standardising_head, token_statistics

WIDTH, EXPONENT = 48, 0.25
SHRINKAGE = 0.1  # of the covariance of all words, towards equal variances: few texts do not tell small ones
TOKENS_TO_WHITEN = 30_000
TRAIN_FROM = 500  # samples: fewer tell little about projections
BUDGET, TRAINING = Budget(epochs=5), (3e-3, 0.05)  # learning rate and weight decay
PLAIN = {"class": (1.0, 0.0, 0.0), "average": (0.0, 0.0, 1.0), "class + average": (0.5, 0.0, 0.5)}
MIXED = {
    "second order": (0.0, 1.0, 0.0),
    "second order + class": (0.5, 0.5, 0.0),
    "second order + average": (0.0, 0.5, 0.5),
}
MIXTURES: dict[str, tuple[float, float, float]] = {**PLAIN, **MIXED}  # shares of class token, covariance, average
# What is chosen from, the usual first: backbones for images are trained by their class token, those for texts rarely.
COMPARED = {
    "image": ("second order + class", "second order", "second order + average", "average"),
    "text": ("second order + average", "second order", "second order + class", "average"),
}


@dataclass(frozen=True)
class FittedHead:
    """A head, how it was chosen, if it was, and whether all of it was trained from there."""

    head: SecondOrderHead
    chosen: Chosen | None
    is_trained: bool = False


def whitening(features: Features, norm: tuple[Tensor, Tensor], rows: Array, width: int) -> Tensor:
    """`(width, dim)`: the principal directions of standardised words, of unit variance each."""
    mean, deviation = norm
    words = max(1, int(features.lengths[rows].mean()))
    some = rows[np.linspace(0, len(rows) - 1, min(len(rows), 1 + TOKENS_TO_WHITEN // words)).astype(int)]
    packed = features.batch(np.sort(some)).words
    assert packed is not None
    tokens = (packed.tokens - mean) / deviation
    covariance = (tokens.T @ tokens / max(1, len(tokens))).double()
    size = covariance.diagonal().mean().clamp_min(1e-6)
    covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * size * torch.eye(features.dim, dtype=torch.float64)
    values, directions = torch.linalg.eigh(covariance)
    whitened = (directions / values.sqrt()).T.flip(0)[:width]
    return (whitened * whitened.sum(1, keepdim=True).sign()).float()  # the same on every machine


def whitened_head(config: HeadConfig, outputs: int, norm: tuple[Tensor, Tensor], projection: Tensor) -> SecondOrderHead:
    """A head whose projection whitens the words; its linear layers are new."""
    head = standardising_head(config, outputs, norm)
    if isinstance(head.pool, CovariancePool):
        with torch.no_grad():
            head.pool.projection.weight.copy_(projection)
            assert head.pool.projection.bias is not None
            head.pool.projection.bias.zero_()
    return head


def mixture_config(mixture: Sequence[float], width: int) -> HeadConfig:
    """The head that reads what a mixture of class token, covariance and average has a share of."""
    has_class, has_second, has_average = (share > 0 for share in mixture)
    if not (has_second or has_average):
        return HeadConfig(fusion="class", pre_norm=True)
    fusion = "sum" if has_class else "word"
    if not has_second:
        return HeadConfig(pool="gap", fusion=fusion, pre_norm=True)
    second = {"pool": "gcp", "norm": "svpn", "exponent": EXPONENT, "reduced_dim": width, "average": has_average}
    return HeadConfig.from_dict({**second, "fusion": fusion, "pre_norm": True})


def triangle_lengths(width: int) -> Tensor:
    """By which the upper triangle of a symmetric matrix is multiplied to be as long as the whole."""
    rows, columns = torch.triu_indices(width, width)
    return torch.where(rows == columns, 1.0, 2**0.5)


def lean(shares: tuple[float, float, float], samples: int) -> tuple[float, float, float]:
    """Shares for so many samples: as they vanish, the covariance yields to what is plain beside it."""
    of_class, second, average = shares
    if second == 1:
        return shares
    second *= min(1.0, (samples / FEW) ** 0.5)
    rest = (1 - second) / (of_class + average)
    return of_class * rest, second, average * rest


class Representation:
    """Class token, covariance and average of some samples, from which any mixture is fitted."""

    def __init__(self, features: Features, rows: Array, outputs: int) -> None:
        self.outputs, self.has_class = outputs, features.class_tokens is not None
        self.norm = token_statistics(features, rows)
        self.width = min(WIDTH, features.dim)
        self.projection = whitening(features, self.norm, rows, self.width)
        self.lengths = triangle_lengths(self.width)
        shares = (float(self.has_class), 1.0, 1.0)
        head = whitened_head(mixture_config(shares, self.width), outputs, self.norm, self.projection)
        groups = self._split(representations(head, features, rows))
        groups[-2] = groups[-2] * self.lengths
        self.blocks = Blocks(groups)

    def _split(self, values: Tensor) -> list[Tensor]:
        dim, second = len(self.norm[0]), len(self.lengths)
        return list(torch.split(values, [dim, second, dim] if self.has_class else [second, dim], dim=1))

    def mixtures(self, names: Sequence[str] | None = None) -> dict[str, Sequence[float]]:
        """Those of these names, else all, that the tokens allow."""
        chosen = {name: lean(MIXTURES[name], self.blocks.samples) for name in names or MIXTURES}
        return {
            name: shares[not self.has_class :] for name, shares in chosen.items() if self.has_class or not shares[0]
        }

    def fit(
        self, targets: Tensor, link: str, mixture: str, penalty: float, fold: Tensor | None = None
    ) -> SecondOrderHead:
        """The head of a mixture, with linear layers that are the optimum on all samples, or on those of a fold."""
        shares = self.mixtures()[mixture]
        fitted = torch.ones(self.blocks.samples, dtype=torch.bool) if fold is None else fold
        _, coefficients, bias = solve(self.blocks, shares, targets, fitted[None], [penalty], link)
        linear = self.blocks.linear(shares, coefficients[0, :, 0], bias[0, 0, 0])
        return self._head(*linear, MIXTURES[mixture])

    def _head(self, weight: Tensor, bias: Tensor, shares: tuple[float, ...]) -> SecondOrderHead:
        head = whitened_head(mixture_config(shares, self.width), self.outputs, self.norm, self.projection)
        *of_class, second, average = self._split(weight)
        words = [part for part, share in ((second * self.lengths, shares[1]), (average, shares[2])) if share]
        state = {"word_linear.weight": torch.cat(words, dim=1), "word_linear.bias": bias} if words else {}
        if shares[0]:
            nothing = torch.zeros_like(bias)
            state |= {"class_linear.weight": of_class[0], "class_linear.bias": nothing if words else bias}
        head.load_state_dict(state, strict=False)
        return head.eval()


def fit_second_order(
    features: Features,
    rows: Array,
    targets: Tensor,
    target: Target,
    *,
    adapted: Features | None = None,
    names: Sequence[str] | None = None,
    seed: int = 0,
    search_folds: int | None = None,
) -> FittedHead:
    """The head whose mixture and penalty cross-validation chooses, on `targets (rows, outputs)`.

    `search_folds` is how many folds choose; None is all that are drawn.
    From some hundreds of samples on all of it is trained from there, if what is held out says that this is better.
    What is chosen is fitted to the tokens of the same samples in `adapted`, if given, which choose nothing.
    """
    link = target.link
    representation = Representation(features, rows, targets.shape[1])
    classes = targets.argmax(1).numpy() if link == "softmax" else None
    drawn = draw_folds(classes, len(rows), seed, features.folds_of(rows))
    folds = torch.from_numpy(drawn[:search_folds])
    usual = COMPARED["image" if features.modality == "image" else "text"]
    mixtures, balanced = representation.mixtures(names or usual), target.is_balanced
    chosen = choose(representation.blocks, mixtures, targets, folds, link, balanced=balanced)
    settings = targets, link, chosen.mixture, chosen.penalty
    is_trained = False
    if len(rows) >= TRAIN_FROM and chosen.mixture in MIXED:
        fit, held_out = rows[folds[0].numpy()], rows[~folds[0].numpy()]
        started = representation.fit(*settings, folds[0])
        trained = copy.deepcopy(started)
        train_head(trained, features, fit, target, BUDGET, *TRAINING, seed)
        wanted = targets[~folds[0]]
        outputs = [head_outputs(head, features, held_out, BUDGET.batch_size) for head in (started, trained)]
        is_trained = is_better(outputs[1], outputs[0], wanted, link)
    if adapted is not None:
        features, representation = adapted, Representation(adapted, rows, targets.shape[1])
    head = representation.fit(*settings)
    if is_trained:
        train_head(head, features, rows, target, BUDGET, *TRAINING, seed)
    return FittedHead(head, chosen, is_trained)


def is_better(after: Tensor, before: Tensor, targets: Tensor, link: str) -> bool:
    """Whether logits score higher by a standard error, or no lower with a loss that is smaller by one."""
    gained = hits(after, targets, link) - hits(before, targets, link)
    saved = losses(before, targets, link) - losses(after, targets, link)
    gain = bool(gained.mean() > standard_error(gained))
    return gain or bool(gained.mean() >= 0 and saved.mean() > standard_error(saved))
