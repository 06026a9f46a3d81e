"""Token features on disk: normalised, half precision, memory-mapped, written chunk by chunk.

A cache is a folder with `words.npy` `(tokens of all samples, dim)`, `class.npy` `(samples, dim)`, `labels.npy`, and
`cache.json`: the key, and for every chunk its checksum and the seconds its forward pass took. A chunk is there if its
checksum is, and fits; so an interrupted cache and a damaged one are completed in the same way. What is complete is only
read; to write, a process needs the lock, so that of several that share a cache one computes and the others wait.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from sot.data.images import LEFT_OUT
from sot.errors import SettingError
from sot.files import write_atomically
from sot.lock import only_writer
from sot.models.equip import Equipped
from sot.models.tokens import Tokens
from sot.probe.features import Array, Features, clock
from sot.probe.samples import Samples, encode, key_digest, model_identity

logger = logging.getLogger("sot")
FORMAT = 2  # of the files; 1 had tokens as the backbone gives them
CHUNK = 64  # samples of one forward pass; part of the layout of a cache, so not an option
UNSORTED_CHUNKS = 3  # of texts as they come, to tell what a pass over all of them would take
Progress = Callable[[Sequence[Any], str], Iterable[Any]]  # items and what is done with them, as rich's `track` has it


def silent(items: Sequence[Any], title: str) -> Sequence[Any]:
    """No progress bar."""
    return items


def cache_features(model: Equipped, samples: Samples, folder: Path, progress: Progress = silent) -> Features:
    """The features of all samples, computed as far as they are not in `folder` yet."""
    parts = {"format": FORMAT, "model": model_identity(model), **samples.identity}
    key = json.loads(json.dumps(parts, default=str))
    cache = _Cache(folder / key_digest(key), key, model, samples)
    model.eval()
    if not cache.is_complete():
        with _locked(cache.folder):
            cache.open_to_write()
            for chunk in progress(cache.missing(), f"Tokens of {samples.identity['data']['name']}"):
                cache.compute(chunk)
            cache.time_unsorted()
    features = cache.features()
    left_out = len(features) - len(features.rows)
    if left_out:
        name = samples.identity["data"]["name"]
        logger.warning("%d of %d samples of %s cannot be read and are left out.", left_out, len(features), name)
    return features


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Be the only process that writes to a cache."""
    with ExitStack() as stack:
        try:
            stack.enter_context(only_writer(folder, wait=True))
        except OSError as error:
            said = "the cache {} is not complete and cannot be written ({}): choose another {cache}"
            raise SettingError(said, folder, error.strerror) from error
        yield


