"""Which evaluation of a run is kept, when it stops early, and what a signal leaves: read off the history of the run.

The history is saved with every checkpoint, so that a run that is resumed decides as if it had never stopped.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from sot.training.recipe import Recipe

FEW_STEPS = 100  # of an epoch
SMALLER_IS_BETTER = ("loss", "calibration_error")
Row = Mapping[str, Any]


def is_score(name: str) -> bool:
    """Whether an entry of the history is a score of an evaluation."""
    return name.startswith("eval_") and not name.endswith(("_per_second", "_runtime"))


def evaluations(history: Sequence[Row], metric: str) -> list[Row]:
    """The evaluations that a history holds."""
    return [row for row in history if f"eval_{metric}" in row]


def best_of(rows: Sequence[Row], metric: str) -> int:
    """Number of the first evaluation that none is better than: by its score, and of equal ones by its loss.

    Few samples tie soon: all of five may be right in the first epoch. What is no number is worst.
    """
    signs = {metric: -1.0 if metric in SMALLER_IS_BETTER else 1.0, "loss": -1.0}

    def goodness(number: int) -> list[float]:
        values = [sign * float(rows[number].get(f"eval_{name}", math.nan)) for name, sign in signs.items()]
        return [-math.inf if math.isnan(value) else value for value in values]

    return max(range(len(rows)), key=goodness)


def stops_early(history: Sequence[Row], recipe: Recipe) -> bool:
    """Whether the last evaluations, as many as the recipe's patience, were all no better than one before."""
    if not recipe.patience or recipe.metric is None:
        return False
    rows = evaluations(history, recipe.metric)
    return bool(rows) and len(rows) - 1 - best_of(rows, recipe.metric) >= recipe.patience


def kept_evaluation(history: Sequence[Row], recipe: Recipe) -> dict[str, float]:
    """Scores of the evaluation whose weights a run keeps: the best if its recipe has a metric, else the last."""
    rows = evaluations(history, recipe.metric or "loss")
    row = rows[best_of(rows, recipe.metric) if recipe.metric else -1]
    return {name: value for name, value in row.items() if is_score(name) or name == "epoch"}


class DecideAtEpochs(TrainerCallback):
    """Evaluates when the recipe asks for it but after the last epoch, when `execute` does, and stops early."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After Trainer has decided; an epoch that a signal cut short is neither evaluated nor logged."""
        epoch = round(state.epoch)
        if abs(state.epoch - epoch) > 1e-6:
            control.should_evaluate = control.should_log = False
        due, last = epoch % self.recipe.evaluate_every == 0, epoch >= args.num_train_epochs
        control.should_evaluate &= due and not last
        if state.max_steps < FEW_STEPS * args.num_train_epochs and not control.should_training_stop:
            control.should_save &= due or last  # writing would take longer than such an epoch

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop if the last evaluations were no better."""
        control.should_training_stop |= stops_early(state.log_history, self.recipe)


class KeepLoss(TrainerCallback, ExportableState):
    """Keeps in checkpoints the loss since it was last told: of an epoch that was interrupted it is the mean of all."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def state(self) -> dict[str, Any]:
        """What trainer_state.json keeps; of several processes it is the first's."""
        since, total = getattr(self.trainer, "_globalstep_last_logged", 0), getattr(self.trainer, "_tr_loss", 0.0)
        return {"args": {}, "attributes": {"since": since, "sum": float(total)}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer begins a resumed run at zero."""
        kept = state.stateful_callbacks.setdefault("KeepLoss", {}).get("attributes", {})  # checkpoints of old have none
        if state.global_step and "since" in kept:
            self.trainer._globalstep_last_logged = kept["since"]
            self.trainer._tr_loss.fill_(kept["sum"])


class StopOnSignal(TrainerCallback):
    """The first Ctrl-C or SIGTERM ends a run after the step that is being done, with a checkpoint; the second at once.

    Attributes:
        received: Number of the signal, or None.
    """

    def __init__(self) -> None:
        self.received: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals for as long as the context lasts; only a main thread can."""
        if current_thread() is not main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All processes stop at the same step, whichever got the signal."""
        if self._agreed(args):
            control.should_save = control.should_training_stop = True

    def _agreed(self, args: Any) -> bool:
        if args.world_size == 1:
            return self.received is not None
        said = torch.tensor(self.received or 0, device=args.device)
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX)
        agreed = int(said)
        self.received = self.received or agreed or None  # one that came while the others answered is told next time
        return agreed != 0
