"""Train an image classifier: `sot train`."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainingArguments, set_seed

from sot.core.head import HeadConfig
from sot.data.images import (
    LEFT_OUT,
    ImageSet,
    TrainingStream,
    evaluation_set,
    load_images,
    processor_transform,
    stack,
    without_unreadable,
)
from sot.data.sources import ImageData, Stream, class_numbers, part_of
from sot.data.splits import Split
from sot.data.tags import PictureColumns
from sot.evaluation.metrics import image_scores
from sot.evaluation.multi_label import MultiLabelMetrics, multi_label_scores
from sot.models.folder import show_bars_on_terminals_only
from sot.training.conduct import Conduct, Job, with_metric
from sot.training.engine import SoTTrainer
from sot.training.image_model import Collate, build_model, data_config, train_transform
from sot.training.recipe import Recipe
from sot.training.run_folder import full_name
from sot.training.starting import prepare


def compilers() -> tuple[str, str]:
    """C++ compilers that torch.compile looks for on a CPU."""
    return os.environ.get("CXX", "g++"), "clang++"


def can_compile() -> bool:
    """Whether there is one of them."""
    return any(map(shutil.which, compilers()))


def training_arguments(recipe: Recipe, out: Path, batches: Mapping[str, Any]) -> TrainingArguments:
    """What Trainer needs to know; the optimiser and its schedule are made from the recipe itself.

    Making them joins the other processes, if torchrun or accelerate started any.
    """
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and os.environ.get("FSDP_VERSION", "1") == "1":
        raise ValueError("FSDP of version 1 flattens weights that a recipe tells apart: set fsdp_version: 2")
    if recipe.compile and not torch.accelerator.is_available() and not can_compile():
        raise ValueError(f"compile=true needs a C++ compiler on a CPU: {' or '.join(compilers())}; none was found")
    return TrainingArguments(
        output_dir=str(out),
        num_train_epochs=recipe.epochs + recipe.cooldown_epochs,
        learning_rate=recipe.lr,
        max_grad_norm=recipe.max_grad_norm,
        bf16=recipe.precision == "bfloat16",
        fp16=recipe.precision == "float16",
        torch_compile=recipe.compile,
        seed=recipe.seed,
        data_seed=recipe.seed,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        disable_tqdm=True,  # run.py has its own
        use_cpu=not torch.accelerator.is_available(),  # says that processes without one may join, too
        dataloader_pin_memory=torch.cuda.is_available(),
        **batches,
    )


def split_batch(recipe: Recipe, accumulation: int) -> dict[str, int]:
    """The recipe's batch over the processes and accumulation steps."""
    processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else world_size()
    share, rest = divmod(recipe.batch_size, processes * accumulation)
    if rest or share < 1:
        parts = f"{processes} processes × {accumulation} accumulation steps"
        raise ValueError(f"batch_size {recipe.batch_size} cannot be divided among {parts}")
    if (recipe.mixup or recipe.cutmix) and share % 2:
        raise ValueError(f"mixup and cutmix mix pairs of images: a share of {share} must be even, see batch_size")
    return {
        "per_device_train_batch_size": share,
        "per_device_eval_batch_size": share,
        "gradient_accumulation_steps": accumulation,
    }


def world_size() -> int:
    """Processes that torchrun or accelerate started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def image_metrics(prediction: Any) -> dict[str, float]:
    """The scores of images that could be read."""
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    return image_scores(logits[labels != LEFT_OUT], labels[labels != LEFT_OUT])


class TellEpoch(TrainerCallback):
    """Tells the images which epoch it is: with several processes accelerate tells their sampler only."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first image of an epoch is asked for."""
        kwargs["train_dataloader"].dataset.set_epoch(math.floor(state.epoch))  # a run may go on in the middle of one