class _Cache:
    """The files of one cache while they are filled."""

    arrays: dict[str, Array]
    starts: Array

    def __init__(self, folder: Path, key: dict[str, Any], model: Equipped, samples: Samples) -> None:
        self.folder, self.model, self.samples = folder, model, samples
        chunks = -(-len(samples) // CHUNK)
        self.empty: dict[str, Any] = {
            "key": key,
            "words": None,
            "checksums": [None] * chunks,
            "seconds": [0.0] * chunks,
        }
        self.record = self.empty

    def is_complete(self) -> bool:
        """Whether every chunk is there and undamaged, for which nothing is written."""
        self.record = self._read_record() or self.empty
        return not self.missing() and self._load("r") and not self._damaged()

    def open_to_write(self) -> None:
        """Find what is there, and make files for what is not."""
        self.record = self._read_record() or self.empty  # again: another process may have written it since
        begun = len(self.missing()) < len(self.empty["checksums"])
        if begun and self._load("r+"):
            wrong = self._damaged()
            if wrong:
                logger.warning("%d chunks of the cache %s are damaged: computing them again.", len(wrong), self.folder)
            for chunk in wrong:
                self.record["checksums"][chunk] = None
            return
        if begun or (self.folder / "cache.json").is_file():
            logger.warning("The cache %s is damaged: computing it again.", self.folder)
        self.record = self.empty
        self._create()

    def _read_record(self) -> dict[str, Any] | None:
        """What `cache.json` says, if it says all that it should."""
        try:
            record: dict[str, Any] = json.loads((self.folder / "cache.json").read_bytes())
            whole = record.keys() >= self.empty.keys() and all(
                len(record[name]) == len(self.empty[name]) and all(isinstance(each, kinds) for each in record[name])
                for name, kinds in (("checksums", int | None), ("seconds", int | float))
            )
            timed = isinstance(record.get("unsorted_seconds", 0.0), int | float)
            counted = self.samples.words is not None or (isinstance(record["words"], int) and record["words"] >= 0)
        except (FileNotFoundError, ValueError, TypeError, AttributeError):
            return None
        return record if whole and timed and counted else None

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Of the files; the words of pictures, which all have as many, are counted by the record."""
        words = self.samples.words or [self.record["words"]] * len(self.samples)
        self.starts = np.concatenate([[0], np.cumsum(words, dtype=np.int64)])
        count, dim = len(self.samples), self.model.config.hidden_size
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {"labels": ((count,), np.float64)}
        shapes["words"] = ((int(self.starts[-1]), dim), np.float16)
        if self.model.config.has_class_token:
            shapes["class"] = ((count, dim), np.float16)
        return shapes

    def _load(self, mode: Literal["r", "r+"]) -> bool:
        """Open the files, if they are as they should be."""
        shapes = self._shapes()
        try:
            self.arrays = {name: np.load(self.folder / f"{name}.npy", mmap_mode=mode) for name in shapes}
        except PermissionError:  # no damage, so no reason to begin anew
            raise
        except (OSError, ValueError, EOFError):
            return False
        return all((array.shape, array.dtype) == shapes[name] for name, array in self.arrays.items())

    def _create(self) -> None:
        if self.samples.words is None:
            self.record["words"] = encode(self.model, self.samples.batch([0])).word_tokens.shape[1]
        shapes = self._shapes()
        _check_space(self.folder, sum(int(np.prod(shape)) * np.dtype(kind).itemsize for shape, kind in shapes.values()))
        self.arrays = {
            name: np.lib.format.open_memmap(self.folder / f"{name}.npy", "w+", kind, shape)
            for name, (shape, kind) in shapes.items()
        }

    def _rows(self, chunk: int) -> slice:
        return slice(chunk * CHUNK, min(len(self.samples), (chunk + 1) * CHUNK))

    def _parts(self, chunk: int) -> dict[str, Array]:
        """What a chunk has in each file."""
        rows = self._rows(chunk)
        words = slice(self.starts[rows.start], self.starts[rows.stop])
        return {name: array[words if name == "words" else rows] for name, array in self.arrays.items()}

    def _checksum(self, chunk: int) -> int:
        total = 0
        for _, part in sorted(self._parts(chunk).items()):
            total = zlib.crc32(np.ascontiguousarray(part).view(np.uint8).data, total)
        return total

    def _damaged(self) -> list[int]:
        known = enumerate(self.record["checksums"])
        return [chunk for chunk, checksum in known if checksum is not None and checksum != self._checksum(chunk)]

    def missing(self) -> list[int]:
        """Chunks that are still to be computed."""
        return [chunk for chunk, checksum in enumerate(self.record["checksums"]) if checksum is None]

    def compute(self, chunk: int) -> None:
        """One forward pass, and its result on disk."""
        rows = self._rows(chunk)
        values, self.record["seconds"][chunk] = self._pass(self.samples.batch(range(rows.start, rows.stop)))
        for name, part in self._parts(chunk).items():
            part[:] = values[name]
        for array in self.arrays.values():
            array.flush()  # type: ignore[attr-defined]
        self.record["checksums"][chunk] = self._checksum(chunk)
        self._write_record()

    def _pass(self, batch: dict[str, Tensor]) -> tuple[dict[str, Array], float]:
        began = clock()
        tokens = encode(self.model, batch)
        seconds = clock() - began
        return {**stored_tokens(tokens), "labels": _labels(batch["labels"])}, seconds

    def time_unsorted(self) -> None:
        """What a pass over texts would take if they were not sorted by length, by some batches of them."""
        texts = self.samples.unsorted
        if texts is None or "unsorted_seconds" in self.record:
            return
        chunks = len(self.record["seconds"])
        starts = {CHUNK * (chunks * number // UNSORTED_CHUNKS) for number in range(UNSORTED_CHUNKS)}
        batches = [[texts[row] for row in range(start, min(len(texts), start + CHUNK))] for start in starts]
        seconds = sum(self._pass(dict(self.samples.collate(batch)))[1] for batch in batches)
        self.record["unsorted_seconds"] = seconds * len(texts) / sum(map(len, batches))
        self._write_record()

    def _write_record(self) -> None:
        write_atomically(self.folder / "cache.json", json.dumps(self.record, indent=1))

    def features(self) -> Features:
        """The finished cache, to read."""
        # the array beneath a memory map: a slice of the map itself costs more than what is read of a sentence
        arrays = {name: np.asarray(np.load(self.folder / f"{name}.npy", mmap_mode="r")) for name in self.arrays}
        labels = np.array(arrays["labels"])
        seconds, key = sum(self.record["seconds"]), self.record["key"]
        unsorted = self.record.get("unsorted_seconds")
        parts = arrays.get("class"), arrays["words"], self.starts, labels, seconds, key, unsorted
        return Features(*parts, modality=self.model.config.modality)


def stored_tokens(tokens: Tokens) -> dict[str, Array]:
    """The words of a batch one after the other, and its class tokens, as they are stored."""
    words = tokens.word_tokens.flatten(0, 1) if tokens.mask is None else tokens.word_tokens[tokens.mask]
    values = {"words": _half(words)}
    if tokens.class_token is not None:
        values["class"] = _half(tokens.class_token)
    return values


def _labels(values: Tensor) -> Array:
    unreadable = (values == LEFT_OUT) & (not values.is_floating_point())  # of numbers to predict it is one
    return values.double().masked_fill(unreadable, math.nan).numpy()


def _half(tokens: Tensor) -> Array:
    """After a LayerNorm without weights, as all heads want them; as they are, half precision may not hold them."""
    half = F.layer_norm(tokens.float(), tokens.shape[-1:]).half().cpu()
    if not half.isfinite().all():
        raise ValueError(
            "the backbone's tokens are not finite: its weights are damaged, or overflow in their precision"
        )
    return half.numpy()


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise SettingError(
            "the cache needs {:.1f} GB, {} has {:.1f} GB left: use {cache}", needed / 1e9, folder, free / 1e9
        )
