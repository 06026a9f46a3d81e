"""How samples are divided: by the seed, and of each class as large a share as of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Split:
    """How data that comes in one piece is divided.

    Args:
        seed: Of the order in which samples are drawn.
        val_share: Share to validate on; 1 leaves none to train on.
        stratified: Whether each class is divided like all; the first runs were not.
        fold: Number from 0, and how many there are: validate on this part of the data instead of a share.
    """

    seed: int = 0
    val_share: float = 0.2
    stratified: bool = False
    fold: tuple[int, int] | None = None

    def divide(self, labels: Sequence[Hashable]) -> tuple[list[int], list[int]]:
        """Numbers of the samples to train on and of those to validate on."""
        if self.fold is not None:
            number, folds = self.fold
            ordered = ordered_by_label(labels, np.random.default_rng(self.seed)).tolist()
            return _apart(labels, ordered[number::folds])
        if not self.stratified or self.val_share >= 1:
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed)).tolist()
            count = max(1, round(len(order) * self.val_share))
            if count >= len(order) and self.val_share < 1:
                raise ValueError(f"too few samples to split into training and validation: {len(order)}")
            return order[count:], order[:count]
        counts = Counter(labels)
        several = [index for index, label in enumerate(labels) if counts[label] > 1]  # a lone one is to train on
        wanted = max(1, round(len(labels) * self.val_share))
        _, held = stratified([labels[index] for index in several], wanted / max(1, len(several)), self.seed)
        return _apart(labels, [several[index] for index in held])


def _apart(labels: Sequence[Any], held: Sequence[int]) -> tuple[list[int], list[int]]:
    if not 0 < len(held) < len(labels):
        raise ValueError(f"too few samples to split into training and validation: {len(labels)}")
    return sorted(set(range(len(labels))) - set(held)), sorted(held)


def stratified(labels: Sequence[Any], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the samples to keep and of those to hold out: of every class about `share`, drawn by the seed.

    Numbers to regress are held out evenly over their range.
    """
    count = len(labels)
    wanted = max(1, round(count * share))
    if wanted >= count:
        raise ValueError(f"too few samples to hold out a share of {share}: {count}")
    random = np.random.default_rng(seed)
    ordered = ordered_by_label(labels, random)
    held = ordered[np.floor((np.arange(wanted) + random.random()) * count / wanted).astype(int)]
    return _apart(labels, held.tolist())


def ordered_by_label(labels: Sequence[Any], random: np.random.Generator) -> Any:
    """Numbers of the samples in the order of their labels, shuffled within each."""
    ranks = {label: rank for rank, label in enumerate(sorted(set(labels)))}
    shuffled = random.permutation(len(labels))
    return shuffled[np.argsort(np.array([ranks[label] for label in labels])[shuffled], kind="stable")]
