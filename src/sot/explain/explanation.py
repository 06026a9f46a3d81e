"""One input explained: predictions, maps by branch, contributions, spectrum and pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from sot.data.pictures import open_picture
from sot.evaluation.predict import check_unicode, probabilities
from sot.explain.branches import BOTH, CLASS, WORDS, branch_contributions, name_of, split_logits
from sot.explain.cam import METHODS, activation_maps
from sot.explain.evidence import Evidence, pair_evidence, singular_spectrum
from sot.explain.reading import TokenReading, check_model, explaining, read_image, read_text
from sot.explain.relevance import global_attentions, relevance_maps
from sot.explain.result import Column, ImageExplanation, TextExplanation
from sot.explain.words import TEXT_METHODS, Words, split_words, word_influence
from sot.models.from_transformers import check_pairs
from sot.models.modeling import SoTForImageClassification, SoTForSequenceClassification, labels_of
from sot.saved import class_index

IMAGE_METHODS = (*METHODS, "relevance")
MAX_PIXELS = 50_000_000  # of a stranger's image: 150 MB decoded
Opened = tuple[Any, Any]  # a model and its processor


def common_parts(
    model: Any, reading: TokenReading, target: str | int | None, truth: str | int | None, top: int
) -> dict[str, Any]:
    """The part of an explanation that only the head is asked for."""
    labels, head, tokens = labels_of(model), model.classifier, reading.tokens
    contributions = branch_contributions(head, tokens)
    scores = probabilities(model.config, torch.from_numpy(contributions.logits).double())
    index = int(scores.argmax()) if target is None else class_index(labels, target, "target")
    order = scores.argsort(descending=True, stable=True)[:top]
    found: dict[str, Any] = {"spectrum": None, "evidence": None, "notes": [contributions.note]}
    if tokens.branches:
        found["notes"].append(f"the backbone has {1 + len(tokens.branches)} branches: maps and pairs show the first")
    try:
        found["evidence"] = pair_evidence(head, tokens, index)
        found["spectrum"] = singular_spectrum(head, tokens)
    except ValueError as error:
        found["notes"].append(str(error))
    return {
        **found,
        "labels": labels,
        "predictions": [(labels[i], float(scores[i])) for i in order.tolist()],
        "target": labels[index],
        "truth": None if truth is None else labels[class_index(labels, truth, "label")],
        "contributions": contributions,
    }


def branch_columns(model: Any, reading: TokenReading, maps: dict[str, NDArray[Any]], truth: str | None) -> list[Column]:
    """A column for each map, with what its part of the head predicts."""
    labels, branches = labels_of(model), split_logits(model.classifier, reading.tokens)
    columns = []
    for part, values in maps.items():
        votes = branches.votes(part)[0].detach()
        predicted = labels[int(votes.argmax())] if len(labels) > 1 else f"{float(votes[0]):.3f}"
        correct = None if truth is None else predicted == truth
        columns.append(Column(name_of(model.classifier, part), values, predicted, correct))
    return columns


def _check_others(model: Any, others: dict[str, Opened | None]) -> dict[str, Opened]:
    given = {name: opened for name, opened in others.items() if opened is not None}
    for name, (other, _) in given.items():
        check_model(other)
        if type(other) is not type(model) or labels_of(other) != labels_of(model):
            raise ValueError(f"the model for the {name} has not the same inputs and classes as the model for both")
    return given


def _arrange(columns: list[Column], given: dict[str, Column]) -> list[Column]:
    """The columns of one model, with those of other models in their place."""
    if not given:
        return columns
    own = {column.name: column for column in columns[:-1]}
    beside = {**own, **given}
    return [*(beside[name] for name in (CLASS, WORDS) if name in beside), replace(columns[-1], name=BOTH)]


# --- pictures ----------------------------------------------------------------------------------------------


def open_upload(source: Path | BinaryIO) -> Image.Image:
    """Open a stranger's image as training reads it; ValueError says what is wrong, its size before decoding."""
    return open_picture(source, MAX_PIXELS)


def explain_image(
    model: SoTForImageClassification,
    processor: Any,
    image: Image.Image,
    *,
    method: str | None = None,
    target: str | int | None = None,
    truth: str | int | None = None,
    class_model: Opened | None = None,
    word_model: Opened | None = None,
    top: int = 5,
) -> ImageExplanation:
    """Explain the prediction for an image: maps through the class token, the words and both.

    Args:
        model: An image model with a second-order head.
        processor: Its image processor.
        image: A Pillow image.
        method: One of `IMAGE_METHODS`; by default relevance where all words attend to each other, else hirescam.
        target: The class to explain, by name or number; by default the one that is predicted.
        truth: The true class, by which the columns are marked right or wrong.
        class_model: A model and its processor to fill the first column instead of the branch of `model`.
        word_model: The same for the second column.
        top: How many classes `predictions` has.
    """
    check_model(model)
    check_method(method, IMAGE_METHODS, "pictures")
    if not hasattr(image, "convert"):
        raise ValueError(f"an image is given as PIL opens it, got {type(image).__name__}")
    others = _check_others(model, {CLASS: class_model, WORDS: word_model})
    pixels = _pixels(processor, image)
    with explaining(model):
        reading = read_image(model, pixels, attentions=method is None)
        method = method or ("relevance" if global_attentions(reading) else "hirescam")
        common = common_parts(model, reading, target, truth, top)
        columns, note = _image_columns(model, pixels, reading, method, common)
    given = {}
    for name, (other, prepare) in others.items():
        with explaining(other):
            there = _pixels(prepare, image)
            found, _ = _image_columns(other, there, read_image(other, there), method, common)
        given[name] = replace(found[-1], name=name)
    common["notes"] += [note] if note else []
    picture, grid = _as_seen(processor, pixels), reading.tokens.grid or (1, 1)
    return ImageExplanation(columns=_arrange(columns, given), method=method, picture=picture, grid=grid, **common)


