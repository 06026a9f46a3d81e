"""Tokens of single samples, kept in memory or in a folder, so that fits of the same samples compute them once."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sot.files import write_atomically
from sot.models.equip import Equipped
from sot.probe.cache import CHUNK, FORMAT, Progress, silent, stored_tokens
from sot.probe.features import Array, Features, clock
from sot.probe.inputs import ModelInputs
from sot.probe.samples import encode, key_digest, model_identity, transform_identity

logger = logging.getLogger("sot")
MEMORY = 2 * 1024**3  # bytes of tokens that are kept in memory at most


class Sample(NamedTuple):
    """Class token `(dim,)`, if there is one, and words `(words, dim)` of one sample, in half precision."""

    class_token: Array | None
    words: Array


_kept: OrderedDict[str, Sample] = OrderedDict()


class TokenStore:
    """Tokens of the samples that one backbone has read; `folder` None keeps them in memory, False nowhere."""

    def __init__(self, model: Equipped, folder: Path | bool | None) -> None:
        self.model, self.found = model, dict[str, Sample]()
        self.in_memory, self.folder = folder is None, None
        if folder is False:
            return
        transform = transform_identity(model)
        self.name = key_digest({"format": FORMAT, "model": model_identity(model), "transform": transform})
        if isinstance(folder, Path):
            self.folder = folder / self.name
            self._read()

    def features(self, inputs: ModelInputs, labels: Array, progress: Progress = silent) -> Features:
        """Tokens of all inputs, in their order; those that are not there yet are computed."""
        missing = list(dict.fromkeys(key for key in inputs.keys if self._get(key) is None))
        seconds = self._compute(inputs, missing, progress) if missing else 0.0
        samples = [self._get(key) for key in inputs.keys]
        whole = [sample for sample in samples if sample is not None]
        starts = np.concatenate([[0], np.cumsum([len(sample.words) for sample in whole])])
        classes = [sample.class_token for sample in whole if sample.class_token is not None]
        words = np.concatenate([sample.words for sample in whole])
        self._forget()
        found = np.stack(classes) if classes else None, words, starts, labels, seconds
        return Features(*found, modality=self.model.config.modality)

    def _get(self, key: str) -> Sample | None:
        found = self.found.get(key)
        return _kept.get(f"{self.name}/{key}") if found is None and self.in_memory else found

    def _compute(self, inputs: ModelInputs, missing: Iterable[str], progress: Progress) -> float:
        """Forward passes over what is missing, like lengths together; returns what they took by `clock`."""
        rows = dict(zip(reversed(inputs.keys), reversed(range(len(inputs)))))  # the first of equal ones
        order = sorted((rows[key] for key in missing), key=inputs.lengths.__getitem__)
        chunks, seconds = [order[start : start + CHUNK] for start in range(0, len(order), CHUNK)], 0.0
        for chunk in progress(chunks, "Computing tokens"):
            batch = inputs.batch(chunk)
            began = clock()
            tokens = encode(self.model, batch)
            seconds += clock() - began
            counts = [tokens.word_tokens.shape[1]] * len(chunk) if tokens.mask is None else tokens.mask.sum(1).tolist()
            self._add([inputs.keys[row] for row in chunk], stored_tokens(tokens), counts)
        return seconds

    def _add(self, keys: Sequence[str], values: dict[str, Array], counts: Sequence[int]) -> None:
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.found |= _samples(keys, values, starts)
        if self.folder is not None:
            data = save({**values, "starts": starts}, {"keys": json.dumps(list(keys))})
            name = hashlib.blake2b("".join(keys).encode(), digest_size=8).hexdigest()
            write_atomically(self.folder / f"{name}.safetensors", data)

    def _read(self) -> None:
        """What earlier fits, also of other processes, have left in the folder."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(file, "numpy") as opened:
                    names = opened.keys()
                    values = {name: opened.get_tensor(name) for name in names}
                    keys = json.loads(opened.metadata()["keys"])
                self.found |= _samples(keys, values, values.pop("starts"))
            except (SafetensorError, OSError, ValueError, KeyError, TypeError):
                logger.warning("%s is damaged: its tokens are computed again.", file)

    def _forget(self) -> None:
        """Of what is kept in memory the oldest, where there is too much of it."""
        if not self.in_memory:
            return
        _kept.update({f"{self.name}/{key}": sample for key, sample in self.found.items()})
        self.found = {}
        total = sum(sample.words.nbytes for sample in _kept.values())
        while total > MEMORY:
            total -= _kept.popitem(last=False)[1].words.nbytes


def _samples(keys: Sequence[str], values: dict[str, Array], starts: Array) -> dict[str, Sample]:
    classes, words = values.get("class"), values["words"]
    if len(starts) != len(keys) + 1 or starts[-1] != len(words):
        raise ValueError("the tokens are not those of these samples")
    parts = (words[first:last] for first, last in pairwise(starts))
    return {
        key: Sample(None if classes is None else classes[row], part) for row, (key, part) in enumerate(zip(keys, parts))
    }
