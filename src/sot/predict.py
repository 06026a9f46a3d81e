"""Names and scores for pictures or texts: `sot predict`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sot.data.sources import FORMATS


@dataclass
class Prediction:
    """The likeliest classes of one input and their probabilities, or why it could not be read."""

    source: str
    classes: list[tuple[str, float]]
    error: str | None = None


def _batches(items: Sequence[str], size: int) -> Iterator[list[str]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _read(path: str) -> Image.Image | str:
    """A picture, or what is wrong with the file."""
    try:
        with Image.open(path, formats=FORMATS) as picture:
            return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return str(error) if Path(path).exists() else "no such file"


@torch.inference_mode()
def predict_images(model: Any, processor: Any, files: Sequence[str], top: int, batch_size: int) -> Iterator[Prediction]:
    """One prediction a file, in order; a file that cannot be read is reported and the rest still done."""
    for batch in _batches(files, batch_size):
        read = {file: _read(file) for file in dict.fromkeys(batch)}
        good = [file for file, picture in read.items() if not isinstance(picture, str)]
        rows: dict[str, list[tuple[str, float]]] = {}
        if good:
            pixels = processor([read[file] for file in good], return_tensors="pt")["pixel_values"]
            rows = dict(zip(good, _top(model, model(pixel_values=pixels.to(model.device)).logits, top)))
        for file in batch:
            picture = read[file]
            yield Prediction(file, rows.get(file, []), picture if isinstance(picture, str) else None)


@torch.inference_mode()
def predict_texts(model: Any, tokenizer: Any, texts: Sequence[str], top: int, batch_size: int) -> Iterator[Prediction]:
    """One prediction a text, in order."""
    for batch in _batches(texts, batch_size):
        encoded = tokenizer(batch, padding=True, truncation=True, return_tensors="pt").to(model.device)
        kept = {name: encoded[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded}
        for text, row in zip(batch, _top(model, model(**kept).logits, top)):
            yield Prediction(text, row)


def _top(model: Any, logits: Tensor, top: int) -> list[list[tuple[str, float]]]:
    scores, classes = logits.float().softmax(-1).topk(min(top, logits.shape[-1]))
    names = model.config.id2label
    return [[(names[int(c)], float(s)) for s, c in zip(*row)] for row in zip(scores.tolist(), classes.tolist())]
