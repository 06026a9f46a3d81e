"""Fine-tune a text classifier: `sot finetune`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from transformers import DataCollatorWithPadding, set_seed

from sot.core.head import HeadConfig
from sot.data.texts import TextData, TextSplit
from sot.errors import SettingError
from sot.evaluation.metrics import text_scores
from sot.files import read_object
from sot.models.equip import Equipped, equip
from sot.models.from_transformers import check_length
from sot.training.engine import SoTTrainer
from sot.training.recipe import Recipe
from sot.training.run import RUN_FILE, execute, full_name, open_run, show_bars_on_terminals_only
from sot.training.train_images import split_batch, training_arguments

IMAGES_ONLY = (  # keys of a recipe
    *("drop_path", "embed", "model_args", "img_size", "mixup", "cutmix", "erasing", "rand_augment"),
    *("color_jitter", "flip", "scale"),
)


class TextSet(Dataset[dict[str, Any]]):
    """Tokenised texts, or pairs of them, with their labels."""

    def __init__(self, split: TextSplit, tokenizer: Any, max_length: int, regression: bool) -> None:
        self.encoded = tokenizer(split.texts, split.pairs, truncation=True, max_length=max_length)
        self.labels = split.labels if regression else [int(label) for label in split.labels]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        kept = ("input_ids", "attention_mask", "token_type_ids")
        item = {key: self.encoded[key][index] for key in kept if key in self.encoded}
        return {**item, "labels": self.labels[index]}


def build_text_model(model: str, data: TextData, recipe: Recipe, head: HeadConfig | None) -> Equipped:
    """The equipped model; `head` None is the conventional one, the class token alone."""
    usual = Recipe()
    for key in IMAGES_ONLY:
        if getattr(recipe, key) != getattr(usual, key):
            raise ValueError(f"{key} is for images, got {getattr(recipe, key)!r} for the text model {model}")
    regression = data.labels is None
    built = equip(
        model,
        labels=data.labels or ["score"],
        head=head or HeadConfig(fusion="class"),
        label_smoothing=recipe.label_smoothing,
        problem_type="regression" if regression else "single_label_classification",
    )
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


def fine_tune(
    model: str,
    data: TextData,
    name: str,
    out: Path,
    recipe: Recipe,
    head: HeadConfig | None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    accumulation: int = 1,
    report_to: str = "tensorboard",
    source: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Fine-tune on `data` (called `name`) and leave the run in `out`; returns its last evaluation.

    `source` is what else tells the data from others of this name, for `resume` to refuse those.
    """
    if data.train is None or data.dev is None:
        raise SettingError("{} needs a training and a development set; of tables the latter is given by {dev}", name)
    show_bars_on_terminals_only()
    batches = split_batch(recipe, accumulation)
    set_seed(recipe.seed)
    built = build_text_model(model, data, recipe, head)
    tokenizer, regression = built.processor, data.labels is None
    tokenizer.model_max_length = recipe.max_length  # saved with the model, so that pipelines cut texts as training does
    settings = None if head is None else head.to_dict()
    identity = {"command": "finetune", "model": model, "data": name, "head": settings}
    order = "group_by_length" if recipe.group_by_length else "random"
    args = training_arguments(recipe, out, {**batches, "report_to": report_to, "train_sampling_strategy": order})
    known = _as_kept(out / RUN_FILE, source or {}) if resume else source or {}
    open_run(out, {**identity, "model": full_name(model), **known}, recipe, resume, overwrite)
    trainer = SoTTrainer(
        recipe,
        model=built,
        args=args,
        train_dataset=TextSet(data.train.part(recipe.train_samples), tokenizer, recipe.max_length, regression),
        eval_dataset=TextSet(data.dev, tokenizer, recipe.max_length, regression),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: text_scores(data.metric, np.asarray(p.predictions), np.asarray(p.label_ids)),
    )
    return execute(trainer, identity, recipe, out, resume, data.labels or ["score"])
