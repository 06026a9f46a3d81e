"""What training on sounds has of its own: `sot train` on data of sounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from sot.core.head import HeadConfig
from sot.data.images import without_unreadable
from sot.data.sound_sets import EvaluationSounds, SoundCollate, SoundSet, load_sounds, reading_of
from sot.data.sounds import SHORTEST
from sot.data.sources import ImageData, part_of
from sot.evaluation.multi_label import MultiLabelMetrics
from sot.models.audio import SoTForAudioClassification
from sot.models.equip import equip
from sot.models.from_timm import is_timm
from sot.saved import is_trained
from sot.training.engine import SoTTrainer
from sot.training.image_model import with_plain_head
from sot.training.recipe import Recipe
from sot.training.starting import continue_from
from sot.training.train_images import Medium, TellEpoch, image_metrics
from sot.training.train_texts import refuse_of_images


def build_sound_model(
    name: str, sounds: ImageData, recipe: Recipe, head: HeadConfig | None, pretrained: bool
) -> SoTForAudioClassification:
    """The model with its head, or with the conventional one (`head` None): class token, or average of the words."""
    refuse_of_images(recipe, "sounds")
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


def make_sound_trainer(
    built: Any, sounds: ImageData, recipe: Recipe, args: TrainingArguments, callbacks: Sequence[TrainerCallback]
) -> SoTTrainer:
    """The trainer of a model on these sounds."""
    reading = reading_of(built, built.processor)
    several = MultiLabelMetrics(built.config, recipe.tune_thresholds) if sounds.multi_label else None
    return SoTTrainer(
        recipe,
        model=built,
        args=args,
        train_dataset=SoundSet(part_of(sounds.train, recipe.train_samples), reading, recipe.seed),
        eval_dataset=EvaluationSounds(sounds.val, reading),
        data_collator=SoundCollate(built.processor),
        compute_metrics=several or image_metrics,
        callbacks=[TellEpoch(), *callbacks],
    )


def _without_unreadable(part: Any, strict: bool, built: Any) -> tuple[Any, list[str]]:
    reading = reading_of(built, built.processor)
    return without_unreadable(part, strict, reading if strict else replace(reading, seconds=SHORTEST), "sounds")


SOUNDS = Medium(load_sounds, build_sound_model, _without_unreadable, make_sound_trainer)
