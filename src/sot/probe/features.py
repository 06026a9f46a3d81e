"""Tokens of a frozen backbone, as heads are trained on them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sot.models.tokens import Tokens

Array = NDArray[Any]


@dataclass(frozen=True)
class Features:
    """Tokens of a set of samples, read from disk as they are asked for.

    `class_tokens` is `(samples, dim)` or None; the words of sample i are `words[starts[i] : starts[i + 1]]`; its label
    is NaN if it could not be read. `seconds` is what the forward passes of the backbone took, without reading samples
    or writing tokens; `unsorted_seconds`, of texts, what they would have taken in the order of the data.
    """

    class_tokens: Array | None
    words: Array
    starts: Array
    labels: Array
    seconds: float = 0.0
    key: Mapping[str, Any] | None = None
    unsorted_seconds: float | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def dim(self) -> int:
        """Width of a token."""
        return int(self.words.shape[1])

    @property
    def mean_words(self) -> int:
        """Words of a sample, on average."""
        return max(1, round(len(self.words) / len(self)))

    @cached_property
    def rows(self) -> Array:
        """The samples that could be read, which are those to train on and to score."""
        return np.flatnonzero(~np.isnan(self.labels))

    @cached_property
    def lengths(self) -> Array:
        """Words of each sample."""
        return np.diff(self.starts)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all samples have as many words, and some: then they are read in one go."""
        return bool(self.lengths[0] > 0 and (self.lengths == self.lengths[0]).all())

    def batch(self, rows: Array, with_words: bool = True) -> Tokens:
        """Tokens of some samples in float32; words of differing number are padded, with a mask."""
        class_token = None if self.class_tokens is None else torch.from_numpy(self.class_tokens[rows]).float()
        if not with_words:
            return Tokens(class_token, torch.empty(len(rows), 0, self.dim))
        if self.is_uniform:
            words = self.words.reshape(len(self), -1, self.dim)[rows]
            return Tokens(class_token, torch.from_numpy(np.asarray(words)).float())
        lengths = self.lengths[rows]
        places = np.arange(max(1, lengths.max()))
        mask = places < lengths[:, None]
        chosen = np.where(mask, self.starts[rows, None] + places, 0)  # padding is some word: it is masked
        words = np.asarray(self.words).take(chosen, 0) if len(self.words) else np.zeros((*chosen.shape, self.dim))
        return Tokens(class_token, torch.from_numpy(words).float(), torch.from_numpy(mask))


def clock() -> float:
    """CPU seconds, which do not grow when others use the machine; seconds by the wall where there is an accelerator."""
    return time.perf_counter() if torch.accelerator.is_available() else time.process_time()
