"""All heads on cached tokens: settings chosen by cross-validation of train, then every seed scored on test once."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import normalize
from torch import Tensor

from sot.core.head import HeadConfig, SecondOrderHead
from sot.probe.budget import Budget
from sot.probe.cache import Progress, silent
from sot.probe.features import Array, Features, clock
from sot.probe.fitting import (
    Choice,
    Seconds,
    Target,
    choose_settings,
    rank,
    score_head,
    score_outputs,
    train_head,
)
from sot.probe.heads import count_macs, representations, standardising_head, token_statistics
from sot.probe.journal import Journal
from sot.probe.names import PLAIN
from sot.probe.outcome import Result
from sot.probe.samples import key_digest
from sot.probe.second_order import FittedHead, fit_second_order

SOLVED: dict[str, list[str] | None] = {  # heads that are a convex problem, by the mixtures that they may be
    **{"class": ["class"], "gap": ["average"], "class+gap": ["class + average"]},
    "sot": None,
}
ENGINE = 3  # of rows that can be compared; it grows when heads are chosen or fitted in another way,
ENGINES = {"sot": 4}  # or that of one head


@dataclass
class Contest:
    """What the heads compete on; finished rows are in the journal.

    With `labels`, so many of each class are drawn anew for every seed; else all are used.
    """

    train: Features
    test: Features
    target: Target
    budget: Budget
    journal: Journal
    labels: int | None = None

    def __post_init__(self) -> None:
        self.norm_of = lru_cache(maxsize=2)(self._norm)
        self.solved = lru_cache(maxsize=2)(self._solve)

    def run(self, heads: Mapping[str, HeadConfig | None], seeds: int, progress: Progress = silent) -> list[Result]:
        """Compute what the journal lacks, and put together what it has."""
        jobs = [(name, seed) for name in heads for seed in range(seeds)]
        title = "Fitting heads" if self.labels is None else f"Fitting heads on {self.labels} labels a class"
        for name, seed in progress(jobs, title):
            self._scored(name, heads[name], seed)
        return [self._result(name, heads[name], seeds) for name in heads]

    def best(self, heads: Mapping[str, HeadConfig | None]) -> str | None:
        """The head that did best on what was held out of the training set; the test set has no say."""
        able = [name for name in heads if name not in PLAIN]
        return max(able, key=lambda name: rank(self.choice(name, heads[name]))) if able else None

    def rows(self, seed: int) -> Array:
        """The training samples of a seed."""
        if self.labels is None:
            return self.train.rows
        draw, classes = np.random.default_rng(seed), self.train.labels[self.train.rows]
        drawn = [draw.permutation(self.train.rows[classes == each])[: self.labels] for each in np.unique(classes)]
        return np.sort(np.concatenate(drawn))

    def choice(self, name: str, head: HeadConfig | None, seed: int = 0) -> Choice:
        """Settings of a head; of drawn labels each draw has its own."""
        draw = 0 if self.labels is None else seed
        about = self._about(name, head, None) | ({} if self.labels is None else {"draw": draw})
        row = self.journal.find(**about)
        if row is not None:
            return Choice(**row["choice"])
        if name in SOLVED:
            chosen = self.solved(name, draw)[0].chosen
            assert chosen is not None
            choice = Choice(0.0, chosen.penalty, chosen.score, chosen.loss)
        else:
            assert head is not None
            rows = self.rows(draw)
            choice = choose_settings(head, self.train, rows, self.norm_of(draw), self.target, self.budget)
        self.journal.add({**about, "choice": asdict(choice)})
        return choice

    def fit(self, name: str, head: HeadConfig | None, seed: int) -> tuple[SecondOrderHead, Seconds]:
        """A head fitted on the training set with the settings chosen for it."""
        if name in SOLVED:
            fitted, seconds = self.solved(name, seed)
            return fitted.head, (seconds, seconds)
        assert head is not None
        choice = self.choice(name, head, seed)
        built = standardising_head(head, self.target.num_outputs, self.norm_of(seed), seed)
        settings = choice.learning_rate, choice.weight_decay, seed
        return built, train_head(built, self.train, self.rows(seed), self.target, self.budget, *settings)

    def _solve(self, name: str, seed: int) -> tuple[FittedHead, float]:
        began, rows = clock(), self.rows(seed)
        targets = self.target.one_hot(self.train.labels[rows])
        options: dict[str, Any] = {"names": SOLVED[name], "seed": seed, "search_folds": self.budget.search_folds}
        fitted = fit_second_order(self.train, rows, targets, self.target, **options)
        return fitted, clock() - began

    def _norm(self, seed: int) -> tuple[Tensor, Tensor]:
        return token_statistics(self.train, self.rows(seed))

    def _scored(self, name: str, head: HeadConfig | None, seed: int) -> dict[str, Any]:
        about = self._about(name, head, seed)
        row = self.journal.find(**about)
        if row is None:
            if name in PLAIN:
                began = clock()
                rows = self.train.rows if name == "majority" else self.rows(seed)  # drawn ones have none
                outputs = plain_outputs(name, self.train, rows, self.test, self.target)
                scored = score_outputs(outputs, self.test.labels[self.test.rows], self.target)
                seconds = clock() - began, clock() - began
            else:
                self.choice(name, head, seed)  # kept, whatever happens to the training
                built, seconds = self.fit(name, head, seed)
                scored = score_head(built, self.test, self.test.rows, self.target, self.budget.batch_size)
            row = about | dict(zip(("score", "loss", "seconds", "epoch_seconds"), (*scored, *seconds)))
            self.journal.add(row)
        return row

    def _about(self, name: str, head: HeadConfig | None, seed: int | None) -> dict[str, Any]:
        """What a row depends on; `seed` None is the choice of settings."""
        setting: dict[str, Any] = {"train": self.train.key, "test": self.test.key, "task": asdict(self.target)}
        setting |= {"engine": ENGINES.get(name, ENGINE)} | ({} if self.labels is None else {"labels": self.labels})
        budget = {name: value for name, value in asdict(self.budget).items() if value is not None}
        digest = key_digest({**setting, "budget": budget})
        return {"setting": digest, "seed": seed, "head": name if head is None else head.to_dict()}

    def _result(self, name: str, head: HeadConfig | None, seeds: int) -> Result:
        rows = [self._scored(name, head, seed) for seed in range(seeds)]
        epoch = statistics.median(row["epoch_seconds"] for row in rows)
        built = None if name in PLAIN else self._shape(name, head)
        choice = None if name in PLAIN else self.choice(name, head)
        return Result(
            head=name,
            config=None if built is None else built.config,
            scores=[row["score"] for row in rows],
            params=0 if built is None else sum(each.numel() for each in built.parameters() if each.requires_grad),
            macs=0 if built is None else count_macs(built, self.train.mean_words),
            seconds=statistics.mean(row["seconds"] for row in rows),
            epoch_ratio=epoch / self.train.seconds if self.train.seconds else float("nan"),
            learning_rate=0.0 if choice is None else choice.learning_rate,
            weight_decay=0.0 if choice is None else choice.weight_decay,
            held_out=None if choice is None else choice.score,
            labels=self.labels,
        )

    def _shape(self, name: str, head: HeadConfig | None) -> SecondOrderHead:
        """A head as large as those that were fitted; what is not of one form, as the first was."""
        if head is not None:
            return standardising_head(head, self.target.num_outputs, self.norm_of(0))
        return self.solved(name, 0)[0].head


def plain_outputs(name: str, train: Features, rows: Array, test: Features, target: Target) -> Array:
    """Logits `(test samples, outputs)` of the `majority`, or of a `logreg` on averages of unit length."""
    labels = train.labels[rows]
    if name == "majority":
        share = target.one_hot(labels).mean(0).numpy()
        constant = share if target.link == "identity" else np.log(share.clip(1e-9))
        return np.repeat(constant[None], len(test.rows), axis=0)
    as_they_are = torch.zeros(train.dim), torch.ones(train.dim)
    average = standardising_head(HeadConfig(pool="gap", fusion="word", pre_norm=True), 0, as_they_are)
    fit, score = (normalize(representations(average, *each).numpy()) for each in ((train, rows), (test, test.rows)))
    if target.link == "identity":
        return Ridge().fit(fit, labels).predict(score)[:, None]
    model = LogisticRegression(max_iter=1000).fit(fit, labels.astype(int))
    outputs = np.full((len(score), target.num_outputs), -np.inf)
    outputs[:, model.classes_] = model.predict_log_proba(score)
    return np.maximum(outputs, -50.0)  # of classes that no sample had


def rotated(features: Features, folds: Sequence[str]) -> list[tuple[Features, Features]]:
    """What to fit and what to score, for every fold that the data names; what does not take part has no label.

    Settings are chosen by folds too: clips of one recording stay together.
    """
    names, found = np.asarray(folds), []
    for name in dict.fromkeys(sorted(folds)):
        parts = []
        for part, taken in (("fitted", names != name), ("scored", names == name)):
            key = {**(features.key or {}), "fold": name, "part": part, "chosen": "by folds"}
            labels = np.where(taken.reshape(-1, *[1] * (features.labels.ndim - 1)), features.labels, np.nan)
            seconds = features.seconds * float(taken.mean())
            parts.append(replace(features, labels=labels, key=key, seconds=seconds, folds=names))
        found.append((parts[0], parts[1]))
    return found


def over_folds(results: Sequence[Sequence[Result]]) -> list[Result]:
    """One result a head: its score on each fold, and what it costs on average; settings are those of the last."""
    if len(results) == 1:
        return [*results[0]]
    merged = []
    for of_head in zip(*results):
        held_out = [each.held_out for each in of_head if each.held_out is not None]
        merged.append(
            replace(
                of_head[-1],
                scores=[each.mean for each in of_head],
                seconds=float(np.mean([each.seconds for each in of_head])),
                held_out=float(np.mean(held_out)) if held_out else None,
            )
        )
    return merged
