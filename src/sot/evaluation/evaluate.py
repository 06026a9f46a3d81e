"""Evaluate a trained model: scores, a table by class, a picture of what is mistaken for what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from sklearn.metrics import confusion_matrix
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

from sot.data.imagenet import columns_for, subset_name
from sot.data.images import LEFT_OUT, evaluation_set, load_images, processor_transform, stack
from sot.data.sources import part_of
from sot.data.texts import TextData
from sot.evaluation.metrics import Array, image_scores, text_scores
from sot.files import as_png, read_object
from sot.models.accelerate import accelerate
from sot.models.folder import load_model
from sot.models.from_transformers import check_pairs
from sot.models.modeling import labels_of
from sot.training.recipe import Recipe, load_recipe
from sot.training.run import RUN_FILE, full_name
from sot.training.train_texts import TextSet


@dataclass
class Evaluation:
    """Scores, and by class: its name, how many samples, how many of them right, how many times predicted."""

    scores: dict[str, float]
    labels: list[str]
    confusion: Array  # rows are true classes, columns predicted ones
    note: str = ""

    def by_class(self) -> list[tuple[str, int, float, float]]:
        """Name, samples, recall and precision of every class that occurs."""
        rows = []
        for index, name in enumerate(self.labels):
            samples, predicted = int(self.confusion[index].sum()), int(self.confusion[:, index].sum())
            if samples or predicted:
                right = int(self.confusion[index, index])
                rows.append((name, samples, right / max(1, samples), right / max(1, predicted)))
        return rows


def recipe_of(folder: Path) -> Recipe | None:
    """The recipe a model was trained by, if it is in the folder of its run."""
    file = folder / "recipe.yaml"
    return load_recipe(str(file)) if file.is_file() else None


def trained_on(folder: Path, data: str) -> bool:
    """Whether a model was trained on the rest of this data."""
    file = folder / RUN_FILE
    known = read_object(file).get("data") if file.is_file() else None
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
        parts.append(processes.gather_for_metrics((model(**batch).logits.float(), labels)))
    logits, labels = (torch.cat(each).cpu().numpy() for each in zip(*parts))
    return logits, labels


@dataclass
class ImageTest:
    """A trained model and the pictures to score it on."""

    model: Any
    transform: Callable[[Image.Image], Any]
    pictures: Any
    labels: list[str]  # of the pictures
    columns: Array  # where they are among the classes of the model

    def evaluate(
        self,
        batch_size: int,
        progress: Any,
        all_classes: bool = False,
        change: Callable[[Image.Image], Image.Image] | None = None,
    ) -> Evaluation:
        """Scores among the classes of the pictures, or of the model; `change` is done to every picture first."""
        changed = self.transform if change is None else lambda image: self.transform(change(image))
        logits, labels = _logits_of(self.model, evaluation_set(self.pictures, changed), stack, batch_size, progress)
        logits, labels = logits[labels != LEFT_OUT], labels[labels != LEFT_OUT]  # pictures that could not be read
        names, columns = labels_of(self.model), self.columns
        if len(columns) == len(names) or all_classes:
            labels, note = columns[labels], f"among all {len(names)} classes"
            return _evaluation(logits, labels, names, image_scores(logits, labels), note)
        whose = subset_name(self.labels) or "the data"
        note = f"among the {len(columns)} classes of {whose} (of {len(names)} the model knows)"
        logits = logits[:, columns]
        return _evaluation(logits, labels, self.labels, image_scores(logits, labels), note)


def open_images(folder: Path, data: str, samples: int = 0) -> ImageTest:
    """A model and the validation part of `data`, or all of it if it has none and the model was not trained on it.

    `samples` draws that many of them, the same every time.
    """
    model, processor = load_model(folder)
    accelerate(model)
    seen, recipe = trained_on(folder, data), recipe_of(folder) or Recipe()
    pictures = load_images(data, recipe.seed) if seen else load_images(data, val_share=1)
    columns = columns_for(data, pictures.labels, labels_of(model))
    source = part_of(pictures.val, samples)
    return ImageTest(model, processor_transform(processor), source, pictures.labels, np.array(columns))


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
    texts = TextSet(data.dev, tokenizer, tokenizer.model_max_length, data.labels is None)
    logits, labels = _logits_of(model, texts, collate, batch_size, progress)
    scores = text_scores(data.metric, logits, labels)
    if data.labels is None:
        return Evaluation(scores, names, np.zeros((1, 1), dtype=int))
    return _evaluation(logits, labels.astype(int), names, scores, "")


def _evaluation(logits: Array, labels: Array, names: list[str], scores: dict[str, float], note: str) -> Evaluation:
    confusion = confusion_matrix(labels, logits.argmax(1), labels=range(len(names)))
    return Evaluation(scores, names, confusion, note)


def draw_confusion(evaluation: Evaluation) -> bytes:
    """The confusion matrix, rows of true classes that sum to one, as PNG."""
    from matplotlib.figure import Figure

    shares = evaluation.confusion / np.maximum(1, evaluation.confusion.sum(1, keepdims=True))
    size = min(14.0, 3 + 0.35 * len(evaluation.labels))
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), ax=axes, shrink=0.7)
    axes.set(xlabel="predicted", ylabel="true")
    if len(evaluation.labels) <= 40:
        axes.set_xticks(range(len(evaluation.labels)), evaluation.labels, rotation=90)
        axes.set_yticks(range(len(evaluation.labels)), evaluation.labels)
    return as_png(figure)
