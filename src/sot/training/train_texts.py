"""Fine-tune a text classifier: `sot finetune`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from transformers import DataCollatorWithPadding, set_seed

from sot.core.head import HeadConfig
from sot.data.texts import TextData, TextSplit
from sot.evaluation.metrics import text_scores
from sot.evaluation.multi_label import MultiLabelMetrics, multi_label_scores
from sot.files import read_object
from sot.models.equip import Equipped, equip
from sot.models.folder import show_bars_on_terminals_only
from sot.models.from_timm import is_timm
from sot.models.from_transformers import check_length
from sot.saved import is_trained
from sot.training.conduct import Conduct, Job, with_metric
from sot.training.engine import SoTTrainer
from sot.training.recipe import Recipe
from sot.training.run_folder import RUN_FILE
from sot.training.starting import continue_from, prepare
from sot.training.train_images import split_batch, training_arguments

IMAGES_ONLY = (  # keys of a recipe
    *("drop_path", "embed", "model_args", "img_size", "mixup", "cutmix", "erasing", "rand_augment"),
    *("color_jitter", "flip", "scale"),
)


def refuse_of_images(recipe: Recipe, what: str) -> None:
    """Raise ValueError for settings of a recipe that only images have."""
    usual = Recipe()
    for key in IMAGES_ONLY:
        if getattr(recipe, key) != getattr(usual, key):
            raise ValueError(f"{key} is for images, got {getattr(recipe, key)!r} for {what}")


class TextSet(Dataset[dict[str, Any]]):
    """Tokenised texts, or pairs of them, with their labels: `numbers` as they are, or classes."""

    def __init__(self, split: TextSplit, tokenizer: Any, max_length: int, numbers: bool) -> None:
        self.encoded = tokenizer(split.texts, split.pairs, truncation=True, max_length=max_length)
        self.labels: Any = split.labels if numbers else [int(label) for label in split.labels]  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        kept = ("input_ids", "attention_mask", "token_type_ids")
        item = {key: self.encoded[key][index] for key in kept if key in self.encoded}
        return {**item, "labels": self.labels[index]}


def problem_of(data: TextData) -> str:
    """What transformers calls this kind of labels."""
    if data.multi_label:
        return "multi_label_classification"
    return "regression" if data.labels is None else "single_label_classification"


def text_metrics(data: TextData, config: Any, recipe: Recipe) -> Callable[[Any], dict[str, float]]:
    """How Trainer scores an evaluation."""
    if data.multi_label:
        return MultiLabelMetrics(config, recipe.tune_thresholds)
    return lambda p: text_scores(data.metric, np.asarray(p.predictions), np.asarray(p.label_ids))


def build_text_model(model: str, data: TextData, recipe: Recipe, head: HeadConfig | None) -> Equipped:
    """The equipped model; `head` None is the conventional one, the class token alone."""
    refuse_of_images(recipe, f"the text model {model}")
    loss: dict[str, Any] = {"label_smoothing": recipe.label_smoothing, "problem_type": problem_of(data)}
    labels = data.labels or ["score"]
    if is_trained(model):
        built = continue_from(model, labels, head, loss)
    elif is_timm(model):
        raise ValueError(f"{model} is a timm model, for images: train it by sot train; accepted: a text model")
    else:
        built = equip(model, labels=labels, head=head or HeadConfig(fusion="class"), **loss)
    if built.config.modality != "text":
        raise ValueError(f"{model} is a model for images; accepted: a text model of Hugging Face, by name or folder")
    if built.processor is None:
        raise ValueError(f"{model} has no tokenizer beside it")
    built.config.text_pairs = any(split is not None and split.pairs is not None for split in (data.train, data.dev))
    check_length(built, recipe.max_length, built.config.text_pairs)
    return built


def _as_kept(file: Path, source: Mapping[str, Any]) -> dict[str, Any]:
    """Of `source` what a run has kept: the first ones kept the name of their data only, and go on with that."""
    before = read_object(file) if file.is_file() else source
    return {name: value for name, value in source.items() if name in before}


def _score_names(data: TextData) -> list[str]:
    perfect = np.eye(len(data.labels or "12"))
    if data.multi_label:
        return [*multi_label_scores(perfect, perfect)]
    return [*text_scores(data.metric, perfect[:, :1] if data.labels is None else perfect, perfect.argmax(1))]


def fine_tune(
    model: str,
    data: TextData,
    name: str,
    out: Path,
    recipe: Recipe,
    head: HeadConfig | None,
    *,
    source: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Fine-tune on `data` (called `name`) and leave the run in `out`; returns the evaluation that was kept.

    Texts without a development set are divided. `source` is what else tells the data from others of this name, for
    `resume` to refuse those. What else there is has `Conduct`.
    """
    show_bars_on_terminals_only()
    conduct = Conduct(**options)
    batches = split_batch(recipe, conduct.accumulation)
    split = conduct.split(out, recipe.seed)
    if data.dev is None or split.fold is not None:
        data = data.divided(split)
    if data.train is None or data.dev is None:
        raise ValueError(f"{name} has no texts to train on")
    train = data.train.part(recipe.train_samples)
    recipe = with_metric(recipe, data.metric, _score_names(data)).for_samples(len(train))
    set_seed(recipe.seed)
    built = build_text_model(model, data, recipe, head)
    as_they_are = data.labels is None or data.multi_label
    numbers = None if as_they_are else [int(label) for label in train.labels]  # type: ignore[arg-type]
    prepare(built, recipe, conduct.weights, numbers)
    tokenizer = built.processor
    tokenizer.model_max_length = recipe.max_length  # saved with the model, so that pipelines cut texts as training does
    settings = None if head is None else head.to_dict()
    identity = {"command": "finetune", "model": model, "data": name, "head": settings}
    order = "group_by_length" if recipe.group_by_length else "random"
    told = {"report_to": conduct.report_to, "train_sampling_strategy": order}
    args = training_arguments(recipe, out, {**batches, **told})
    known = _as_kept(out / RUN_FILE, source or {}) if conduct.resume else dict(source or {})
    dev, samples = data.dev, (len(train), len(data.dev))
    job = Job(built, recipe, identity, known, data.labels or ["score"], samples, numbers, model)

    def make() -> SoTTrainer:
        return SoTTrainer(
            recipe,
            model=built,
            args=args,
            train_dataset=TextSet(train, tokenizer, recipe.max_length, as_they_are),
            eval_dataset=TextSet(dev, tokenizer, recipe.max_length, as_they_are),
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=text_metrics(data, built.config, recipe),
            callbacks=[*conduct.callbacks],
        )

    return job.carry_out(out, conduct, split, make)
