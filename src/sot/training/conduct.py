"""How a run is done, whatever it trains: what users ask for beside a recipe, and the way from a model to a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sot.data.splits import Split
from sot.errors import SettingError
from sot.files import counted, write_atomically
from sot.training.announce import chosen_lines, warn_of_labels
from sot.training.engine import SoTTrainer
from sot.training.recipe import Recipe
from sot.training.run import execute
from sot.training.run_folder import full_name, kept_split, open_run, removed_unless_begun

logger = logging.getLogger("sot")
LEFT_OUT_FILE = "left_out.txt"


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
        name, weights = self.identity["model"], str(conduct.weights or self.weights)
        for line in chosen_lines(self.model, name, weights, self.recipe, conduct.chosen, self.samples, self.labels):
            say(line)
        if self.left_out:
            write_atomically(out / LEFT_OUT_FILE, "\n".join(self.left_out) + "\n")
            logger.warning(
                "Left out %s that cannot be read, listed in %s: %s",
                *(counted(len(self.left_out), "samples"), out / LEFT_OUT_FILE, "; ".join(self.left_out[:5])),
            )


def adapted(recipe: Recipe, samples: int, metric: str, scores: Sequence[str]) -> Recipe:
    """The recipe for so many samples, with the task's own metric for `auto`; one that has no such score is refused."""
    recipe = recipe.for_samples(samples) if samples else recipe
    if recipe.metric == "auto":
        recipe = replace(recipe, metric=metric)
    if recipe.metric not in (None, *scores):
        raise SettingError("{metric} must be one of {}, or auto, got {!r}", ", ".join(scores), recipe.metric)
    return recipe
