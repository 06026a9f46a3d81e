"""Scores of predictions; scikit-learn and SciPy do the counting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax
from scipy.stats import pearsonr, spearmanr
from scipy.stats import t as student
from sklearn.metrics import f1_score, matthews_corrcoef

Array = NDArray[Any]


def top_k(logits: Array, labels: Array, k: int) -> float:
    """Share of samples whose class is among the `k` likeliest; ties go to the smaller class number."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    return float((order == labels[:, None]).any(1).mean())


def cross_entropy(logits: Array, labels: Array) -> float:
    """Mean negative log-likelihood."""
    return float(-log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean())


def calibration_error(logits: Array, labels: Array, bins: int = 15) -> float:
    """Expected calibration error: how far confidence and accuracy are apart, over equal bins of confidence."""
    probabilities = np.exp(log_softmax(logits, axis=1))
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    where = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = [abs(confidence[where == b].mean() - right[where == b].mean()) * (where == b).mean() for b in set(where)]
    return float(sum(gaps))


def image_scores(logits: Array, labels: Array) -> dict[str, float]:
    """What `sot evaluate` prints for pictures."""
    return {
        "accuracy": top_k(logits, labels, 1),
        "top5": top_k(logits, labels, 5),
        "loss": cross_entropy(logits, labels),
        "calibration_error": calibration_error(logits, labels),
    }


def _of_classes(score: Callable[[Array, Array], float]) -> Callable[[Array, Array], float]:
    return lambda logits, labels: float(score(labels.astype(int), logits.argmax(1)))


def _correlation(score: Callable[[Array, Array], Any]) -> Callable[[Array, Array], float]:
    """A correlation, 0 where either side is constant: it is not defined there, and scikit-learn has Matthews' as 0."""

    def value(logits: Array, labels: Array) -> float:
        predicted = logits.reshape(-1)
        constant = np.ptp(predicted) == 0 or np.ptp(labels) == 0
        return 0.0 if constant else float(score(predicted, labels).statistic)

    return value


TEXT_SCORES: dict[str, Callable[[Array, Array], float]] = {
    "accuracy": _of_classes(lambda labels, predicted: float((labels == predicted).mean())),
    "mcc": _of_classes(matthews_corrcoef),
    "f1": _of_classes(f1_score),
    "pearson": _correlation(pearsonr),
    "spearman": _correlation(spearmanr),
}


def text_scores(metric: str, logits: Array, labels: Array) -> dict[str, float]:
    """The score of a GLUE task, with the accuracy (or Spearman's correlation) and the loss beside it."""
    if metric not in TEXT_SCORES:
        raise ValueError(f"unknown metric {metric!r}; accepted: {', '.join(TEXT_SCORES)}")
    regression = metric == "pearson"
    names = dict.fromkeys([metric, "spearman" if regression else "accuracy"])
    error = np.square(logits.reshape(-1) - labels).mean() if regression else cross_entropy(logits, labels.astype(int))
    return {name: TEXT_SCORES[name](logits, labels) for name in names} | {"loss": float(error)}


def interval(scores: Sequence[float], confidence: float = 0.95) -> float | None:
    """Half the width of Student's confidence interval of the mean; None of a single score."""
    if len(scores) < 2:
        return None
    spread = float(np.std(scores, ddof=1)) / math.sqrt(len(scores))
    return spread * float(student.ppf((1 + confidence) / 2, len(scores) - 1))
