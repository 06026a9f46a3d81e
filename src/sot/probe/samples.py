"""What a frozen backbone reads, in the order of the cache, and what tells one such set from another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset
from transformers import DataCollatorWithPadding

from sot.data.images import EvaluationSet, check_processor, processor_transform, stack
from sot.data.sound_sets import EvaluationSounds, SoundCollate, reading_of
from sot.data.sounds import Waveform
from sot.data.sources import Stream, file_name
from sot.data.texts import TextSplit
from sot.models.audio import clip_seconds, word_count
from sot.models.equip import Equipped
from sot.models.from_transformers import check_length
from sot.models.modeling import SoTForImageClassification, SoTForSequenceClassification
from sot.models.tokens import Tokens
from sot.training.train_texts import TextSet

PICTURES_TO_COMPARE = 64  # of a set that is not made of files


@dataclass(frozen=True)
class Samples:
    """Samples for a backbone; `words` is how many word tokens each has, None where all have as many.

    `unsorted` has them in the order in which they came, if that is another.
    """

    data: Any
    collate: Callable[[list[Any]], Any]
    words: list[int] | None
    identity: dict[str, Any]
    unsorted: Any = None

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, rows: Iterable[int]) -> dict[str, Tensor]:
        """Some samples as the model reads them, with `labels`."""
        return dict(self.collate([self.data[row] for row in rows]))


def image_samples(model: SoTForImageClassification, source: Any, name: str, labels: list[Any] | None = None) -> Samples:
    """Pictures through the image processor that is saved with the model."""
    if isinstance(source, Stream):
        raise ValueError(f"{name} is a stream: probing resumes where it was, so it needs data that can be indexed")
    if model.processor is None:
        raise ValueError("the model has no image processor beside it")
    _check_any(source, name)
    check_processor(model.processor, "the model")
    data = {"name": name, "samples": len(source), "digest": picture_digest(source)}
    if labels is not None:
        data["labels"] = key_digest({"labels": labels})
    return Samples(
        EvaluationSet(source, processor_transform(model.processor)),
        stack,
        None,
        {"data": data, "transform": model.processor.to_dict()},
    )


def sound_samples(model: Any, source: Any, name: str) -> Samples:
    """Sounds through the feature extractor that is saved with the model, each as often decoded as counted."""
    reading, processor = reading_of(model, model.processor), model.processor
    _check_any(source, name)
    sounds = EvaluationSounds(source, reading)
    words = [word_count(model, len(sounds[row]["samples"])) for row in range(len(sounds))]
    data = {"name": name, "samples": len(source), "digest": sound_digest(source)}
    known = None if None in words else [count or 0 for count in words]
    transform = transform_identity(model)
    return Samples(sounds, SoundCollate(processor), known, {"data": data, "transform": transform})


def transform_identity(model: Equipped) -> dict[str, Any] | None:
    """What becomes of a picture or sound before a model reads it; of texts their tokens say it."""
    if model.config.modality == "text":
        return None
    settings: dict[str, Any] = model.processor.to_dict()
    if model.config.modality == "audio":
        settings |= {"seconds": clip_seconds(model.config, model.processor)}
    return {name: value for name, value in settings.items() if name not in ("mel_filters", "window")}


def text_samples(
    model: SoTForSequenceClassification, split: TextSplit, name: str, max_length: int, regression: bool
) -> Samples:
    """Texts sorted by length, so that little is padded."""
    if model.processor is None:
        raise ValueError("the model has no tokenizer beside it")
    _check_any(split, name)
    if regression and len(split) < 2:
        raise ValueError(f"{name} has one sample, and a correlation needs at least two")
    check_length(model, max_length, split.pairs is not None)
    texts = TextSet(split, model.processor, max_length, regression)
    lengths = [len(ids) for ids in texts.encoded["input_ids"]]
    order = sorted(range(len(texts)), key=lengths.__getitem__)
    digest = _digest(json.dumps(texts[row]).encode() for row in order)
    data = {"name": name, "samples": len(texts), "digest": digest}
    transform = {"tokenizer": type(model.processor).__name__, "max_length": max_length}
    words = [max(0, lengths[row] - 1) for row in order]  # one token is the class token
    if not any(words):
        raise ValueError(f"the texts of {name} have one token each: there are no words to pool")
    collate = DataCollatorWithPadding(model.processor)
    return Samples(Subset(texts, order), collate, words, {"data": data, "transform": transform}, texts)


def _check_any(source: Any, name: str) -> None:
    if len(source) == 0:
        raise ValueError(f"{name} is empty: there is nothing to probe on")


@torch.inference_mode()
def encode(model: Equipped, batch: dict[str, Tensor]) -> Tokens:
    """Tokens of a batch, as the model's own head would get them."""
    inputs: dict[str, Any] = {key: value.to(model.device) for key, value in batch.items() if key != "labels"}
    return model.tokens(**inputs)


def picture_digest(source: Any) -> str:
    """Files by name, size and time; what is no file by the pixels of some pictures, and by the .tar it is in."""
    files, archive = [Path(file_name(source, index)) for index in range(len(source))], _archive(source)
    if not archive and all(file.is_file() for file in files):
        return _digest(map(_file_state, files))
    rows = np.linspace(0, len(source) - 1, min(len(source), PICTURES_TO_COMPARE)).astype(int)
    pictures = (source[int(row)] for row in rows)
    parts = [*(str(file).encode() for file in files), *(p.tobytes() + bytes([n % 256]) for p, n in pictures)]
    return _digest([*parts, *map(_file_state, archive)])


def sound_digest(source: Any) -> str:
    """Files by name, size and time, other sounds by their samples, and the labels, which a table may change."""
    sounds = (source[row] for row in range(len(source)))
    return _digest(
        (sound.tobytes() if isinstance(sound, Waveform) else _file_state(Path(sound))) + f"|{label}".encode()
        for sound, label in sounds
    )


def _file_state(file: Path) -> bytes:
    if not file.exists():
        return f"{file}|missing".encode()
    stat = file.stat()
    return f"{file}|{stat.st_size}|{stat.st_mtime_ns}".encode()


def _archive(source: Any) -> list[Path]:
    """The .tar file that pictures are read from, if they are."""
    while hasattr(source, "source"):  # a part of it
        source = source.source
    root = getattr(getattr(source, "items", None), "root", None)  # of timm's reader
    return [Path(root)] if root is not None and Path(root).is_file() else []


def model_identity(model: Equipped) -> dict[str, str]:
    """Architecture and settings of the backbone, and its weights."""
    settings = {"backbone": model.config.backbone_config.to_dict(), "layout": model.config.layout}
    settings |= {"class_position": model.config.class_position}
    for passing in ("_name_or_path", "transformers_version"):  # where it lay and who wrote it do not change it
        settings["backbone"].pop(passing, None)
    return {
        "architecture": type(model.body).__name__,
        "settings": _digest([json.dumps(settings, sort_keys=True, default=str).encode()]),
        "weights": weights_digest(model.backbone),
    }


def weights_digest(model: torch.nn.Module) -> str:
    """Names, types and values of all weights and buffers that are saved."""

    def parts() -> Iterable[bytes]:
        for name, tensor in model.state_dict().items():
            yield f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode()
            yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()

    return _digest(parts())


def key_digest(key: dict[str, Any]) -> str:
    """Short name of whatever JSON can hold."""
    return _digest([json.dumps(key, sort_keys=True, default=str).encode()])


def _digest(parts: Iterable[bytes]) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()
