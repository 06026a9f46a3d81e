"""Search settings on a held-out part of the training data, then train the winner on all of it: `sot tune`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from transformers import TrainerCallback

from sot.errors import Interrupted, SettingError
from sot.extras import need
from sot.files import as_csv, read_object, write_atomically
from sot.lock import only_writer
from sot.training.engine import Diverged
from sot.training.keeping import SMALLER_IS_BETTER
from sot.training.run_folder import full_name, open_run
from sot.training.search import Trained, choose_sampler, search_space, settle
from sot.training.train_images import world_size
from sot.training.tuning_jobs import TuningJob
from sot.training.tuning_report import SearchCost, cost_of, draw_trials, last_line

RESULT, WINNER = "result.json", "best"


@dataclass(frozen=True)
class Plan:
    """How to search; None leaves a choice to `tune`."""

    searches: Sequence[str] | None = None
    pinned: Sequence[str] = ()  # settings of the recipe's grid that stay as they are
    sampler: str | None = None
    trials: int | None = None
    prune: bool | None = None
    seeds: int = 1
    held_out: float = 0.2
    metric: str | None = None
    storage: str | None = None
    study: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a search has found; no winner and no development scores while trials run elsewhere."""

    metric: str
    rows: list[dict[str, Any]]
    best: dict[str, Any] | None
    development: dict[str, float] | None
    elsewhere: list[str]


class Tuner:
    """One search: its space, its sampler, and how many trials it has."""

    def __init__(self, job: TuningJob, trained: Trained, plan: Plan) -> None:
        need("optuna", "tuning", "tune")
        if world_size() > 1:
            raise SettingError("a trial is one process: start one command for each device, with the same {storage}")
        self.job, self.trained, self.plan = job, trained, plan
        self.space, self.idle = search_space(trained, plan.searches or (), plan.pinned)
        self.metric = plan.metric or job.metric
        self.sampler, self.total = choose_sampler(self.space, plan.sampler, plan.trials)
        self.prune = self.sampler != "grid" if plan.prune is None else plan.prune

    def cost(self, folder: Path) -> SearchCost:
        """What the search will cost, by a few timed steps in a folder for them."""
        watch = Stopwatch()
        recipe, head = settle(self.trained, {})
        with suppress(Timed), _nothing_kept():
            self.job.train(folder / "timed", (recipe, head), False, report_to="none", callbacks=[watch])
        rate = None if watch.seconds is None else watch.seconds / min(recipe.batch_size, self.job.samples[0])
        return cost_of(self.space, recipe, self.total * self.plan.seeds, self.job.samples, rate)

    def identity(self) -> dict[str, Any]:
        """What must be the same for trials to be compared."""
        _, head = self.trained
        searched = {name: str(values) for name, values in self.space.items()}
        own = {"search": searched, "sampler": self.sampler, "metric": self.metric, "seeds": self.plan.seeds}
        own |= {"held_out": self.plan.held_out, "head": None if head is None else head.to_dict()}
        return {"command": "tune", "model": full_name(self.job.model), "data": full_name(self.job.data), **own}

    def run(
        self,
        out: Path,
        *,
        resume: bool = False,
        overwrite: bool = False,
        report_to: str = "tensorboard",
        tell: Callable[[str], None] = lambda line: None,
    ) -> Outcome:
        """Run the trials that are left, keep table, figure and best recipe in `out`, and train the winner."""
        from sot.training.study import Search

        recipe, _ = self.trained
        with open_run(out, {**self.identity(), **self.job.source}, recipe, resume, overwrite):
            pass  # from here on others may help
        lower, storage = self.metric in SMALLER_IS_BETTER, self.plan.storage or f"sqlite:///{out.resolve()}/study.db"
        name = self.plan.study or out.resolve().name
        search = Search(storage, name, self.space, self.sampler, recipe.seed, self.prune, lower)
        search.join({"name": Path(self.job.data).name, "recipe": recipe.to_yaml(), **_portable(self.identity())})

        def finished() -> None:
            with only_writer(out, wait=True):
                self._write(out, search)
            tell(last_line(search.rows(), self.metric, self.total, search.best()))

        search.run(lambda number, values, report: self._try(out, number, values, report), self.total, finished)
        with only_writer(out, wait=True):
            self._write(out, search)
        best, elsewhere = search.best(), search.running()
        if best is None and not elsewhere:
            raise ValueError(f"no trial of {len(search.rows())} finished: {search.rows()[-1]['error']}")
        found = None if best is None else {"trial": best.number, "value": best.value, "settings": best.params}
        scores = None if found is None or elsewhere else self._train_winner(out, found, report_to, tell)
        return Outcome(self.metric, search.rows(), found, scores, elsewhere)

    def _try(self, out: Path, number: int, values: dict[str, Any], report: Callable[[int, float], None]) -> float:
        """The mean score of a trial over its seeds; of its folder the numbers stay."""
        from sot.training.study import Failure

        recipe, head = settle(self.trained, values)
        found = []
        for turn in range(self.plan.seeds):
            folder = out / "trials" / (f"{number}" if self.plan.seeds == 1 else f"{number}-seed{turn}")
            watch = Watch(self.metric, None if turn else report)
            seeded = replace(recipe, seed=recipe.seed + turn)
            try:
                metrics = self.job.train(folder, (seeded, head), False, report_to="none", callbacks=[watch])
            except Diverged as error:
                raise Failure(str(error)) from error
            finally:
                keep_numbers(folder)
            found.append(score(metrics, self.metric))
        return float(np.mean(found))

    def _write(self, out: Path, search: Any) -> None:
        rows, best = search.rows(), search.best()
        if not rows:
            return
        write_atomically(out / "trials.csv", as_csv(rows))
        write_atomically(out / "trials.png", draw_trials(rows, self.space, self.metric))
        if best is not None:
            write_atomically(out / "best.yaml", settle(self.trained, best.params)[0].to_yaml())

    def _train_winner(
        self, out: Path, found: dict[str, Any], report_to: str, tell: Callable[[str], None]
    ) -> dict[str, float]:
        """Development scores of the winner, trained unless it has been."""
        before = read_object(out / RESULT) if (out / RESULT).is_file() else {}
        folder, same = out / WINNER, before.get("trial") == found["trial"]
        if same and before.get("development"):
            return dict(before["development"])
        write_atomically(out / RESULT, json.dumps({"metric": self.metric, **found}, indent=2))
        tell(f"training on all data with the settings of trial {found['trial']}, in {folder}")
        there = folder.exists()
        goes_on = {"resume": there and same, "overwrite": there and not same}
        scores = self.job.train(folder, settle(self.trained, found["settings"]), True, report_to=report_to, **goes_on)
        write_atomically(out / RESULT, json.dumps({"metric": self.metric, **found, "development": scores}, indent=2))
        return scores


class Watch(TrainerCallback):
    """Hands on the score of every evaluation, and leaves out checkpoints: a trial is run again rather than resumed."""

    def __init__(self, metric: str, report: Callable[[int, float], None] | None) -> None:
        self.metric, self.report = metric, report

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """What a signal interrupts here was saved in a folder that is removed."""
    try:
        yield
    except Interrupted as stop:
        raise Interrupted(stop.number, None) from stop


def _portable(identity: dict[str, Any]) -> dict[str, Any]:
    """What is the same on other machines, where paths are not."""
    names = {"model": Path(identity["model"]).name, "data": Path(identity["data"]).name}
    return {**identity, **names}
