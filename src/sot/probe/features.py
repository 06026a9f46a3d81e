"""Tokens of a frozen backbone, as heads are trained on them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sot.core.packed import Packed
from sot.ops.half_rows import scaled_rows

Array = NDArray[Any]


class Batch(NamedTuple):
    """The class tokens `(samples, dim)`, if there are any, and the words of some samples, as heads take both."""

    class_token: Tensor | None
    words: Packed | None


@dataclass(frozen=True)
class Features:
    """Tokens of a set of samples after a LayerNorm without weights, read from disk as they are asked for.

    `class_tokens` is `(samples, dim)` or None; the words of sample i are `words[starts[i] : starts[i + 1]]`; its label
    is NaN if it could not be read. `seconds` is what the forward passes of the backbone took, without reading samples
    or writing tokens; `unsorted_seconds`, of texts, what they would have taken in the order of the data. `folds` are
    those that the data names, one a sample.
    """

    class_tokens: Array | None
    words: Array
    starts: Array
    labels: Array
    seconds: float = 0.0
    key: Mapping[str, Any] | None = None
    unsorted_seconds: float | None = None
    folds: Array | None = None
    modality: str = "text"

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
        return np.flatnonzero(~np.isnan(self.labels).reshape(len(self), -1).any(1))

    @cached_property
    def lengths(self) -> Array:
        """Words of each sample."""
        return np.diff(self.starts)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all samples have as many words, and some."""
        return bool(self.lengths[0] > 0 and (self.lengths == self.lengths[0]).all())

    def folds_of(self, rows: Array) -> Array | None:
        """The folds of some samples, if the data names any."""
        return None if self.folds is None else self.folds[rows]

    def batch(self, rows: Array, norm: nn.LayerNorm | None = None, with_words: bool = True) -> Batch:
        """Tokens of some samples in float32, with the weight and bias of a LayerNorm if there is one."""
        class_token = None if self.class_tokens is None else _read_rows(self.class_tokens, rows, rows + 1, norm)
        if not with_words:
            return Batch(class_token, None)
        begins, ends = self.starts[rows], self.starts[rows + 1]
        starts = np.concatenate([[0], np.cumsum(ends - begins)])
        return Batch(class_token, Packed(_read_rows(self.words, begins, ends, norm), torch.from_numpy(starts)))


def _read_rows(source: Array, begins: Array, ends: Array, norm: nn.LayerNorm | None) -> Tensor:
    """Rows `begins[i]` to before `ends[i]`, for all i."""
    return scaled_rows(source, begins, ends, *((None, None) if norm is None else (norm.weight, norm.bias)))


def clock() -> float:
    """CPU seconds, which do not grow when others use the machine; seconds by the wall where there is an accelerator."""
    return time.perf_counter() if torch.accelerator.is_available() else time.process_time()
