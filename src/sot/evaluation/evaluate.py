"""Evaluate a trained model: scores, a table by class, a figure of what is mistaken for what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from sklearn.metrics import confusion_matrix
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

from sot.data.imagenet import columns_for, subset_name
from sot.data.images import LEFT_OUT, evaluation_set, load_images, processor_transform, stack
from sot.data.sound_sets import EvaluationSounds, SoundCollate, load_sounds, reading_of
from sot.data.sources import part_of
from sot.data.splits import Split
from sot.data.tags import PictureColumns, Tags, is_picture_table
from sot.data.texts import TextData
from sot.evaluation.metrics import Array, image_scores, text_scores
from sot.evaluation.multi_label import HALF, chosen, multi_label_scores
from sot.files import inputs_taken, read_object
from sot.models.accelerate import accelerate
from sot.models.folder import load_model
from sot.models.from_transformers import check_pairs
from sot.models.modeling import is_multi_label, labels_of
from sot.training.recipe import Recipe, load_recipe
from sot.training.run_folder import RUN_FILE, full_name, kept_split
from sot.training.train_texts import TextSet

if TYPE_CHECKING:
    from sot.figures import Drawing

MAX_NAMED, MAX_COUNTED = 40, 16  # classes of a confusion matrix with names, with counts


@dataclass
class Evaluation:
    """Scores, and what was taken for what."""

    scores: dict[str, float]
    labels: list[str]
    confusion: Array  # rows are true classes, columns predicted ones; of several classes how often two go together
    note: str = ""
    counts: Sequence[
        tuple[int, int, int]
    ] = ()  # of every class its samples, how often it was said, and how often rightly

    def by_class(self) -> list[tuple[str, int, float, float]]:
        """Name, samples, recall and precision of every class that occurs."""
        return [
            (name, samples, right / max(1, samples), right / max(1, predicted))
            for name, (samples, predicted, right) in zip(self.labels, self.counts)
            if samples or predicted
        ]

    def f1_by_class(self) -> dict[str, float]:
        """F1 of every class that occurs."""
        counts = zip(self.labels, self.counts)
        return {name: 2 * right / (samples + said) for name, (samples, said, right) in counts if samples or said}


def recipe_of(folder: Path) -> Recipe | None:
    """The recipe a model was trained by, if it is in the folder of its run."""
    file = folder / "recipe.yaml"
    return load_recipe(str(file)) if file.is_file() else None


def run_of(folder: Path) -> dict[str, Any]:
    """What is known of the training of a model, if it is in the folder of its run."""
    file = folder / RUN_FILE
    return read_object(file) if file.is_file() else {}


def trained_on(folder: Path, data: str) -> bool:
    """Whether a model was trained on the rest of this data."""
    known = run_of(folder).get("data")
    return isinstance(known, str) and full_name(known) == full_name(data)


@torch.inference_mode()
def _logits_of(model: Any, data: Any, collate: Any, batch_size: int, progress: Any) -> tuple[Array, Array]:
    """Logits in float32 and labels of every sample once, shared among the processes if there are several."""
    processes = Accelerator(cpu=not torch.accelerator.is_available())
    loader = processes.prepare(DataLoader(data, batch_size=batch_size, collate_fn=collate))
    model.to(processes.device)
    parts = []
    for batch in progress(loader):
        labels = batch.pop("labels")
        with inputs_taken():
            found = model(**batch).logits.float()
        parts.append(processes.gather_for_metrics((found, labels)))
    logits, labels = (torch.cat(each).cpu().numpy() for each in zip(*parts))
    return logits, labels


@dataclass
class ImageTest:
    """A trained model and the images or sounds to score it on."""

    model: Any
    transform: Callable[[Any], Any]
    pictures: Any
    labels: list[str]  # of these
    columns: Array  # where they are among the classes of the model

    def read(self, transform: Callable[[Any], Any]) -> tuple[Any, Any]:
        """What a loader reads, and what makes batches of it."""
        if self.model.config.modality == "audio":
            return EvaluationSounds(self.pictures, transform), SoundCollate(self.model.processor)
        return evaluation_set(self.pictures, transform), stack

    def evaluate(
        self,
        batch_size: int,
        progress: Any,
        all_classes: bool = False,
        change: Callable[[Image.Image], Image.Image] | None = None,
    ) -> Evaluation:
        """Scores among the classes of the images, or of the model; `change` is done to every image first."""
        changed = self.transform if change is None else lambda image: self.transform(change(image))
        logits, labels = _logits_of(self.model, *self.read(changed), batch_size, progress)
        there = labels.reshape(len(labels), -1)[:, 0] != LEFT_OUT  # images that could be read
        logits, labels = logits[there], labels[there]
        names, columns = labels_of(self.model), self.columns
        if is_multi_label(self.model.config):
            return _several(logits, labels, names, self.model.config.thresholds)
        if len(columns) == len(names) or all_classes:
            labels, note = columns[labels], f"among all {len(names)} classes"
            return _evaluation(logits, labels, names, image_scores(logits, labels), note)
        whose = subset_name(self.labels) or "the data"
        note = f"among the {len(columns)} classes of {whose} (of {len(names)} the model knows)"
        logits = logits[:, columns]
        return _evaluation(logits, labels, self.labels, image_scores(logits, labels), note)


def open_images(folder: Path, data: str, samples: int = 0, columns: PictureColumns | None = None) -> ImageTest:
    """A model of images or sounds and the validation part of `data`, or all of it if the model has not seen it.

    `samples` draws that many of them, the same every time. `columns` are those of a table.
    """
    model, processor = load_model(folder)
    accelerate(model)
    seen, recipe = trained_on(folder, data), recipe_of(folder) or Recipe()
    table = _columns_of(model, data, columns)
    part: dict[str, Any] = {"seed": recipe.seed, **kept_split(folder)} if seen else {"val_share": 1}
    sounds = model.config.modality == "audio"
    pictures = load_sounds(data, Split(**part), table) if sounds else load_images(data, columns=table, **part)
    places = columns_for(data, pictures.labels, labels_of(model))
    model.processor = processor
    transform = reading_of(model, processor) if sounds else processor_transform(processor)
    return ImageTest(model, transform, part_of(pictures.val, samples), pictures.labels, np.array(places))


def _columns_of(model: Any, data: str, columns: PictureColumns | None) -> PictureColumns | None:
    """Where a table has the labels of images, as this model knows them."""
    if not is_multi_label(model.config):
        return columns
    if not is_picture_table(data):
        raise ValueError(f"a model of several classes for an image needs a table of images, got {data}")
    chosen = columns or PictureColumns()
    return replace(chosen, tags=chosen.tags or Tags((chosen.label,)), classes=labels_of(model))


def unseen_part(folder: Path, table: str, data: TextData) -> TextData:
    """Of the table that a model was trained on, without another to evaluate on, what it was not trained on."""
    run = run_of(folder)
    if data.dev is None or not Path(table).is_file() or run.get("source") != full_name(table) or run.get("dev"):
        return data
    split = Split((recipe_of(folder) or Recipe()).seed, **kept_split(folder))
    return replace(data, train=data.dev, dev=None).divided(split)


def evaluate_text(folder: Path, data: TextData, batch_size: int, progress: Any) -> Evaluation:
    """Scores on the development set with the metric of its task."""
    if data.dev is None:
        raise ValueError("there is no development set to evaluate on")
    model, tokenizer = load_model(folder)
    accelerate(model)
    names = labels_of(model)
    if data.labels is not None and data.labels != names:
        raise ValueError(f"the classes of the data ({', '.join(data.labels)}) are not the model's ({', '.join(names)})")
    if data.labels is None and len(names) > 1:
        raise ValueError(f"the data has numbers to predict, and {folder} predicts classes ({', '.join(names)})")
    check_pairs(model.config, data.dev.pairs is not None)
    collate = DataCollatorWithPadding(tokenizer)
    if data.multi_label != is_multi_label(model.config):
        several = "several classes" if data.multi_label else "one class"
        raise ValueError(f"the data has {several} for a text, and {folder} was trained for {model.config.problem}")
    texts = TextSet(data.dev, tokenizer, tokenizer.model_max_length, data.labels is None or data.multi_label)
    logits, labels = _logits_of(model, texts, collate, batch_size, progress)
    if data.multi_label:
        return _several(logits, labels, names, model.config.thresholds)
    scores = text_scores(data.metric, logits, labels)
    if data.labels is None:
        return Evaluation(scores, names, np.zeros((1, 1), dtype=int))
    return _evaluation(logits, labels.astype(int), names, scores, "")


def _evaluation(logits: Array, labels: Array, names: list[str], scores: dict[str, float], note: str) -> Evaluation:
    confusion = confusion_matrix(labels, logits.argmax(1), labels=range(len(names)))
    counts = zip(confusion.sum(1).tolist(), confusion.sum(0).tolist(), confusion.diagonal().tolist())
    return Evaluation(scores, names, confusion, note, list(counts))


def _several(logits: Array, labels: Array, names: list[str], thresholds: list[float] | None) -> Evaluation:
    truth, said = (labels > HALF).astype(int), chosen(logits, thresholds).astype(int)
    note = "at thresholds of its own for each class" if thresholds else f"at a threshold of {HALF}"
    scores, confusion = multi_label_scores(logits, labels, thresholds), truth.T @ said
    counts = zip(truth.sum(0).tolist(), said.sum(0).tolist(), confusion.diagonal().tolist())
    return Evaluation(scores, names, confusion, note, list(counts))


def draw_confusion(evaluation: Evaluation) -> Drawing:
    """The confusion matrix: colours are shares of a row, a true class; numbers, of few classes, are counts."""
    from sot.figures import SMALL, Drawing, clean

    counts, names = evaluation.confusion, [clean(name, 24) for name in evaluation.labels]
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    size = min(8.0, 3 + 0.4 * len(names))
    figure = Drawing(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    figure.colorbar(
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), ax=axes, shrink=0.7, label="share of the true class"
    )
    axes.set(xlabel="predicted", ylabel="true")
    if len(names) <= MAX_NAMED:
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=SMALL, parse_math=False)
        axes.set_yticks(range(len(names)), names, fontsize=SMALL, parse_math=False)
    for row, column in np.argwhere(counts > 0) if len(names) <= MAX_COUNTED else ():
        shade = "white" if shares[row, column] > HALF else "black"
        axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", color=shade, fontsize=SMALL)
    return figure
