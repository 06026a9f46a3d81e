"""What `sot.Classifier` is given to read: texts, pairs of texts, pictures, sounds; any list, array or table of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sot.data.images import check_processor, processor_transform
from sot.data.pictures import open_picture, to_rgb
from sot.data.rows import is_unicode
from sot.data.sound_sets import encode_sounds, reading_of
from sot.data.sounds import Waveform, as_sound
from sot.models.equip import Equipped
from sot.models.from_transformers import check_length


@dataclass(frozen=True)
class ModelInputs:
    """Samples as a model reads them one by one; `lengths` sorts them, `keys` tell equal ones."""

    items: Sequence[Any]
    keys: list[str]
    lengths: list[int]
    model: Equipped

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Some of them, padded."""
        chosen = [self.items[row] for row in rows]
        if self.model.config.modality == "text":
            return dict(self.model.processor.pad(chosen, return_tensors="pt"))
        if self.model.config.modality == "audio":
            reading = reading_of(self.model, self.model.processor)
            return encode_sounds(self.model.processor, [reading(as_sound(item, reading.rate)) for item in chosen])
        transform = processor_transform(self.model.processor)
        return {"pixel_values": torch.stack([transform(as_picture(item)) for item in chosen])}


def as_items(given: Any) -> list[Any]:
    """The samples of a list, an array, a column or a table, with pairs as tuples."""
    if isinstance(given, str | bytes | Path | Image.Image) or not hasattr(given, "__len__"):
        raise ValueError(f"X is a list of samples, got one {type(given).__name__}: put it into a list")
    values = given.to_numpy() if hasattr(given, "to_numpy") else given
    if isinstance(values, np.ndarray):
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.dtype.kind in "OU" and values.ndim == 2:
            return [tuple(row) for row in values.tolist()]
        return values.tolist() if values.dtype.kind in "OU" and values.ndim == 1 else list(values)
    return list(values)


def read_inputs(model: Equipped, given: Any, max_length: int) -> ModelInputs:
    """What a model reads of the samples, or ValueError for the first that it cannot."""
    items = as_items(given)
    if not items:
        raise ValueError("X is empty: at least one sample is needed")
    if model.config.modality == "text":
        return _texts(model, items, max_length)
    return _sounds(model, items) if model.config.modality == "audio" else _pictures(model, items)


# --- texts -------------------------------------------------------------------------------------------------


def _texts(model: Equipped, items: list[Any], max_length: int) -> ModelInputs:
    pairs = [item for item in items if isinstance(item, tuple | list)]
    if pairs and len(pairs) < len(items):
        raise ValueError(
            f"X has {len(pairs)} pairs among {len(items)} samples: give pairs for all of them, or for none"
        )
    for row, item in enumerate(items):
        _check_text(row, item)
    check_length(model, max_length, bool(pairs))
    columns = [list(column) for column in zip(*items)] if pairs else [list(map(str, items))]
    encoded = model.processor(*columns, truncation=True, max_length=max_length)
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded]
    rows = [{name: encoded[name][row] for name in names} for row in range(len(items))]
    keys = [_digest(json.dumps([row["input_ids"], row.get("token_type_ids")]).encode()) for row in rows]
    return ModelInputs(rows, keys, [len(row["input_ids"]) for row in rows], model)


def _check_text(row: int, item: Any) -> None:
    parts = item if isinstance(item, tuple | list) else (item,)
    if len(parts) > 2 or not parts or not all(isinstance(part, str) for part in parts):
        shown = type(item).__name__ if not isinstance(item, tuple | list) else f"{len(parts)} things"
        raise ValueError(f"X[{row}] must be a text or a pair of texts, got {shown}")
    if not all(map(is_unicode, parts)):
        raise ValueError(f"X[{row}] is not valid Unicode: {item!r}")


# --- pictures ----------------------------------------------------------------------------------------------


def _pictures(model: Equipped, items: list[Any]) -> ModelInputs:
    if model.processor is None:
        raise ValueError("the model has no image processor beside it")
    check_processor(model.processor, "the model")
    keys = [_picture_key(row, item) for row, item in enumerate(items)]
    return ModelInputs(items, keys, [0] * len(items), model)


def _picture_key(row: int, item: Any) -> str:
    """What tells a picture from others: a file by name, size and time, another by its pixels."""
    if isinstance(item, str | Path):
        return _file_key(row, Path(item), "picture")
    try:
        picture = as_picture(item)
    except (ValueError, TypeError) as error:
        raise ValueError(f"X[{row}]: {error}") from error
    return _digest(str(picture.size).encode() + picture.tobytes())


def _file_key(row: int, file: Path, noun: str) -> str:
    if not file.is_file():
        raise FileNotFoundError(f"X[{row}]: no such {noun}: {file}")
    stat = file.stat()
    return _digest(f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode())


def as_picture(item: Any) -> Image.Image:
    """In RGB, of a file, of Pillow or of an array `(height, width)` or `(height, width, 3)` of bytes."""
    if isinstance(item, str | Path):
        return open_picture(item)
    if isinstance(item, Image.Image):
        return to_rgb(item)
    array = np.asarray(item)
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        kind = f"{array.dtype} of shape {array.shape}" if array.dtype != object else type(item).__name__
        raise ValueError(f"an image is a file, of Pillow, or an array of uint8 (height, width, 3), got {kind}")
    return to_rgb(Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array))


# --- sounds ------------------------------------------------------------------------------------------------


def _sounds(model: Equipped, items: list[Any]) -> ModelInputs:
    reading = reading_of(model, model.processor)
    keys, lengths = [], []
    for row, item in enumerate(items):
        try:
            sound = as_sound(item, reading.rate)
            keys.append(_digest(sound.tobytes()) if isinstance(sound, Waveform) else _file_key(row, sound, "sound"))
            lengths.append(len(reading(sound)))  # like lengths share a batch
        except (ValueError, TypeError) as error:
            raise ValueError(f"X[{row}]: {error}") from error
    return ModelInputs(items, keys, lengths, model)


def _digest(value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=16).hexdigest()
