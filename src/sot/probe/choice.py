"""Choosing a mixture of features and a penalty by cross-validation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.model_selection import KFold, StratifiedKFold
from torch import Tensor

from sot.probe.convex import Blocks, losses, solve
from sot.probe.features import Array

PENALTIES = (1e-1, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)
OF_MANY = slice(2, 6)  # those that many samples may want
SMALLER, SMALLER_FROM = (
    (3e-5, 1e-5),
    500,
)  # tried from so many samples on if the smallest is the best, as of many classes
FOLDS = 5
ROUNDS = ((100, 4), (500, 2))  # below so many samples, the folds are drawn so many times
ONE_FOLD = 2000  # from so many on, one of the folds tells enough
FEW = 64  # samples: with fewer, scores are so coarse that losses tell more
ERRORS, ERRORS_OF_FEW = 1.5, 2.0  # standard errors by which another mixture has to be better than the usual one
ROUGH = 1e-2  # how exactly the problems are solved that are only compared


@dataclass(frozen=True)
class Chosen:
    """A mixture by name and a penalty, with their score and loss on what was held out; `settings` were compared."""

    mixture: str
    penalty: float
    score: float
    loss: float
    settings: int


def draw_folds(classes: Array | None, count: int, seed: int = 0, groups: Array | None = None) -> Array:
    """`(folds, samples)`, True for what is fitted: stratified, and drawn several times where there are few.

    Where samples come in `groups`, each of these is a fold.
    """
    if count < 2:
        raise ValueError(f"{count} training samples are too few to hold out some of them")
    if groups is not None and (groups != groups[0]).any():
        return np.stack([groups != each for each in np.unique(groups)][: 1 if count >= ONE_FOLD else None])
    rounds = 1 if count >= ONE_FOLD else next((rounds for below, rounds in ROUNDS if count < below), 1)
    most = count if classes is None else int(np.bincount(classes.astype(int)).max())
    splits = max(2, min(FOLDS, count, most))
    folds = []
    for number in range(rounds):
        kind = KFold if classes is None or most < 2 else StratifiedKFold
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes with fewer samples than folds
            parts = kind(splits, shuffle=True, random_state=seed + number).split(np.zeros(count), classes)
            folds += [np.isin(np.arange(count), fitted) for fitted, _ in parts]
    return np.stack(folds[:1] if count >= ONE_FOLD else folds)


def hits(logits: Tensor, targets: Tensor, link: str) -> Tensor:
    """Of each sample, whether its class is the likeliest, or the share of its labels that are right."""
    if link == "softmax":
        return (logits.argmax(-1) == targets.argmax(-1)).float()
    if link == "sigmoid":
        return ((logits > 0) == (targets > 0.5)).float().mean(-1)
    return -losses(logits, targets, link)


def held_out_means(values: Tensor, folds: Tensor) -> Tensor:
    """`(..., folds, samples)` to `(..., samples held out)`: the mean over the folds that each was held out of."""
    times = (~folds).sum(0)
    total = (values * ~folds).sum(-2)[..., times > 0]
    return total / times[times > 0]


def choose(
    blocks: Blocks,
    mixtures: Mapping[str, Sequence[float]],
    targets: Tensor,
    folds: Tensor,
    link: str,
    penalties: Sequence[float] = PENALTIES,
    balanced: bool = False,
) -> Chosen:
    """The first mixture, unless another is better by 1.5 standard errors of scores, or of few samples 2 of losses.

    Of its penalties that score within one standard error of the best, that of the smallest loss. If `balanced`, classes
    count alike in the score. With one fold, of many samples, there are fewer penalties: the first mixture tries them,
    and the others its best and those beside it. Where the smallest is the best of many, smaller ones are tried.
    """
    if len(folds) == 1 and len(penalties) > OF_MANY.stop:
        penalties = penalties[OF_MANY]
    settings, outputs = [], []
    count = 0
    for name, mixture in mixtures.items():
        tried, logits, best = list(penalties), targets.new_zeros(0, len(folds), *targets.shape), 0
        while len(logits) < len(tried):
            found, _, _ = solve(blocks, mixture, targets, folds, tried[len(logits) :], link, ROUGH)
            logits = torch.cat([logits, found])
            best = within_one_error(logits, targets, folds, link, balanced)
            if tried[best] == tried[-1] and blocks.samples >= SMALLER_FROM:
                tried += [smaller for smaller in SMALLER if smaller < tried[-1]][:1]
        settings.append((name, tried[best]))
        outputs.append(logits[best])
        count += len(tried)
        if len(folds) == 1 and len(settings) == 1:
            penalties = tried[max(0, best - 1) : best + 2]
    chosen = told_apart(torch.stack(outputs), targets, folds, link, balanced)
    score, loss = (float(held_out_means(of(outputs[chosen], targets, link), folds).mean()) for of in (hits, losses))
    return Chosen(*settings[chosen], score, loss, count)


def held_out_scores(
    outputs: Tensor, targets: Tensor, folds: Tensor, link: str, balanced: bool
) -> tuple[Tensor, Tensor]:
    """Scores `(settings, samples)` and mean losses `(settings,)` of `outputs (settings, folds, samples, logits)`."""
    frequency = targets.mean(0).clamp_min(1e-6) * targets.shape[1]
    worth = (targets / frequency).sum(1) if balanced else targets.new_ones(len(targets))
    lost = held_out_means(losses(outputs, targets, link), folds).mean(1).nan_to_num(math.inf)
    scores = held_out_means(worth * hits(outputs, targets, link), folds)
    return torch.where(lost.isfinite()[:, None], scores, -math.inf), lost  # what diverged is not chosen


def within_one_error(outputs: Tensor, targets: Tensor, folds: Tensor, link: str, balanced: bool) -> int:
    """Which setting: near the best score, and of these of the smallest loss."""
    scores, lost = held_out_scores(outputs, targets, folds, link, balanced)
    best = int((scores.mean(1) - 1e-3 * lost.clamp_max(1e6)).argmax())
    near = scores.mean(1) >= scores[best].mean() - standard_error(scores - scores[best]).nan_to_num(0.0)
    return int(torch.where(near, lost, math.inf).argmin())


def told_apart(outputs: Tensor, targets: Tensor, folds: Tensor, link: str, balanced: bool) -> int:
    """Which setting: the first, or the best of those that are better than it by that many standard errors."""
    scores, _ = held_out_scores(outputs, targets, folds, link, balanced)
    errors = ERRORS
    if len(targets) < FEW:
        scores, errors = -held_out_means(losses(outputs, targets, link), folds), ERRORS_OF_FEW
    gained = scores - scores[0]
    is_told = gained.mean(1) > errors * standard_error(gained)
    return int(torch.where(is_told, gained.mean(1), 0.0).argmax()) if is_told.any() else 0


def standard_error(differences: Tensor) -> Tensor:
    """Of the mean of each row."""
    return differences.std(-1, correction=0) / math.sqrt(differences.shape[-1])
