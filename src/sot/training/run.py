"""What a run does beside training: it tells how it goes, keeps what is best, and leaves the model and its card."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import ProgressCallback, TrainerCallback

from sot.errors import Interrupted
from sot.files import as_csv, as_png, counted, in_words, read_object, write_atomically
from sot.models.card import card
from sot.training.engine import BEST, CLASSES_FILE, SoTTrainer
from sot.training.keeping import StopOnSignal, is_score, kept_evaluation, stops_early
from sot.training.recipe import Recipe
from sot.training.run_folder import MANIFEST, last_whole_checkpoint

if TYPE_CHECKING:
    from sot.figures import Drawing

logger = logging.getLogger("sot")
FIRST_WORD, NEXT_WORD = 60, 600  # seconds of an epoch after which a log without bars hears of it, and again
KEPT_FILE = "kept.json"  # what was kept, and its scores: written last
Say = Callable[[str], None]


def execute(
    trainer: SoTTrainer,
    identity: Mapping[str, Any],
    recipe: Recipe,
    out: Path,
    resume: bool,
    labels: list[str],
    say: Say | None = None,
) -> dict[str, float]:
    """Train, from the last whole checkpoint if asked to, evaluate, and leave the model and its card in the folder."""
    checkpoint = last_whole_checkpoint(out) if resume else None
    signals = StopOnSignal()
    trainer.add_callback(signals)
    trainer.add_callback(Report(out, identity["model"]))
    if sys.stderr.isatty():
        trainer.add_callback(Progress())
    elif say is not None:
        trainer.add_callback(Lines(say, recipe))
    history = [] if checkpoint is None else list(read_object(checkpoint / "trainer_state.json")["log_history"])
    if stops_early(history, recipe):  # before it was interrupted: a further step would be one too many
        trainer.state.log_history = history
    else:
        with signals.listening():
            _train(trainer, checkpoint, signals, out)
        if not stops_early(trainer.state.log_history, recipe):
            trainer.evaluate()
    return _finish(trainer, identity, recipe, out, labels)


def _train(trainer: SoTTrainer, checkpoint: Path | None, signals: StopOnSignal, out: Path) -> None:
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if signals.received is None or trainer.state.global_step >= trainer.state.max_steps:
            return
    except KeyboardInterrupt:
        pass
    raise Interrupted(signals.received or 2, last_whole_checkpoint(out))


def _finish(
    trainer: SoTTrainer, identity: Mapping[str, Any], recipe: Recipe, out: Path, labels: list[str]
) -> dict[str, float]:
    """Leave the model that is kept and its card; returns its scores."""
    history = trainer.state.log_history
    kept = kept_evaluation(history, recipe)
    epoch, stopped = round(kept.pop("epoch", 0)), stops_early(history, recipe)
    if recipe.metric is None:
        trainer.save_best(out)
    if trainer.is_world_process_zero():
        if recipe.metric is None:
            write_beside(out / CLASSES_FILE, json.dumps(trainer.by_class, indent=1))
        if recipe.metric is not None and (out / BEST).is_dir():
            _move_files(out / BEST, out)
        told = kept_words(recipe, epoch, stopped)
        by_class = read_object(out / CLASSES_FILE) if (out / CLASSES_FILE).is_file() else {}
        written = model_card(identity, recipe, kept, labels, trainer.model.config.head, told, by_class)
        write_beside(out / "README.md", written)
        write_atomically(out / KEPT_FILE, json.dumps({"epoch": epoch, "metric": recipe.metric, **kept}, indent=1))
    return kept


def write_beside(path: Path, content: str | bytes) -> None:
    """Write a file that a run can do without: a full disk costs this file, and not the run."""
    try:
        write_atomically(path, content)
    except OSError as error:
        logger.warning("%s; the run goes on.", error)


def kept_words(recipe: Recipe, epoch: int, stopped: bool) -> str:
    """Which evaluation was kept and why, in a sentence."""
    last = recipe.epochs + recipe.cooldown_epochs
    if recipe.metric is None:
        return f"The last of {last} epochs was kept."
    worse = counted(recipe.patience, "evaluations")
    why = f", and training stopped after {worse} without a better one" if stopped else ""
    return f"Epoch {epoch} of {last} was kept, the best by {recipe.metric} on the validation set{why}."


def _move_files(source: Path, target: Path) -> None:
    """Move a whole model into place, its weights last: a folder with weights is one that is finished."""
    (source / MANIFEST).unlink(missing_ok=True)
    for file in sorted(source.iterdir(), key=lambda file: file.suffix == ".safetensors"):
        os.replace(file, target / file.name)
    shutil.rmtree(source)


class Lines(TrainerCallback):
    """One plain line an epoch: loss, score, rate and the time left; of a long epoch also how far it is."""

    def __init__(self, say: Say, recipe: Recipe) -> None:
        self.say, self.recipe = say, recipe
        self.begun, self.first_step, self.logged = time.monotonic(), 0, dict[str, Any]()
        self.next_word = self.begun + FIRST_WORD

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The time is that of this process, however much was done before."""
        self.begun, self.first_step = time.monotonic(), state.global_step
        self.next_word = self.begun + FIRST_WORD

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A word from time to time."""
        if time.monotonic() >= self.next_word and state.global_step < state.max_steps:
            self._say(state, f"step {state.global_step:,} of {state.max_steps:,}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Wait for the scores, if there will be any."""
        if "loss" in logs:
            usual = kwargs["optimizer"].param_groups[0]["initial_lr"]  # groups have rates of their own
            self.logged = {**logs, "learning_rate": self.recipe.lr * logs["learning_rate"] / usual}
            last = round(state.epoch) == args.num_train_epochs
            if not control.should_evaluate and not last:
                self._line(state, args, {})

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self._line(state, args, metrics or {})

    def _line(self, state: Any, args: Any, scores: Mapping[str, float]) -> None:
        parts = [f"loss {self.logged['loss']:.4f}"] if "loss" in self.logged else []
        shown = [f"eval_{name}" for name in dict.fromkeys(("loss", "accuracy", self.recipe.metric)) if name]
        parts += [
            f"{'val ' if name == 'eval_loss' else ''}{name[5:]} {scores[name]:.4f}" for name in shown if name in scores
        ]
        parts += [f"lr {self.logged['learning_rate']:.2e}"] if "learning_rate" in self.logged else []
        self._say(state, f"epoch {round(state.epoch)} of {round(args.num_train_epochs)}: {', '.join(parts)}")
        self.logged = {}

    def _say(self, state: Any, what: str) -> None:
        """With the time left, by the steps of this process so far."""
        now, done = time.monotonic(), state.global_step - self.first_step
        left = (now - self.begun) / max(1, done) * (state.max_steps - state.global_step)
        self.next_word = now + NEXT_WORD
        if state.is_world_process_zero:
            self.say(f"{what}, {in_words(left)} left")


