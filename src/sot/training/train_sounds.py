"""Train a classifier of sounds: `sot train` on data of sounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import set_seed

from sot.core.head import HeadConfig
from sot.data.images import without_unreadable
from sot.data.sound_sets import EvaluationSounds, Reading, SoundCollate, SoundSet, load_sounds, reading_of
from sot.data.sounds import SHORTEST
from sot.data.sources import ImageData, Subset, class_numbers, part_of
from sot.data.tags import PictureColumns
from sot.errors import SettingError
from sot.evaluation.multi_label import MultiLabelMetrics
from sot.models.audio import SoTForAudioClassification
from sot.models.equip import equip
from sot.models.from_timm import is_timm
from sot.saved import is_trained
from sot.training.conduct import Conduct, Job, adapted
from sot.training.engine import SoTTrainer
from sot.training.image_model import with_plain_head
from sot.training.recipe import Recipe
from sot.training.run import show_bars_on_terminals_only
from sot.training.run_folder import full_name
from sot.training.starting import continue_from, prepare
from sot.training.train_images import TellEpoch, image_metrics, score_names, split_batch, training_arguments
from sot.training.train_texts import IMAGES_ONLY


def build_sound_model(
    name: str, sounds: ImageData, recipe: Recipe, head: HeadConfig | None, pretrained: bool
) -> SoTForAudioClassification:
    """The model with its head, or with the conventional one (`head` None): class token, or average of the words."""
    usual = Recipe()
    for key in IMAGES_ONLY:
        if getattr(recipe, key) != getattr(usual, key):
            raise ValueError(f"{key} is for images, got {getattr(recipe, key)!r} for sounds")
    problem = "multi_label_classification" if sounds.multi_label else "single_label_classification"
    loss: dict[str, Any] = {"label_smoothing": recipe.label_smoothing, "problem_type": problem}
    if is_timm(name):
        raise ValueError(f"{name} is a timm model, for images, and the data has sounds")
    if is_trained(name):
        built = continue_from(name, sounds.labels, head, loss)
    else:
        options = {"labels": sounds.labels, "pretrained": pretrained, **loss}
        built = with_plain_head(head, lambda chosen: equip(name, head=chosen, **options))
    if not isinstance(built, SoTForAudioClassification):
        raise ValueError(f"{name} is a model for {built.config.modality}s, and the data has sounds")
    if recipe.seconds is not None:
        built.config.max_seconds = recipe.seconds
    return built


def train_sounds(
    model: str,
    data: str,
    out: Path,
    recipe: Recipe,
    head: HeadConfig | None,
    *,
    pretrained: bool = True,
    strict: bool = False,
    workers: int = 0,
    columns: PictureColumns | None = None,
    **options: Any,
) -> dict[str, float]:
    """Train a model on sounds and leave the run in `out`; returns the evaluation that was kept.

    `strict` refuses sounds that cannot be read, which are left out otherwise; `columns` are those of a table. What
    else there is has `Conduct`.
    """
    show_bars_on_terminals_only()
    conduct = Conduct(**options)
    batches = split_batch(recipe, conduct.accumulation)
    split = conduct.split(out, recipe.seed)
    sounds = load_sounds(data, split, columns)
    if split.fold is not None and not isinstance(sounds.train, Subset):
        raise SettingError("{folds} divides data that comes in one piece, and {} has a part of its own", data)
    set_seed(recipe.seed)
    built = build_sound_model(model, sounds, recipe, head, pretrained)
    reading = reading_of(built, built.processor)
    sounds, left_out = _readable(sounds, strict, reading)
    source = part_of(sounds.train, recipe.train_samples)
    numbers = None if sounds.multi_label else class_numbers(source)
    recipe = adapted(recipe, len(source), "macro_f1", score_names(sounds))
    prepare(built, recipe, conduct.weights, numbers)
    loading = {"dataloader_num_workers": workers, "report_to": conduct.report_to}
    args = training_arguments(recipe, out, {**batches, **loading})
    settings = None if head is None else head.to_dict()
    identity = {"command": "train", "model": model, "data": data, "head": settings, "pretrained": pretrained}
    known = {"data": full_name(data), **({} if columns is None else {"columns": str(columns)})}
    samples, origin = (len(source), len(sounds.val)), model if pretrained else "random"
    job = Job(built, recipe, identity, known, sounds.labels, samples, numbers, origin, left_out)

    def make() -> SoTTrainer:
        several = MultiLabelMetrics(built.config, recipe.tune_thresholds) if sounds.multi_label else None
        return SoTTrainer(
            recipe,
            model=built,
            args=args,
            train_dataset=SoundSet(source, reading, recipe.seed),
            eval_dataset=EvaluationSounds(sounds.val, reading),
            data_collator=SoundCollate(built.processor),
            compute_metrics=several or image_metrics,
            callbacks=[TellEpoch(), *conduct.callbacks],
        )

    return job.carry_out(out, conduct, split, make)


def _readable(sounds: ImageData, strict: bool, reading: Reading) -> tuple[ImageData, list[str]]:
    look = reading if strict else replace(reading, seconds=SHORTEST)
    parts = (without_unreadable(part, strict, look, "sounds") for part in (sounds.train, sounds.val))
    (train, bad), (val, also_bad) = parts
    return replace(sounds, train=train, val=val), bad + also_bad
