"""Scores of predictions; scikit-learn and SciPy do the counting."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
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


def top_scores(logits: Array, labels: Array) -> dict[str, float]:
    """Accuracy, and that among the five likeliest where there are more than five classes."""
    counts = {"accuracy": 1, "top5": 5} if logits.shape[1] > 5 else {"accuracy": 1}
    return {name: top_k(logits, labels, count) for name, count in counts.items()}


def cross_entropy(logits: Array, labels: Array) -> float:
    """Mean negative log-likelihood."""
    return float(-log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean())


def calibration_error(logits: Array, labels: Array, bins: int = 15) -> float:
    """Expected calibration error: how far confidence and accuracy are apart, over equal bins of confidence."""
    probabilities = np.exp(log_softmax(logits, axis=1))
    if not np.isfinite(probabilities).all():
        return math.nan
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    where = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = [abs(confidence[where == b].mean() - right[where == b].mean()) * (where == b).mean() for b in set(where)]
    return float(sum(gaps))


def image_scores(logits: Array, labels: Array) -> dict[str, float]:
    """What training and `sot evaluate` tell of images; top-5 where there are more classes than that."""
    return {
        **top_scores(logits, labels),
        "macro_f1": TEXT_SCORES["macro_f1"](logits, labels),
        "mcc": TEXT_SCORES["mcc"](logits, labels),
        "loss": cross_entropy(logits, labels),
        "calibration_error": calibration_error(logits, labels),
    }


def _of_classes(score: Callable[[Array, Array], float]) -> Callable[[Array, Array], float]:
    def value(logits: Array, labels: Array) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scikit-learn's, of samples that are all of one class
            return float(score(labels.astype(int), logits.argmax(1)))

    return value


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
    "macro_f1": _of_classes(partial(f1_score, average="macro", zero_division=0)),
    "pearson": _correlation(pearsonr),
    "spearman": _correlation(spearmanr),
}


def text_scores(metric: str, logits: Array, labels: Array) -> dict[str, float]:
    """The score of a task first, with what else tells of classes, or Spearman's correlation, and the loss."""
    if metric not in TEXT_SCORES:
        raise ValueError(f"unknown metric {metric!r}; accepted: {', '.join(TEXT_SCORES)}")
    if metric == "pearson":
        error = float(np.square(logits.reshape(-1) - labels).mean())
        return {name: TEXT_SCORES[name](logits, labels) for name in ("pearson", "spearman")} | {"loss": error}
    labels = labels.astype(int)
    names = dict.fromkeys([metric, "accuracy", "macro_f1", "mcc"])
    losses = {"loss": cross_entropy(logits, labels), "calibration_error": calibration_error(logits, labels)}
    return {name: TEXT_SCORES[name](logits, labels) for name in names} | losses


def interval(scores: Sequence[float], confidence: float = 0.95) -> float | None:
    """Half the width of Student's confidence interval of the mean; None of a single score."""
    if len(scores) < 2:
        return None
    spread = float(np.std(scores, ddof=1)) / math.sqrt(len(scores))
    return spread * float(student.ppf((1 + confidence) / 2, len(scores) - 1))
