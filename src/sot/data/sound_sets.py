"""Sounds with labels: folders of files, tables of them, synthesised tones; as Trainer and probes read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sot.data.images import EvaluationSet, ImageSet
from sot.data.picture_tables import picture_table
from sot.data.sounds import Samples, Waveform, read_sound
from sot.data.sources import ImageData, Pictures, check_folds, divided, folder
from sot.data.spec import SOUND_SUFFIXES
from sot.data.splits import Split
from sot.data.tags import PictureColumns, is_picture_table
from sot.models.audio import clip_seconds

TONES = ("low tone", "high tone", "rising chirp", "falling chirp", "noise")
TONE_RATE, TONE_SECONDS, TONES_EACH = 16_000, 1.0, 40
ACCEPTED = "tones, a folder of WAV, FLAC or OGG files, or a table of their names"


class Sounds(Pictures):
    """Items `(file or waveform, class number)`, decoded by who knows at which rate."""

    noun, suffixes = "sounds", frozenset(SOUND_SUFFIXES)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        sound, label = self.items[index]
        return sound, label if isinstance(label, tuple) else int(label)

    def filename(self, index: int) -> str:
        """Path of a sound, or its number."""
        sound = self.items[index][0]
        return f"number {index}" if isinstance(sound, Waveform) else str(sound)


def load_sounds(spec: str, split: Split | None = None, columns: PictureColumns | None = None) -> ImageData:
    """`tones`, a folder or a table; what comes in one piece is divided by `split`, and `columns` are a table's."""
    split = split or Split()
    if spec == "tones":
        sounds = divided(Sounds(tones()), list(TONES), split)
    elif is_picture_table(spec):
        sounds = picture_table(Path(spec), columns or PictureColumns(), split, Sounds)
    elif spec and Path(spec).is_dir():
        sounds = folder(Path(spec), split, Sounds)
    else:
        raise ValueError(f"unknown data {spec!r}; accepted: {ACCEPTED}")
    return check_folds(sounds, split, spec)


def tones() -> list[tuple[Waveform, int]]:
    """Five kinds of synthesised sounds of a second: steady tones, chirps that rise or fall, noise; always the same."""
    draw, found = np.random.default_rng(0), []
    time = np.arange(round(TONE_RATE * TONE_SECONDS)) / TONE_RATE
    for number in range(TONES_EACH * len(TONES)):
        kind = number % len(TONES)
        low, high = draw.uniform(150, 400), draw.uniform(1000, 3000)
        first, last = ((low, low), (high, high), (low, high), (high, low), (low, low))[kind]
        phase = 2 * math.pi * (first * time + (last - first) * time**2 / (2 * TONE_SECONDS) + draw.uniform())
        noise = draw.standard_normal(len(time))
        samples = 0.3 * noise if kind == 4 else np.sin(phase) + 0.1 * noise
        found.append((Waveform((draw.uniform(0.1, 0.8) * samples / 2).astype(np.float32), TONE_RATE), kind))
    return found


@dataclass(frozen=True)
class SoundReader:
    """How a model reads a sound: its rate, and how many seconds of it at most."""

    rate: int
    seconds: float

    def __call__(self, source: str | Path | Waveform) -> Samples:
        """The samples of one."""
        return read_sound(source, self.rate, self.seconds)


def reading_of(model: Any, processor: Any) -> SoundReader:
    """How a model with this feature extractor reads sounds."""
    if processor is None:
        raise ValueError("the model has no feature extractor beside it")
    return SoundReader(int(processor.sampling_rate), clip_seconds(model.config, processor))


def encode_sounds(processor: Any, sounds: list[Samples]) -> dict[str, Tensor]:
    """A batch of samples as a model reads it; waveforms are padded to the longest, spectrograms fill their window."""
    padding = {"padding": True} if processor.model_input_names[0] == "input_values" else {}
    encoded = processor(sounds, sampling_rate=processor.sampling_rate, return_tensors="pt", **padding)
    return {name: encoded[name] for name in (processor.model_input_names[0], "attention_mask") if name in encoded}


class SoundSet(ImageSet):
    """Samples of sounds to train on; one that cannot be read is named and the next one served."""

    noun = "Sound"

    def load(self, position: int) -> tuple[Any, Any]:
        sound, label = self.source[position]
        return self.transform(sound), label

    def item(self, index: int, image: Any, label: Any) -> dict[str, Any]:
        """What the collator reads of a sound, which nothing random happens to."""
        return {"samples": image, "labels": label, "index": index, "epoch": self.epoch}


class EvaluationSounds(SoundSet, EvaluationSet):
    """The same to evaluate on, where what comes in place of a sound does not count."""


@dataclass(frozen=True)
class SoundCollate:
    """Makes batches of what `SoundSet` gives, with a feature extractor."""

    processor: Any

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        labels = torch.tensor([item["labels"] for item in items])
        return {**encode_sounds(self.processor, [item["samples"] for item in items]), "labels": labels}
