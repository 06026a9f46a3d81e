"""A part of the training data to choose by, so that the development set has no say."""

from __future__ import annotations

from dataclasses import replace

from sot.data.sources import ImageData, Stream, Subset, class_numbers
from sot.data.splits import stratified
from sot.data.texts import TextData


def hold_out_texts(data: TextData, share: float, seed: int) -> TextData:
    """The training set alone, a part of it in place of the development set."""
    assert data.train is not None
    kept, held = stratified(data.train.labels, share, seed)
    return replace(data, train=data.train.take(kept), dev=data.train.take(held))


def hold_out_images(pictures: ImageData, share: float, seed: int) -> ImageData:
    """The same of images."""
    if isinstance(pictures.train, Stream):
        raise ValueError("no part of a stream can be held out: accepted is data that comes in one piece")
    kept, held = stratified(class_numbers(pictures.train, decode=True) or [], share, seed)
    return replace(pictures, train=Subset(pictures.train, kept), val=Subset(pictures.train, held))
