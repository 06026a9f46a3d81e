"""Names and scores for images or texts: `sot predict`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from typing import Any, TypeVar

import torch
from torch import Tensor

from sot.data.pictures import open_picture
from sot.data.rows import check_unicode as check_unicode
from sot.data.rows import is_unicode
from sot.errors import PictureError
from sot.files import inputs_taken
from sot.models.from_transformers import check_pairs

Item = TypeVar("Item")
Found = tuple[
    list[tuple[str, float]], list[str] | None
]  # the likeliest classes, and those it has if it may have several


@dataclass
class Prediction:
    """The likeliest classes of one input and their scores, or why it could not be read; `cut`: its end was not."""

    source: str
    classes: list[tuple[str, float]]
    error: str | None = None
    pair: str | None = None
    cut: bool = False
    labels: list[str] | None = None  # what it has, of a model whose inputs may have several classes


def _batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


def _read_or_error(path: str, read: Callable[[str], Any]) -> Any:
    """An image or sound, or what is wrong with the file."""
    try:
        return read(path)
    except PictureError as error:
        return error.reason
    except (OSError, ValueError) as error:
        if os.path.isdir(path):
            return "it is a folder"
        return str(error) if os.path.exists(path) else "no such file"  # unlike Path's, for names that are too long


def _reader(model: Any, processor: Any) -> tuple[Callable[[str], Any], Callable[[list[Any]], dict[str, Tensor]]]:
    """What opens one file for a model, and what makes a batch of several."""
    if model.config.modality == "audio":
        from sot.data.sound_sets import encode_sounds, reading_of  # and with it all that reads data sets

        return reading_of(model, processor), partial(encode_sounds, processor)
    return open_picture, lambda read: {"pixel_values": processor(read, return_tensors="pt")["pixel_values"]}


@torch.inference_mode()
def predict_images(model: Any, processor: Any, files: Iterable[str], top: int, batch_size: int) -> Iterator[Prediction]:
    """One prediction a file of an image or sound, in order; one that cannot be read is reported, the rest done."""
    read, encode = _reader(model, processor)
    for batch in _batches(files, batch_size):
        found = {file: _read_or_error(file, read) for file in dict.fromkeys(batch)}
        good = [file for file, picture in found.items() if not isinstance(picture, str)]
        rows: dict[str, Found] = {}
        if good:
            inputs = {name: value.to(model.device) for name, value in encode([found[file] for file in good]).items()}
            rows = dict(zip(good, _top(model, _logits(model, inputs), top)))
        for file in batch:
            picture = found[file]
            classes, labels = rows.get(file, ([], None))
            yield Prediction(file, classes, picture if isinstance(picture, str) else None, labels=labels)


@torch.inference_mode()
def predict_texts(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    top: int,
    batch_size: int,
    pairs: Iterable[str | None] | None = None,
) -> Iterator[Prediction]:
    """One prediction a text, or pair of texts, in order; a text that cannot be read is reported."""
    check_pairs(model.config, pairs is not None)
    for batch in _batches(zip(texts, repeat(None) if pairs is None else pairs), batch_size):
        encoded = [_encode(tokenizer, *item) for item in batch]
        good = [item for item in encoded if not isinstance(item, str)]
        rows: Iterator[Found] = iter(())
        if good:
            padded = tokenizer.pad(good, return_tensors="pt").to(model.device)
            rows = iter(_top(model, _logits(model, padded), top))
        for (text, pair), item in zip(batch, encoded):
            if isinstance(item, str):
                yield Prediction(text, [], item, pair)
            else:
                cut = _is_cut(tokenizer, text, pair, len(item["input_ids"]))
                classes, labels = next(rows)
                yield Prediction(text, classes, None, pair, cut, labels)


def _encode(tokenizer: Any, text: str, pair: str | None) -> dict[str, list[int]] | str:
    """What the model reads of a text, or why it cannot."""
    if not all(map(is_unicode, filter(None, (text, pair)))):
        return "it is not valid UTF-8"
    encoded = tokenizer(text, pair, truncation=True)
    names = ("input_ids", "attention_mask", "token_type_ids")
    return {name: encoded[name] for name in names if name in encoded} if encoded["input_ids"] else "it has no tokens"


def _is_cut(tokenizer: Any, text: str, pair: str | None, read: int) -> bool:
    """Whether a text has more tokens than were read of it, which only one that fills the model can have."""
    if read < tokenizer.model_max_length:
        return False
    return len(tokenizer(text, pair, truncation=False, verbose=False)["input_ids"]) > read


def _logits(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    with inputs_taken():
        logits: Tensor = model(**inputs).logits
    return logits


def probabilities(config: Any, logits: Tensor) -> Tensor:
    """Of the classes of an input, of each by itself if it may have several; of a regression its value."""
    kinds = {"regression": lambda x: x, "multi_label_classification": torch.sigmoid}
    return kinds.get(config.problem, lambda x: x.softmax(-1))(logits)


def _labels(config: Any, scores: Tensor) -> list[list[str] | None]:
    """What each input has, where it may have several classes: those that reach their threshold."""
    if config.problem != "multi_label_classification":
        return [None] * len(scores)
    has = scores >= scores.new_tensor(config.thresholds or [0.5] * scores.shape[-1])
    return [[config.id2label[number] for number in row.nonzero().flatten().tolist()] for row in has]


def _top(model: Any, logits: Tensor, top: int) -> list[Found]:
    every = probabilities(model.config, logits.float())
    scores, classes = every.topk(min(top, logits.shape[-1]))
    names = model.config.id2label
    rows = [[(names[int(c)], float(s)) for s, c in zip(*row)] for row in zip(scores.tolist(), classes.tolist())]
    return list(zip(rows, _labels(model.config, every)))
