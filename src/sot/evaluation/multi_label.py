"""Scores and thresholds where a sample may have several classes, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import expit
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve

from sot.evaluation.metrics import Array

HALF = 0.5


def chosen(logits: Array, thresholds: Sequence[float] | None = None) -> Array:
    """Which classes each sample is said to have: those whose probability reaches the threshold, by default a half."""
    return expit(logits.astype(np.float64)) >= np.asarray(HALF if thresholds is None else thresholds)


def multi_label_scores(logits: Array, labels: Array, thresholds: Sequence[float] | None = None) -> dict[str, float]:
    """F1 averaged over classes and over all decisions, mean average precision, exact sets, and the loss.

    The mean average precision is of the classes that occur, and needs no threshold.
    """
    truth, said = labels > HALF, chosen(logits, thresholds)
    occurs = truth.any(0)
    precisions = [average_precision_score(truth[:, c], logits[:, c]) for c in np.flatnonzero(occurs)]
    return {
        "macro_f1": float(f1_score(truth, said, average="macro", zero_division=0)),
        "micro_f1": float(f1_score(truth, said, average="micro", zero_division=0)),
        "map": float(np.mean(precisions)) if precisions else 0.0,
        "subset_accuracy": float((truth == said).all(1).mean()),
        "loss": float(np.mean(np.logaddexp(0, logits) - labels * logits)),
    }


def class_scores(config: Any, logits: Array, labels: Array) -> dict[str, dict[str, float]]:
    """Samples, precision, recall and F1 of every class; nothing for numbers to predict."""
    if config.num_labels == 1:
        return {}
    if labels.ndim == 1:
        logits, labels = logits[labels >= 0], labels[labels >= 0].astype(int)  # without what could not be read
        every = np.eye(config.num_labels, dtype=bool)
        truth, said = every[labels], every[logits.argmax(1)]
    else:
        there = labels[:, 0] >= 0
        truth, said = labels[there] > HALF, chosen(logits[there], config.thresholds)
    counts = zip(truth.sum(0).tolist(), said.sum(0).tolist(), (truth & said).sum(0).tolist())
    return {
        str(config.id2label[number]): {
            "samples": samples,
            "precision": right / max(1, predicted),
            "recall": right / max(1, samples),
            "f1": 2 * right / max(1, samples + predicted),
        }
        for number, (samples, predicted, right) in enumerate(counts)
    }


def best_thresholds(logits: Array, labels: Array) -> list[float]:
    """For each class the threshold of its probability with the largest F1; a half for a class that never occurs.

    It lies between two probabilities, so that rounding of one does not matter; of equals the one nearest to a half.
    """
    return [
        _best_threshold(expit(logits[:, c].astype(np.float64)), labels[:, c] > HALF) for c in range(labels.shape[1])
    ]


def _best_threshold(scores: Array, truth: Array) -> float:
    if not truth.any():
        return HALF
    precision, recall, places = precision_recall_curve(truth, scores)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    below = np.concatenate([[0.0], places[:-1]])
    middle = (places + below) / 2
    best = np.flatnonzero(f1[:-1] >= f1[:-1].max() - 1e-12)
    return float(min(middle[best], key=lambda place: abs(place - HALF)))


class MultiLabelMetrics:
    """Scores of an evaluation for Trainer; with `tune` the model's thresholds are chosen by it first."""

    def __init__(self, config: Any, tune: bool) -> None:
        self.config, self.tune = config, tune
        config.thresholds = None

    def __call__(self, prediction: Any) -> dict[str, float]:
        logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
        there = labels[:, 0] >= 0  # images that could not be read have no label
        logits, labels = logits[there], labels[there]
        if self.tune:
            self.config.thresholds = [round(place, 4) for place in best_thresholds(logits, labels)]
        return multi_label_scores(logits, labels, self.config.thresholds)
