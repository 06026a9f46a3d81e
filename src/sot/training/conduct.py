"""How a run is done, whatever it trains: what users ask for beside a recipe, and the way from a model to a run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sot.core.head import HeadConfig
from sot.data.splits import Split
from sot.errors import SettingError
from sot.files import counted, write_atomically
from sot.models.audio import clip_seconds
from sot.training.engine import SoTTrainer
from sot.training.image_model import data_config
from sot.training.recipe import Recipe
from sot.training.run import execute
from sot.training.run_folder import full_name, kept_split, open_run, removed_unless_begun

logger = logging.getLogger("sot")
LEFT_OUT_FILE = "left_out.txt"
RARE = 0.1  # share of the largest class below which a class is easily never predicted


@dataclass(frozen=True)
class Conduct:
    """What can be asked for of any run.

    Args:
        resume: Continue the run that is there; where there is none, it is begun.
        overwrite: Replace it.
        weights: File of weights for the backbone or the whole model, read before training.
        fold: Number of a fold from 0, and how many there are: data in one piece is divided so.
        accumulation: Steps over which a batch is accumulated.
        report_to: Logger of Trainer.
        chosen: What the recipe is called where choices are told.
        say: Is told, line by line, what was chosen and how it goes.
        callbacks: Of Trainer.
    """

    resume: bool = False
    overwrite: bool = False
    weights: Path | None = None
    fold: tuple[int, int] | None = None
    accumulation: int = 1
    report_to: str = "tensorboard"
    chosen: str = "of yours"
    say: Callable[[str], None] | None = None
    callbacks: Sequence[Any] = ()

    def split(self, out: Path, seed: int) -> Split:
        """How data in one piece is divided: a run that is continued divides it as it did."""
        before = kept_split(out) if self.resume else {}
        return Split(seed, fold=self.fold, stratified=before.get("stratified", True))


@dataclass
class Job:
    """A model and its data, ready to be trained."""

    model: Any
    recipe: Recipe
    identity: dict[str, Any]  # command, model, data, head and what else the card may tell
    known: dict[str, Any]  # what tells this run from others: instead of, or beside, the above
    labels: list[str]
    samples: tuple[int, int]  # to train on and to validate on; 0 is unknown
    numbers: Sequence[int] | None  # the class of each sample to train on, where each has one
    weights: str  # where they are from
    left_out: list[str] = field(default_factory=list)

    def carry_out(self, out: Path, conduct: Conduct, split: Split, make: Callable[[], SoTTrainer]) -> dict[str, float]:
        """Open the folder, train what `make` makes, and return the evaluation that was kept."""
        known = {**self.identity, "model": full_name(self.identity["model"]), **self.known}
        known |= {"split": "stratified"} if split.stratified else {}
        known |= {} if split.fold is None else {"fold": [*split.fold]}
        known |= {} if conduct.weights is None else {"weights": full_name(str(conduct.weights))}
        opened = open_run(out, known, self.recipe, conduct.resume, conduct.overwrite)
        with opened as continued, removed_unless_begun(out, continued):
            trainer = make()
            if trainer.is_world_process_zero():
                warn_of_labels(self.labels, self.numbers, self.recipe.balance)
                self._announce(out, conduct, continued)
            return execute(trainer, self.identity, self.recipe, out, continued, self.labels, conduct.say)

    def _announce(self, out: Path, conduct: Conduct, continued: bool) -> None:
        say = conduct.say or (lambda line: None)
        if conduct.resume and not continued:
            say(f"Nothing to resume in {out}: the run starts.")
        for line in self._chosen(str(conduct.weights or self.weights), conduct.chosen):
            say(line)
        if self.left_out:
            write_atomically(out / LEFT_OUT_FILE, "\n".join(self.left_out) + "\n")
            logger.warning(
                "Left out %s that cannot be read, listed in %s: %s",
                *(counted(len(self.left_out), "samples"), out / LEFT_OUT_FILE, "; ".join(self.left_out[:5])),
            )

    def _chosen(self, weights: str, chosen: str) -> list[str]:
        """Model, weights, size, head, recipe, samples and classes: a line each."""
        model, recipe, labels = self.model, self.recipe, self.labels
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        total = sum(weight.numel() for weight in model.parameters())
        part = f", {trained / 1e6:.2f} M of them trained" if trained < total else ""
        classes = ", ".join(labels[:8]) + (", …" if len(labels) > 8 else "")
        batch = f"batches of {recipe.batch_size}, lr {recipe.lr:g}, seed {recipe.seed}"
        kept = "the last epoch is kept" if recipe.metric is None else f"the best epoch by {recipe.metric} is kept"
        patience = f"; patience {recipe.patience}" if recipe.patience else ""
        train, val = (f"{number:,}" if number else "unknown" for number in self.samples)
        data = f"{train} samples to train on, {val} to validate on"
        return [
            f"model   {self.identity['model']}, {total / 1e6:.1f} M parameters{part}",
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


def with_metric(recipe: Recipe, metric: str, scores: Sequence[str]) -> Recipe:
    """The recipe with the task's own metric for `auto`; one that has no such score is refused."""
    if recipe.metric == "auto":
        recipe = replace(recipe, metric=metric)
    if recipe.metric not in (None, *scores):
        raise SettingError("{metric} must be one of {}, or auto, got {!r}", ", ".join(scores), recipe.metric)
    return recipe
