"""What a run tells before its first step: what was chosen, and what about the data a user should know."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sot.core.head import HeadConfig
from sot.files import counted
from sot.models.audio import clip_seconds
from sot.training.recipe import Recipe

logger = logging.getLogger("sot")
RARE = 0.1  # share of the largest class below which a class is easily never predicted


def chosen_lines(
    model: Any, name: str, weights: str, recipe: Recipe, chosen: str, samples: tuple[int, int], labels: Sequence[str]
) -> list[str]:
    """Model, weights, size, head, recipe, samples and classes: a line each."""
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    total = sum(weight.numel() for weight in model.parameters())
    part = f", {trained / 1e6:.2f} M of them trained" if trained < total else ""
    classes = ", ".join(labels[:8]) + (", …" if len(labels) > 8 else "")
    batch = f"batches of {recipe.batch_size}, lr {recipe.lr:g}, seed {recipe.seed}"
    kept = "the last epoch is kept" if recipe.metric is None else f"the best epoch by {recipe.metric} is kept"
    patience = f"; patience {recipe.patience}" if recipe.patience else ""
    train, val = (f"{number:,}" if number else "unknown" for number in samples)
    data = f"{train} samples to train on, {val} to validate on"
    return [
        f"model   {name}, {total / 1e6:.1f} M parameters{part}",
        f"weights {weights}",
        f"size    {_size(model, recipe)}",
        f"head    {_head(HeadConfig.from_saved(model.config.head))}",
        f"recipe  {chosen}: {counted(recipe.epochs + recipe.cooldown_epochs, 'epochs')}, {batch}; {kept}{patience}",
        f"data    {data}; {f'{len(labels)} classes: {classes}' if len(labels) > 1 else 'a number to predict'}",
    ]


def _size(model: Any, recipe: Recipe) -> str:
    if model.config.modality == "text":
        return f"texts of at most {recipe.max_length} tokens"
    if model.config.modality == "audio":
        return f"sounds of at most {clip_seconds(model.config, model.processor):g} seconds"
    from sot.training.image_model import data_config

    _, height, width = data_config(model)["input_size"]
    return f"images of {height}×{width} pixels"


def _head(head: HeadConfig) -> str:
    if head.fusion == "class":
        return "class token"
    pool = f"{head.pool} ({head.norm}, {head.exponent:g})" if head.norm else head.pool
    return f"fusion {head.fusion}, pool {pool}"


def warn_of_labels(labels: Sequence[str], numbers: Sequence[int] | None, balanced: bool) -> None:
    """Warn of classes that look like one, and of rare ones that nothing makes up for."""
    spelt: dict[str, str] = {}
    for label in labels:
        other = spelt.setdefault(label.strip().casefold(), label)
        if other != label:
            logger.warning("The classes %r and %r differ in case or spaces only: are they one?", other, label)
    if numbers is None or not len(numbers):
        return
    counts = Counter(int(number) for number in numbers)
    fewest = min(range(len(labels)), key=lambda number: counts[number])
    most, largest = counts.most_common(1)[0]
    if not balanced and counts[fewest] < RARE * largest:
        logger.warning(
            "Class %r has %s to train on, %r has %d: rare classes may never be predicted. "
            "The setting balance=true weighs them, and macro_f1 shows them.",
            *(labels[fewest], counted(counts[fewest], "samples"), labels[most], largest),
        )