def check_method(method: str | None, accepted: tuple[str, ...], what: str) -> None:
    """Raise ValueError unless the method is one for these inputs, or None for the default."""
    if method is not None and method not in accepted:
        raise ValueError(f"unknown method {method!r} for {what}; accepted: {', '.join(accepted)}")


def _image_columns(
    model: Any, pixels: Tensor, reading: TokenReading, method: str, common: dict[str, Any]
) -> tuple[list[Column], str]:
    target = common["labels"].index(common["target"])
    if method == "relevance":
        maps, note = relevance_maps(model, pixels, target)
    else:
        maps, note = activation_maps(model, pixels, target, method), ""
    return branch_columns(model, reading, maps, common["truth"]), note


def _pixels(processor: Any, image: Image.Image) -> Tensor:
    pixels: Tensor = processor(image.convert("RGB"), return_tensors="pt")["pixel_values"]
    return pixels


def _as_seen(processor: Any, pixels: Tensor) -> NDArray[np.uint8]:
    """The picture that went into the model, after resizing and cropping, so that maps lie where they belong."""
    mean, std = (
        torch.tensor(getattr(processor, name, None) or default)
        for name, default in (("image_mean", [0.0]), ("image_std", [1.0]))
    )
    colours = pixels[0].cpu().float() * std.view(-1, 1, 1) + mean.view(-1, 1, 1)
    seen: NDArray[np.uint8] = (colours.clamp(0, 1) * 255).round().byte().expand(3, -1, -1).permute(1, 2, 0).numpy()
    return seen


# --- texts -------------------------------------------------------------------------------------------------


def explain_text(
    model: SoTForSequenceClassification,
    tokenizer: Any,
    text: str,
    pair: str | None = None,
    *,
    method: str = "relevance",
    target: str | int | None = None,
    truth: str | int | None = None,
    class_model: Opened | None = None,
    word_model: Opened | None = None,
    top: int = 5,
) -> TextExplanation:
    """Explain the prediction for a text or pair: influence of its words; arguments as in `explain_image`."""
    check_model(model)
    check_method(method, TEXT_METHODS, "texts")
    check_unicode(text, pair)
    check_pairs(model.config, pair is not None)
    others = _check_others(model, {CLASS: class_model, WORDS: word_model})
    words = split_words(model, tokenizer, text, pair)
    with explaining(model):
        reading = read_text(model, words.encoded, attentions=method == "relevance")
        common = common_parts(model, reading, target, truth, top)
        columns = _text_columns(model, reading, words, method, common)
    given = {}
    for name, (other, tokenize) in others.items():
        with explaining(other):
            there = split_words(other, tokenize, text, pair)
            if there.spans != words.spans:
                raise ValueError(f"the model for the {name} divides the text into other words")
            reading = read_text(other, there.encoded, attentions=method == "relevance")
            given[name] = replace(_text_columns(other, reading, there, method, common)[-1], name=name)
    common["evidence"] = _of_words(common["evidence"], words)
    common["notes"] += [words.cut] if words.cut else []
    return TextExplanation(columns=_arrange(columns, given), method=method, words=words, **common)


def _text_columns(model: Any, reading: TokenReading, words: Words, method: str, common: dict[str, Any]) -> list[Column]:
    target = common["labels"].index(common["target"])
    return branch_columns(model, reading, word_influence(model, reading, words, target, method), common["truth"])


def _of_words(evidence: Evidence | None, words: Words) -> Evidence | None:
    """Evidence of words in place of tokens; that of [SEP] and its like is left out."""
    if evidence is None:
        return None
    pairs = None if evidence.pairs is None else words.merge_pairs(evidence.pairs)
    return replace(evidence, words=words.merge(evidence.words), pairs=pairs)


def explain_item(model: Any, processor: Any, item: Any, **options: Any) -> Any:
    """Explain an image, a text, a pair of texts (a tuple) or a sound, whichever the model reads."""
    check_model(model)
    if model.config.modality == "audio":
        from sot.explain.sounds import explain_sound  # which imports this file

        return explain_sound(model, processor, item, **options)
    if model.config.modality == "image":
        if isinstance(item, str | tuple):
            raise ValueError("this model reads images, and it was given a text")
        return explain_image(model, processor, item, **options)
    if not isinstance(item, str | tuple):
        raise ValueError(f"this model reads texts, and it was given {type(item).__name__}")
    texts = (item,) if isinstance(item, str) else item
    return explain_text(model, processor, *texts, **options)
