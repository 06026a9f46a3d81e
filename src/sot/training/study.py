"""Which trial comes next: a study of Optuna, in a file or a database that many machines share."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.storages.journal import JournalFileBackend, JournalRedisBackend
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from sot.data.images import make_seed
from sot.errors import SettingError
from sot.files import one_line
from sot.training.search import Range, Space

HEARTBEAT: dict[str, Any] = {"heartbeat_interval": 60, "grace_period": 180}  # seconds; silent for longer is gone
Report = Callable[[int, float], None]
Objective = Callable[[int, dict[str, Any], Report], float]
optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


class Failure(Exception):
    """A trial that cannot be finished, and is not worth another try, for the reason that it says."""


class Search:
    """The trials of a study: asks for the next, and runs again what was interrupted."""

    def __init__(self, storage: str, name: str, space: Space, sampler: str, seed: int, prune: bool, lower: bool):
        self.space, self.sampler, self.seed = space, sampler, seed
        pruner: Any = optuna.pruners.MedianPruner(n_warmup_steps=1) if prune else optuna.pruners.NopPruner()
        direction: Any = "minimize" if lower else "maximize"
        try:
            self.study = optuna.create_study(
                storage=_open(storage), study_name=name, direction=direction, pruner=pruner, load_if_exists=True
            )
        except (SQLAlchemyError, ModuleNotFoundError, ImportError, OSError) as error:
            raise SettingError("{storage} cannot be opened: {}", one_line(error)) from error
        self.study.sampler = self._make_sampler(seed)
        self.retry = RetryHeartbeatStaleTrialCallback()

    def _make_sampler(self, seed: int) -> BaseSampler:
        if self.sampler == "grid":
            return GridSampler({name: list(values) for name, values in self.space.items()}, seed=seed)  # type: ignore[arg-type]
        return RandomSampler(seed) if self.sampler == "random" else TPESampler(seed=seed)

    def join(self, identity: Mapping[str, Any]) -> None:
        """Refuse a study of this name that searches something else."""
        ours = json.dumps(identity, sort_keys=True, default=str)
        before = self.study.user_attrs.get("identity", ours)
        if before != ours:
            said = "the study {!r} in {storage} searches something else: name another {study}"
            raise SettingError(said, self.study.study_name)
        self.study.set_user_attr("identity", ours)

    def run(self, objective: Objective, total: int, tell: Callable[[], None]) -> None:
        """Try until the study has so many trials, those that run elsewhere included; `tell` is called after each."""
        self._revive()
        while self.left(total) > 0:
            try:
                self.study.optimize(
                    lambda trial: self._try(trial, objective), 1, catch=Failure, callbacks=[lambda *_: tell()]
                )
            except BaseException:
                self._revive()
                raise

    def _try(self, trial: Trial, objective: Objective) -> float:
        trial.set_user_attr("worker", [socket.gethostname(), os.getpid()])
        if self.sampler != "grid":  # of every trial other random numbers, the same whoever runs it and when
            self.study.sampler = self._make_sampler(make_seed(self.seed, trial.number))
        values = {name: _suggest(trial, name, choices) for name, choices in self.space.items()}

        def report(step: int, value: float) -> None:
            trial.report(value, step)
            if trial.should_prune():
                raise optuna.TrialPruned

        try:
            return objective(trial.number, values, report)
        except Failure as failure:
            trial.set_user_attr("error", str(failure))
            raise

    def left(self, total: int) -> int:
        """How many trials are still to be started."""
        return total - sum(map(_is_spent, self.study.trials)) - len(self.running())

    def running(self) -> list[str]:
        """Where trials run that this process does not."""
        found = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return ["{}, process {}".format(*trial.user_attrs.get("worker", ("?", "?"))) for trial in found]

    def _revive(self) -> None:
        """Put what this process, a dead one of this machine or a machine that is gone has left back into the queue."""
        fail_stale_trials(self.study)
        for trial in self.study.get_trials(states=(TrialState.RUNNING, TrialState.FAIL)):
            if trial.state == TrialState.RUNNING and _lives(*trial.user_attrs.get("worker", ("", 0))):
                continue
            if trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
            retried = {number for each in self.study.trials for number in each.system_attrs.get("retry_history", ())}
            if "error" not in trial.user_attrs and trial.number not in retried:
                self.retry(self.study, trial)

    def best(self) -> FrozenTrial | None:
        """The best of the finished trials."""
        finished = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return self.study.best_trial if finished else None

    def rows(self) -> list[dict[str, Any]]:
        """One row a trial: number, state, score, settings, seconds, and why it failed."""
        waiting = (TrialState.WAITING,)
        return [_row(trial, self.space) for trial in self.study.trials if trial.state not in waiting]


def _row(trial: FrozenTrial, space: Space) -> dict[str, Any]:
    states = {TrialState.FAIL: "failed" if "error" in trial.user_attrs else "interrupted"}
    ended = trial.datetime_complete
    return {
        "trial": trial.number,
        "state": states.get(trial.state, trial.state.name.lower()),
        "value": trial.value if trial.state == TrialState.COMPLETE else None,
        **{name: trial.params.get(name) for name in space},
        "seconds": None if trial.duration is None else round(trial.duration.total_seconds(), 1),
        "ended": None if ended is None else ended.isoformat(timespec="milliseconds"),
        "error": trial.user_attrs.get("error"),
    }


def _is_spent(trial: FrozenTrial) -> bool:
    failed = trial.state == TrialState.FAIL and "error" in trial.user_attrs
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED) or failed


def _lives(host: str, process: int) -> bool:
    """Whether a trial's process may still be at work; of another machine its heartbeat tells."""
    if host != socket.gethostname():
        return host != ""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _suggest(trial: Trial, name: str, choices: Any) -> Any:
    if not isinstance(choices, Range):
        return trial.suggest_categorical(name, choices)
    if choices.whole:
        return trial.suggest_int(name, int(choices.low), int(choices.high), log=choices.log)
    return trial.suggest_float(name, choices.low, choices.high, log=choices.log)


def _open(storage: str) -> BaseStorage:
    """A database by its URL, Redis, or a journal file: the last works on a disk that machines share."""
    if storage.startswith(("redis://", "rediss://")):
        return JournalStorage(JournalRedisBackend(storage))
    if "://" not in storage:
        Path(storage).parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(storage))
    return RDBStorage(storage, **HEARTBEAT, heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback())
