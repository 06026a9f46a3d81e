"""A run folder: what is in it beside the model, and who may write to it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import ProgressCallback, TrainerCallback

from sot.core.head import HeadConfig
from sot.errors import SettingError
from sot.files import as_csv, as_png, read_object, write_atomically
from sot.models.folder import show_bars_on_terminals_only as show_bars_on_terminals_only
from sot.training.checkpoints import UNFINISHED, last_whole_checkpoint
from sot.training.engine import SoTTrainer
from sot.training.recipe import Recipe

RUN_FILE = "run.json"


def full_name(name: str) -> str:
    """A local path in full, so that it means the same from everywhere; any other name as it is."""
    if name == "digits":  # the built-in set, even where there is a folder of this name
        return name
    if Path(name).exists():
        return str(Path(name).resolve())
    kind, _, root = name.partition("@")
    return f"{kind}@{Path(root).resolve()}" if root and kind.startswith(("torch/", "wds/")) else name


def open_run(out: Path, identity: Mapping[str, Any], recipe: Recipe, resume: bool, overwrite: bool) -> None:
    """Prepare the folder of a run; one that exists needs `resume`, of the same model and data, or `overwrite`."""
    if resume and overwrite:
        raise SettingError("{resume} continues the run in {} and {overwrite} replaces it: give one of them", out)
    check_folder(out)
    used = out.exists() and any(path.name != f".{RUN_FILE}.partial" for path in out.iterdir())  # of a killed start
    if used and not (resume or overwrite):
        raise SettingError("{} exists: continue it with {resume} or replace it with {overwrite}", out)
    if used and resume:
        _check_same_run(out, {**identity, "recipe": recipe.to_yaml()})
    if used and overwrite:
        _check_replaceable(out, identity)
    processes = PartialState()
    processes.wait_for_everyone()  # all have looked before one writes
    if processes.is_main_process:
        if used and resume:
            shutil.rmtree(out / UNFINISHED, ignore_errors=True)
        elif used:
            _empty(out)
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / RUN_FILE, json.dumps({**identity, "recipe": recipe.to_yaml()}, indent=2))
        write_atomically(out / "recipe.yaml", recipe.to_yaml())
    processes.wait_for_everyone()


def check_folder(folder: Path, rule: str = "{out} must be a folder") -> None:
    """Raise ValueError where a folder can be neither opened nor made: there is a file, in its place or above."""
    found = next(path for path in (folder, *folder.parents) if path.exists())
    if not found.is_dir():
        raise SettingError(f"{rule}, and {{}} is a file", found)


def _check_replaceable(out: Path, identity: Mapping[str, Any]) -> None:
    """Raise ValueError unless `out` is a run, and nothing that is in use lies inside."""
    if not (out / RUN_FILE).is_file():
        said = "{} is not the folder of a run: it has no {}, and {overwrite} replaces runs only"
        raise SettingError(said, out, RUN_FILE)
    named = {name: value for name in ("model", "data", "source", "dev") if isinstance(value := identity.get(name), str)}
    for what, name in {"current directory": str(Path.cwd()), **named}.items():
        place = Path(full_name(name))
        place = place if place.is_absolute() else Path(full_name(name).partition("@")[2])
        if place.is_absolute() and place.is_relative_to(out.resolve()):  # other names are no local paths
            raise SettingError("{overwrite} would delete the {}, which is in {}: choose another {out}", what, out)


def _empty(out: Path) -> None:
    """Remove a run except its run.json, which is written anew: without it an interrupted removal would be no run."""
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != RUN_FILE:
            path.unlink()


def _check_same_run(out: Path, identity: Mapping[str, Any]) -> None:
    file = out / RUN_FILE
    if not file.is_file():
        raise ValueError(f"{out} is not the folder of a run: it has no {RUN_FILE}")
    before = read_object(file)
    for name, value in identity.items():
        same = before.get(name) == value
        if name in ("model", "data") and isinstance(before.get(name), str):  # however a path is spelt
            same = full_name(before[name]) == full_name(value)
        if name == "head" and before.get(name) and value:
            same = HeadConfig.from_saved(before[name]).to_dict() == value
        if not same:
            was = "another recipe" if name == "recipe" else f"{name} {before.get(name)!r}, not {value!r}"
            raise ValueError(f"{out} is a run of {was}: resume it as it was started, or choose another folder")


def execute(
    trainer: SoTTrainer, identity: Mapping[str, Any], recipe: Recipe, out: Path, resume: bool, labels: list[str]
) -> dict[str, float]:
    """Train, from the last whole checkpoint if asked to, evaluate, and leave the model and its card in the folder."""
    checkpoint = last_whole_checkpoint(out) if resume else None
    trainer.add_callback(Report(out, identity["model"]))
    if sys.stderr.isatty():
        trainer.add_callback(Progress())
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    metrics = {key: value for key, value in trainer.evaluate().items() if _is_score(key)}
    trainer.save_best(out)
    if trainer.is_world_process_zero():
        write_atomically(out / "README.md", model_card(identity, recipe, metrics, labels, trainer.model.config.head))
    return metrics


def _is_score(name: str) -> bool:
    return name.startswith("eval_") and not name.endswith(("_per_second", "_runtime"))


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
            write_atomically(self.out / "metrics.csv", as_csv(rows))
            write_atomically(self.out / "metrics.json", json.dumps(rows, indent=1))
            write_atomically(self.out / "curves.png", draw_curves({self.title: rows}))


def epochs_of(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row an epoch: training loss and rate, and what was evaluated."""
    rows: dict[int, dict[str, Any]] = {}
    for entry in history:
        epoch = round(entry.get("epoch", 0))
        row = rows.setdefault(epoch, {"epoch": epoch})
        keep = {"loss": "train_loss", "learning_rate": "learning_rate", "grad_norm": "grad_norm"}
        row |= {name: entry[key] for key, name in keep.items() if key in entry}
        row |= {key: value for key, value in entry.items() if _is_score(key)}
    return [row for _, row in sorted(rows.items()) if len(row) > 1]


