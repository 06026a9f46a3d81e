"""All heads on cached tokens: settings chosen on a part of train, then every seed scored on test once."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from sot.core.head import HeadConfig, SecondOrderHead
from sot.probe.cache import Progress, silent
from sot.probe.features import Features
from sot.probe.fitting import Budget, Choice, Target, Time, choose_settings, rank, score_head, train_head
from sot.probe.heads import count_macs, standardising_head, token_statistics
from sot.probe.journal import Journal
from sot.probe.outcome import Result
from sot.probe.samples import key_digest


@dataclass
class Contest:
    """What the heads compete on; finished rows are in the journal."""

    train: Features
    test: Features
    target: Target
    budget: Budget
    journal: Journal

    def __post_init__(self) -> None:
        self.norm: tuple[Tensor, Tensor] = token_statistics(self.train)

    def run(self, heads: Mapping[str, HeadConfig], seeds: int, progress: Progress = silent) -> list[Result]:
        """Compute what the journal lacks, and put together what it has."""
        jobs = [(head, seed) for head in heads.values() for seed in [None, *range(seeds)]]
        for head, seed in progress(jobs, "Training heads"):
            self.choice(head) if seed is None else self._scored(head, seed)
        return [self._result(name, head, seeds) for name, head in heads.items()]

    def best(self, heads: Mapping[str, HeadConfig]) -> str:
        """The head that did best on the held-out part of the training set; the test set has no say."""
        return max(heads, key=lambda name: rank(self.choice(heads[name])))

    def choice(self, head: HeadConfig) -> Choice:
        """Settings of a head."""
        about = self._about(head, None)
        row = self.journal.find(**about)
        if row is not None:
            return Choice(**row["choice"])
        choice = choose_settings(head, self.train, self.norm, self.target, self.budget)
        self.journal.add({**about, "choice": asdict(choice)})
        return choice

    def fit(self, head: HeadConfig, seed: int) -> tuple[SecondOrderHead, Time]:
        """A head trained on all of the training set with the settings chosen for it."""
        choice = self.choice(head)
        built = standardising_head(head, self.target.num_outputs, self.norm, seed)
        settings = choice.learning_rate, choice.weight_decay, seed
        return built, train_head(built, self.train, self.train.rows, self.target, self.budget, *settings)

    def _scored(self, head: HeadConfig, seed: int) -> dict[str, Any]:
        about = self._about(head, seed)
        row = self.journal.find(**about)
        if row is None:
            built, time = self.fit(head, seed)
            score, loss = score_head(built, self.test, self.test.rows, self.target, self.budget.batch_size)
            row = {**about, "score": score, "loss": loss, "seconds": time.training, "epoch_seconds": time.epoch}
            self.journal.add(row)
        return row

    def _about(self, head: HeadConfig, seed: int | None) -> dict[str, Any]:
        """What a row depends on; `seed` None is the choice of settings."""
        setting = {"train": self.train.key, "test": self.test.key, "task": asdict(self.target)}
        digest = key_digest({**setting, "budget": asdict(self.budget)})
        return {"setting": digest, "seed": seed, "head": head.to_dict()}

    def _result(self, name: str, head: HeadConfig, seeds: int) -> Result:
        rows, choice = [self._scored(head, seed) for seed in range(seeds)], self.choice(head)
        built = standardising_head(head, self.target.num_outputs, self.norm)
        epoch = statistics.median(row["epoch_seconds"] for row in rows)
        return Result(
            head=name,
            config=head,
            scores=[row["score"] for row in rows],
            params=sum(parameter.numel() for parameter in built.parameters() if parameter.requires_grad),
            macs=count_macs(built, self.train.mean_words),
            seconds=statistics.mean(row["seconds"] for row in rows),
            epoch_ratio=epoch / self.train.seconds if self.train.seconds else float("nan"),
            learning_rate=choice.learning_rate,
            weight_decay=choice.weight_decay,
            held_out=choice.score,
        )