class ImageTrainer(SoTTrainer):
    """Mixes images to train on, and only those."""

    data_collator: Any

    def get_train_dataloader(self) -> Any:
        """As usual, except that a stream has divided itself among the processes."""
        if not isinstance(self.train_dataset, TrainingStream):
            return super().get_train_dataloader()
        return DataLoader(
            self.train_dataset,
            self.args.train_batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """As usual, with nothing mixed and nothing left out."""
        collate, self.data_collator = self.data_collator, stack
        drop, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.data_collator, self.args.dataloader_drop_last = collate, drop


@dataclass(frozen=True)
class Medium:
    """What images and sounds do not share: how they are opened, built for, found unreadable and trained on."""

    load: Callable[[str, Split, PictureColumns | None], ImageData]
    build: Callable[[str, ImageData, Recipe, HeadConfig | None, bool], Any]
    without_unreadable: Callable[[Any, bool, Any], tuple[Any, list[str]]]  # a part, strictly or not, for a model
    make_trainer: Callable[[Any, ImageData, Recipe, TrainingArguments, Sequence[TrainerCallback]], SoTTrainer]


def train_images(
    model: str,
    data: str,
    out: Path,
    recipe: Recipe,
    head: HeadConfig | None,
    *,
    pretrained: bool = False,
    strict: bool = False,
    workers: int = 0,
    pictures: ImageData | None = None,
    columns: PictureColumns | None = None,
    medium: Medium | None = None,
    **options: Any,
) -> dict[str, float]:
    """Train a model on images, or on another `medium`, and leave the run in `out`; returns the evaluation kept.

    `pretrained` reads the published weights of a name, those in a folder are always read; `strict` refuses files that
    cannot be read, which are left out otherwise. `pictures` are those of `data`, where they are at hand or split
    otherwise; `columns` are those of a table. What else there is has `Conduct`.
    """
    show_bars_on_terminals_only()
    conduct, medium = Conduct(**options), medium or IMAGES
    batches = split_batch(recipe, conduct.accumulation)
    split = conduct.split(out, recipe.seed)
    pictures = medium.load(data, split, columns) if pictures is None else pictures
    recipe = with_metric(recipe, "macro_f1", score_names(pictures))
    set_seed(recipe.seed)
    pretrained = pretrained or Path(model).is_dir()
    built = medium.build(model, pictures, recipe, head, pretrained)
    parts = (medium.without_unreadable(part, strict, built) for part in (pictures.train, pictures.val))
    (train, bad), (val, also_bad) = parts
    pictures = replace(pictures, train=train, val=val)
    source = part_of(train, recipe.train_samples)
    samples = _count(source), _count(val)
    numbers = None if pictures.multi_label else class_numbers(source)
    recipe = recipe.for_samples(samples[0])
    prepare(built, recipe, conduct.weights, numbers)
    loading = {"dataloader_num_workers": workers, "dataloader_drop_last": bool(recipe.mixup or recipe.cutmix)}
    args = training_arguments(recipe, out, {**batches, **loading, "report_to": conduct.report_to})
    if isinstance(train, Stream):
        train.check_readers(args.world_size, workers)
    _check_samples(source, args)
    settings = None if head is None else head.to_dict()
    identity = {"command": "train", "model": model, "data": data, "head": settings, "pretrained": pretrained}
    origin = model if Path(model).is_dir() else "published ones of this name" if pretrained else "random"
    known = {"data": full_name(data), **({} if columns is None else {"columns": str(columns)})}
    job = Job(built, recipe, identity, known, pictures.labels, samples, numbers, origin, bad + also_bad)
    make = partial(medium.make_trainer, built, pictures, recipe, args, conduct.callbacks)
    return job.carry_out(out, conduct, split, make)


def score_names(pictures: ImageData) -> list[str]:
    """What an evaluation of these is scored by."""
    perfect = np.eye(len(pictures.labels))
    return [
        *(multi_label_scores(perfect, perfect) if pictures.multi_label else image_scores(perfect, perfect.argmax(1)))
    ]


def _count(source: Any) -> int:
    return source.samples if isinstance(source, Stream) else len(source)


def _check_samples(source: Any, args: TrainingArguments) -> None:
    """Refuse fewer images than one batch where only whole batches are trained on."""
    batch = args.train_batch_size * args.world_size
    if args.dataloader_drop_last and not isinstance(source, Stream) and len(source) < batch:
        raise ValueError(f"mixup and cutmix need whole batches: batch_size must be at most {len(source)}, got {batch}")


def make_trainer(
    built: Any,
    pictures: ImageData,
    recipe: Recipe,
    args: TrainingArguments,
    callbacks: Sequence[TrainerCallback] = (),
) -> ImageTrainer:
    """The trainer of a model on these images."""
    return ImageTrainer(
        recipe,
        model=built,
        args=args,
        train_dataset=_training_set(pictures.train, train_transform(recipe, data_config(built)), recipe, args),
        eval_dataset=evaluation_set(pictures.val, processor_transform(built.processor), recipe.seed),
        data_collator=Collate(recipe, len(pictures.labels)),
        compute_metrics=MultiLabelMetrics(built.config, recipe.tune_thresholds)
        if pictures.multi_label
        else image_metrics,
        callbacks=[TellEpoch(), *callbacks],
    )


def _training_set(source: Any, transform: Any, recipe: Recipe, args: TrainingArguments) -> ImageSet | TrainingStream:
    source = part_of(source, recipe.train_samples)
    if not isinstance(source, Stream):
        return ImageSet(source, transform, recipe.seed)
    process = args.process_index, args.world_size
    return TrainingStream(source, transform, recipe.seed, args.train_batch_size, args.dataloader_num_workers, process)


IMAGES = Medium(
    lambda spec, split, columns: load_images(
        spec, split.seed, columns=columns, stratified=split.stratified, fold=split.fold
    ),
    lambda name, data, recipe, head, pretrained: build_model(
        name, data.labels, recipe, head, pretrained, data.multi_label
    ),
    lambda part, strict, _: without_unreadable(part, strict),
    make_trainer,
)
