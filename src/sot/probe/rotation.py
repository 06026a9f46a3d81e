"""Folds that the data names: each is scored once, by heads that were fitted on the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sot.probe.features import Features
from sot.probe.outcome import Result


def rotated(features: Features, folds: Sequence[str]) -> list[tuple[Features, Features]]:
    """What to fit and what to score, for every fold; samples that do not take part have no label.

    Settings are chosen by folds too: clips of one recording stay together.
    """
    names, found = np.asarray(folds), []
    for name in dict.fromkeys(sorted(folds)):
        parts = []
        for part, taken in (("fitted", names != name), ("scored", names == name)):
            key = {**(features.key or {}), "fold": name, "part": part, "chosen": "by folds"}
            labels = np.where(taken.reshape(-1, *[1] * (features.labels.ndim - 1)), features.labels, np.nan)
            seconds = features.seconds * float(taken.mean())
            parts.append(replace(features, labels=labels, key=key, seconds=seconds, folds=names))
        found.append((parts[0], parts[1]))
    return found


def over_folds(results: Sequence[Sequence[Result]]) -> list[Result]:
    """One result a head: its score on each fold, and what it costs on average; settings are those of the last."""
    if len(results) == 1:
        return [*results[0]]
    merged = []
    for of_head in zip(*results):
        held_out = [each.held_out for each in of_head if each.held_out is not None]
        merged.append(
            replace(
                of_head[-1],
                scores=[each.mean for each in of_head],
                seconds=float(np.mean([each.seconds for each in of_head])),
                held_out=float(np.mean(held_out)) if held_out else None,
            )
        )
    return merged
