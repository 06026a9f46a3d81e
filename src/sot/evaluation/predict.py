"""Names and scores for pictures or texts: `sot predict`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sot.data.pictures import open_picture
from sot.data.rows import is_unicode
from sot.errors import PictureError
from sot.models.from_transformers import check_pairs


@dataclass
class Prediction:
    """The likeliest classes of one input and their scores, or why it could not be read."""

    source: str
    classes: list[tuple[str, float]]
    error: str | None = None
    pair: str | None = None


def _picture_or_error(path: str) -> Image.Image | str:
    """A picture, or what is wrong with the file."""
    try:
        return open_picture(path)
    except PictureError as error:
        return error.reason
    except (OSError, ValueError) as error:
        return str(error) if os.path.exists(path) else "no such file"  # unlike Path's, for names that are too long


@torch.inference_mode()
def predict_images(model: Any, processor: Any, files: Sequence[str], top: int, batch_size: int) -> Iterator[Prediction]:
    """One prediction a file, in order; a file that cannot be read is reported and the rest still done."""
    for start in range(0, len(files), batch_size):
        batch = files[start : start + batch_size]
        read = {file: _picture_or_error(file) for file in dict.fromkeys(batch)}
        good = [file for file, picture in read.items() if not isinstance(picture, str)]
        rows: dict[str, list[tuple[str, float]]] = {}
        if good:
            pixels = processor([read[file] for file in good], return_tensors="pt")["pixel_values"]
            rows = dict(zip(good, _top(model, model(pixel_values=pixels.to(model.device)).logits, top)))
        for file in batch:
            picture = read[file]
            yield Prediction(file, rows.get(file, []), picture if isinstance(picture, str) else None)


def check_unicode(*texts: str | None) -> None:
    """Raise ValueError for a text whose bytes on the command line were not valid UTF-8."""
    for text in texts:
        if text is not None and not is_unicode(text):
            raise ValueError(f"the text {text!r} is not valid UTF-8")


@torch.inference_mode()
def predict_texts(
    model: Any, tokenizer: Any, texts: Sequence[str], top: int, batch_size: int, pairs: Sequence[str] | None = None
) -> Iterator[Prediction]:
    """One prediction a text, or pair of texts, in order; a text that cannot be read is reported."""
    check_pairs(model.config, bool(pairs))
    seconds: Sequence[str | None] = pairs or [None] * len(texts)
    items = list(zip(texts, seconds))
    for start in range(0, len(items), batch_size):
        batch = items[start : start + batch_size]
        encoded = [_encode(tokenizer, *item) for item in batch]
        good = [item for item in encoded if not isinstance(item, str)]
        rows: Iterator[list[tuple[str, float]]] = iter(())
        if good:
            padded = tokenizer.pad(good, return_tensors="pt").to(model.device)
            rows = iter(_top(model, model(**padded).logits, top))
        for (text, pair), item in zip(batch, encoded):
            error = item if isinstance(item, str) else None
            yield Prediction(text, [] if error else next(rows), error, pair)


def _encode(tokenizer: Any, text: str, pair: str | None) -> dict[str, list[int]] | str:
    """What the model reads of a text, or why it cannot."""
    if not all(map(is_unicode, filter(None, (text, pair)))):
        return "it is not valid UTF-8"
    encoded = tokenizer(text, pair, truncation=True)
    names = ("input_ids", "attention_mask", "token_type_ids")
    return {name: encoded[name] for name in names if name in encoded} if encoded["input_ids"] else "it has no tokens"


def probabilities(config: Any, logits: Tensor) -> Tensor:
    """Of the classes of an input, of each by itself if it may have several; of a regression its value."""
    kinds = {"regression": lambda x: x, "multi_label_classification": torch.sigmoid}
    return kinds.get(config.problem, lambda x: x.softmax(-1))(logits)


def _top(model: Any, logits: Tensor, top: int) -> list[list[tuple[str, float]]]:
    scores, classes = probabilities(model.config, logits.float()).topk(min(top, logits.shape[-1]))
    names = model.config.id2label
    return [[(names[int(c)], float(s)) for s, c in zip(*row)] for row in zip(scores.tolist(), classes.tolist())]