class Progress(ProgressCallback):
    """A bar with the time left and the latest scores."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Scores go to the end of the bar, not to standard output."""
        shown = {"loss": "loss", "eval_loss": "val_loss", "eval_accuracy": "accuracy", "eval_mcc": "mcc"}
        if self.training_bar is not None:
            self.training_bar.set_postfix({shown[key]: value for key, value in logs.items() if key in shown})


class Report(TrainerCallback):
    """Writes metrics.csv, metrics.json and curves.png after every evaluation."""

    def __init__(self, out: Path, title: str) -> None:
        self.out, self.title = out, title

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer calls this on every process; one writes."""
        if state.is_world_process_zero:
            rows = epochs_of(state.log_history)
            write_beside(self.out / "metrics.csv", as_csv(rows))
            write_beside(self.out / "metrics.json", json.dumps(rows, indent=1))
            write_beside(self.out / "curves.png", as_png(draw_curves({self.title: rows})))


def epochs_of(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row an epoch: training loss and rate, and what was evaluated."""
    rows: dict[int, dict[str, Any]] = {}
    for entry in history:
        epoch = round(entry.get("epoch", 0))
        row = rows.setdefault(epoch, {"epoch": epoch})
        keep = {"loss": "train_loss", "learning_rate": "learning_rate", "grad_norm": "grad_norm"}
        row |= {name: entry[key] for key, name in keep.items() if key in entry}
        row |= {key: value for key, value in sorted(entry.items()) if is_score(key)}  # as a checkpoint keeps them
    return [row for _, row in sorted(rows.items()) if len(row) > 1]


def draw_curves(runs: Mapping[str, list[dict[str, Any]]]) -> Drawing:
    """Loss, and beside it accuracy or whatever score there is, of one or more runs by epoch."""
    from matplotlib.ticker import MaxNLocator

    from sot.figures import SERIES, SMALL, sheet

    figure, ((left, right),) = sheet(3.8, 1, 2)
    known = ("eval_accuracy", "eval_mcc", "eval_f1", "eval_pearson")
    scores: dict[str, None] = {}
    for number, (title, rows) in enumerate(runs.items()):
        score = next((name for name in known if rows and name in rows[-1]), "")
        scores |= {score: None} if score else {}
        panels = ((left, "train_loss", "--"), (left, "eval_loss", "-"), (right, score, "-"))
        for axes, name, style in panels:
            points = [(row["epoch"], row[name]) for row in rows if name in row]
            if points:
                label = f"{title}, {'training' if style == '--' else 'validation'}"
                axes.plot(*zip(*points), style, color=SERIES[number % len(SERIES)], label=label)
    named = ", ".join(name.removeprefix("eval_") for name in scores) or "score"
    for axes, label in ((left, "loss"), (right, f"{named} on validation")):
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(3, len(labels)), fontsize=SMALL, frameon=False
        )
    return figure


def model_card(
    identity: Mapping[str, Any],
    recipe: Recipe,
    metrics: Mapping[str, float],
    labels: Sequence[str],
    head: Mapping[str, Any],
    kept: str = "",
    by_class: Mapping[str, Mapping[str, float]] | None = None,
) -> str:
    """README.md of a trained model, without paths of this machine; `kept` says which epoch it is of."""
    model, data = (Path(name).name if Path(name).exists() else name for name in (identity["model"], identity["data"]))
    written = card(
        f"{model} on {data}",
        list(labels),
        recipe.task,
        head,
        f"Trained by `sot {identity['command']}`. {kept}".strip(),
        metrics={name.removeprefix("eval_"): value for name, value in metrics.items()},
        dataset=data,
        by_class=by_class,
    )
    return f"{written}\nRecipe: `recipe.yaml`. Metrics by epoch: `metrics.csv`. ![curves](curves.png)\n"
