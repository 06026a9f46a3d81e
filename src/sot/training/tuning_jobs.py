"""What a search trains over and over: texts or images, with or without the part that is held out to choose by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sot.data.images import load_images
from sot.data.sources import ImageData, Stream, Subset, class_numbers
from sot.data.splits import Split, stratified
from sot.data.tags import PictureColumns
from sot.data.texts import TextData
from sot.training.search import Trained
from sot.training.train_images import train_images
from sot.training.train_texts import fine_tune


@dataclass(frozen=True)
class TuningJob:
    """What is trained over and over: `train` takes a folder, recipe and head, and whether on all data; gives scores."""

    model: str
    data: str
    metric: str
    samples: tuple[int, int]  # to train on and held out
    train: Callable[..., dict[str, float]]
    source: Mapping[str, Any]  # what else tells its data from others


def text_job(
    model: str, data: TextData, name: str, share: float, seed: int, source: Mapping[str, Any], **options: Any
) -> TuningJob:
    """Fine-tuning on texts; `options` are those of `fine_tune`."""
    if data.dev is None:
        data = data.divided(Split(seed, stratified=True))
    part = hold_out_texts(data, share, seed)
    assert part.train is not None and part.dev is not None

    def train(out: Path, trained: Trained, everything: bool, **more: Any) -> dict[str, float]:
        chosen, given = data if everything else part, {"source": source, **options, **more}
        return fine_tune(model, chosen, name, out, *trained, **given)

    return TuningJob(model, name, data.metric, (len(part.train), len(part.dev)), train, source)


def image_job(
    model: str, data: str, share: float, seed: int, columns: PictureColumns | None = None, **options: Any
) -> TuningJob:
    """Training on images; `options` are those of `train_images`."""
    whole = load_images(data, seed, columns=columns, stratified=True)
    part = hold_out_images(whole, share, seed)

    def train(out: Path, trained: Trained, everything: bool, **more: Any) -> dict[str, float]:
        given = {"pictures": whole if everything else part, "columns": columns, **options, **more}
        return train_images(model, data, out, *trained, **given)

    metric, source = "macro_f1" if whole.multi_label else "accuracy", {**options, "columns": columns and str(columns)}
    return TuningJob(model, data, metric, (len(part.train), len(part.val)), train, source)


def hold_out_texts(data: TextData, share: float, seed: int) -> TextData:
    """The training set alone, a part of it in place of the development set, which has no say."""
    assert data.train is not None
    kept, held = stratified(data.train.labels, share, seed)
    return replace(data, train=data.train.take(kept), dev=data.train.take(held))


def hold_out_images(pictures: ImageData, share: float, seed: int) -> ImageData:
    """The same of images."""
    if isinstance(pictures.train, Stream):
        raise ValueError("no part of a stream can be held out: accepted is data that comes in one piece")
    kept, held = stratified(class_numbers(pictures.train, decode=True) or [], share, seed)
    return replace(pictures, train=Subset(pictures.train, kept), val=Subset(pictures.train, held))