def draw_curves(runs: Mapping[str, list[dict[str, Any]]]) -> bytes:
    """Loss and accuracy (or whatever score there is) of one or more runs, side by side, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (title, rows) in enumerate(runs.items()):
        colour = f"C{number}"
        for name, style in (("train_loss", "--"), ("eval_loss", "-")):
            points = [(row["epoch"], row[name]) for row in rows if name in row]
            left.plot(
                *zip(*points), style, color=colour, label=f"{title}, {name.replace('_', ' ')}"
            ) if points else None
        score = next(
            (name for name in ("eval_accuracy", "eval_mcc", "eval_f1", "eval_pearson") if name in rows[-1]), None
        )
        points = [(row["epoch"], row[score]) for row in rows if score in row]
        right.plot(*zip(*points), color=colour, label=title) if points else None
    for axes, label in ((left, "loss"), (right, "score on validation")):
        axes.set(xlabel="epoch", ylabel=label)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    return as_png(figure)


def model_card(
    identity: Mapping[str, Any],
    recipe: Recipe,
    metrics: Mapping[str, float],
    labels: list[str],
    head: Mapping[str, Any],
) -> str:
    """README.md of a trained model."""
    usual = HeadConfig(pool=head["pool"], fusion=head["fusion"]).to_dict()
    named = ["fusion"] if head["fusion"] == "class" else ["fusion", "pool"]
    settings = {name: value for name, value in head.items() if value != usual[name] or name in named}
    scores = "\n".join(f"| {name.removeprefix('eval_')} | {value:.4f} |" for name, value in metrics.items())
    shown = ", ".join(labels[:20]) + (", …" if len(labels) > 20 else "")
    return f"""---
library_name: transformers
tags: [sot, second-order]
---
# {identity["model"]} on {identity["data"]}

Trained by `sot {identity["command"]}` with the head {settings}.

| validation | |
|---|---|
{scores}

Classes: {shown}.

```python
import sot
from transformers import pipeline

classify = pipeline("{"image" if recipe.task == "image" else "text"}-classification", "this folder")
```

Recipe: `recipe.yaml`. Metrics by epoch: `metrics.csv`. ![curves](curves.png)
"""
