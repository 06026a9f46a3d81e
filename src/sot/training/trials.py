"""Callbacks of a trial, and what stays of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from transformers import TrainerCallback

from sot.errors import SettingError


class Watch(TrainerCallback):
    """Hands on the score of every evaluation, and leaves out checkpoints: a trial is run again rather than resumed."""

    def __init__(self, metric: str, report: Callable[[int, float], None] | None) -> None:
        self.metric, self.report = metric, report

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After Trainer has decided."""
        control.should_save = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every evaluation but those of further seeds counts for pruning."""
        value = score(kwargs["metrics"], self.metric)
        if self.report is not None:
            self.report(round(state.epoch), value)


def score(metrics: Mapping[str, float], metric: str) -> float:
    """The score that is searched for."""
    if f"eval_{metric}" not in metrics:
        endings = ("_runtime", "_per_second", "epoch")
        accepted = [name.removeprefix("eval_") for name in metrics if not name.endswith(endings)]
        raise SettingError("{metric} must be one of {}, got {!r}", ", ".join(accepted), metric)
    return metrics[f"eval_{metric}"]


class Timed(Exception):
    """Enough steps were timed."""


class Stopwatch(TrainerCallback):
    """Times a few steps, without the first two, and ends the run."""

    def __init__(self, steps: int = 6) -> None:
        self.steps, self.marks = steps, list[float]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer calls this."""
        self.marks.append(perf_counter())
        if len(self.marks) >= self.steps:
            raise Timed

    @property
    def seconds(self) -> float | None:
        """Of a step; None if there were too few."""
        return float(np.median(np.diff(self.marks[1:]))) if len(self.marks) > 2 else None


def keep_numbers(folder: Path) -> None:
    """Of a trial's folder its recipe and metrics: weights of many would fill a disk."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in ("run.json", "recipe.yaml", "metrics.csv", "metrics.json"):
            path.unlink()
