"""The frozen backbone, and the data it reads."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch

from sot.core.head import HeadConfig, SecondOrderHead
from sot.data.images import load_images, seeded
from sot.data.rows import read_rows
from sot.data.sound_sets import load_sounds
from sot.data.sources import Subset, class_numbers, part_of
from sot.data.splits import Split
from sot.data.tags import PictureColumns, is_picture_table
from sot.data.texts import TextData
from sot.errors import SettingError
from sot.files import one_line, write_atomically
from sot.models.accelerate import accelerate
from sot.models.equip import Equipped, equip, is_timm
from sot.models.modeling import SoTForImageClassification, SoTForSequenceClassification
from sot.paper.convert import read_weights
from sot.probe.fitting import Target
from sot.probe.samples import Samples, image_samples, sound_samples, text_samples
from sot.training.run_folder import RUN_FILE, full_name


@dataclass(frozen=True)
class FrozenBackbone:
    """Which backbone, as `equip` takes it; `weights` is a file for a timm name, instead of the published ones."""

    name: str
    pretrained: bool = True
    weights: Path | None = None
    img_size: int | None = None
    depth: int | None = None

    @property
    def title(self) -> str:
        """What tables call it."""
        return self.name if self.depth is None else f"{self.name} to layer {self.depth}"

    def equip(self, head: HeadConfig) -> Equipped:
        """The backbone with a new head for two classes."""
        if self.img_size is not None and not is_timm(self.name):
            raise SettingError("{img_size} is for a timm model, and {} is none: leave it out", self.name)
        arguments = {} if self.img_size is None else {"img_size": self.img_size}
        try:
            source: Any = self.name if self.weights is None else self._load(self.weights, arguments)
            equipped = equip(source, 2, head, self.pretrained, model_args=arguments, depth=self.depth)
        except (TypeError, RuntimeError, AssertionError) as error:
            if self.img_size is None:
                raise
            said = "{} cannot be built with {img_size} {}, take a size that fits or leave it out: {}"
            raise SettingError(said, self.name, self.img_size, one_line(error)) from error
        if equipped.processor is None:
            audio = equipped.config.modality == "audio"
            kind = "feature extractor" if audio else "tokenizer or image processor"
            raise ValueError(f"{self.name} has no {kind} beside it that can be loaded")
        return equipped

    def _load(self, file: Path, arguments: dict[str, Any]) -> torch.nn.Module:
        if not timm.is_model(self.name):
            raise SettingError("{weights} is for a timm name, got {!r}; a folder has its own weights", self.name)
        weights = read_weights(file)
        model: torch.nn.Module = timm.create_model(self.name, num_classes=0, **arguments)
        adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        if adapt is not None:
            weights = adapt(weights, model)  # among other things, positions for another size of picture
        try:
            missing = model.load_state_dict(weights, strict=False).missing_keys
        except RuntimeError as error:  # shapes differ
            raise ValueError(f"{file} does not fit {self.name}: {one_line(error)}") from error
        if missing:
            raise ValueError(f"{file} does not fit {self.name}: it lacks {len(missing)} weights, first {missing[0]}")
        return model


@dataclass(frozen=True)
class Data:
    """Samples to train heads on and to score them on; `labels` None is a number to predict.

    `place` is what the saved model remembers, to know its training set again from wherever it is evaluated. `folds`
    has the fold of each sample where all of them take turns: `train` and `test` are the same then.
    """

    name: str
    train: Samples
    test: Samples
    labels: list[str] | None
    metric: str
    place: str
    folds: list[str] | None = None

    @property
    def target(self) -> Target:
        """What the heads predict."""
        return Target(len(self.labels or ["score"]), self.metric)


def read_images(model: SoTForImageClassification, spec: str, samples: tuple[int, int] = (0, 0)) -> Data:
    """Pictures, as `sot train` names them; so many to train on and to score, 0 is all."""
    pictures = load_images(spec)
    parts = []
    for name, part, count in (("train", pictures.train, samples[0]), ("val", pictures.val, samples[1])):
        source = part_of(part, count)
        labels = class_numbers(source) if is_picture_table(spec) else None  # of folders file names tell them
        parts.append(image_samples(model, source, f"{spec} {name}", labels))
    train, test = parts
    return Data(spec, train, test, pictures.labels, "accuracy", full_name(spec))


def read_sounds(
    model: Equipped, spec: str, samples: tuple[int, int] = (0, 0), label: str = "label", fold: str | None = None
) -> Data:
    """Sounds, as `sot train` names them; `label` and `fold` are columns of a table, and folds take turns."""
    columns = PictureColumns(label)
    if fold is None:
        sounds = load_sounds(spec, Split(stratified=True), columns)
        train, test = (part_of(part, count) for part, count in zip((sounds.train, sounds.val), samples))
        parts = [sound_samples(model, part, f"{spec} {name}") for part, name in ((train, "train"), (test, "val"))]
        return Data(spec, parts[0], parts[1], sounds.labels, "accuracy", full_name(spec))
    if not is_picture_table(spec) or any(samples):
        raise SettingError("{fold_column} is for all samples of a table, got {}", spec if not any(samples) else samples)
    folds = [str(row.get(fold)) for row in read_rows(Path(spec))]
    sounds = load_sounds(spec, Split(val_share=1), columns)
    if len(set(folds)) < 2 or len(folds) != len(sounds.val):
        raise SettingError("{fold_column} {}: {} has no such column of two folds or more", fold, spec)
    drawn: Any = sounds.val
    every = sound_samples(model, Subset(drawn, np.argsort(drawn.indices).tolist()), spec)  # in the order of the table
    return Data(spec, every, every, sounds.labels, "accuracy", full_name(spec), folds)


def read_texts(
    model: SoTForSequenceClassification, texts: TextData, name: str, max_length: int, samples: tuple[int, int] = (0, 0)
) -> Data:
    """Texts, cut to `max_length` tokens; so many to train on and to score, 0 is all."""
    if texts.train is None or texts.dev is None:
        raise SettingError("{} needs a training and a development set; of tables the latter is given by {dev}", name)
    regression = texts.labels is None
    train = text_samples(model, texts.train.part(samples[0]), f"{name} train", max_length, regression)
    test = text_samples(model, texts.dev.part(samples[1]), f"{name} dev", max_length, regression)
    model.config.text_pairs = texts.train.pairs is not None
    model.processor.model_max_length = max_length  # saved with the model, so that it cuts texts as they are cut here
    return Data(name, train, test, texts.labels, texts.metric, name)


def open_backbone(backbone: FrozenBackbone) -> Equipped:
    """The backbone to compute tokens with; its head is a placeholder that every backbone can have."""
    with seeded(0):  # weights that are not loaded are the same every time
        model = backbone.equip(HeadConfig(pool="gap", fusion="word")).eval()
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    return accelerate(model)


def with_head(model: Equipped, head: SecondOrderHead, labels: list[str], problem_type: str) -> Equipped:
    """The backbone of `model`, itself, with a trained head."""
    config = copy.deepcopy(model.config)
    if config.layout:
        config.layout.pop("branches", None)  # the head was trained on the first
    config.head, config.id2label = head.config.to_dict(), dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = problem_type
    combined = type(model)(config).eval()
    combined.backbone, combined.processor = model.backbone, model.processor
    combined.classifier.load_state_dict(head.state_dict())
    return combined


def save_model(model: Equipped, folder: Path, run: dict[str, Any]) -> None:
    """All of a model folder or none of it; `run` says what it was trained on. What is not of ours is not replaced."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / RUN_FILE).is_file())):
        raise ValueError(f"{folder} is not a model that sot saved, and would be replaced: choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    write_atomically(partial / RUN_FILE, json.dumps(run, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
