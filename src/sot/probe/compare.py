"""Compare heads on a frozen backbone: tokens are computed once, then every head is trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sot.errors import SettingError
from sot.models.equip import Equipped
from sot.probe.budget import Budget
from sot.probe.cache import Progress, cache_features, silent
from sot.probe.choice import draw_folds
from sot.probe.contest import Contest, over_folds, rotated
from sot.probe.features import Features
from sot.probe.frozen import Data, save_model, with_head
from sot.probe.heads import choose_heads
from sot.probe.journal import Journal
from sot.probe.outcome import ProbeComparison, check_results_folder

FEW_LABELS = 128  # a class: up to here ten draws tell their spread


def compare_heads(
    model: Equipped,
    name: str,
    data: Data,
    heads: Sequence[str],
    out: Path,
    *,
    cache: Path | None = None,
    seeds: int | None = None,
    budget: Budget | None = None,
    representation: int | None = None,
    labels: Sequence[int | None] = (None,),
    progress: Progress = silent,
) -> ProbeComparison:
    """Compare heads on the backbone of `model`, called `name`; tables, a picture and the best model go to `out`.

    `labels` has how many of each class are drawn, anew for every seed; None is all. There are 10 seeds of few labels
    and 3 of more by default, and one where folds take turns: scores are those of the folds then.
    """
    chosen = choose_heads(heads, model.config.hidden_size, model.config.has_class_token, representation)
    budget = budget or Budget()
    draw_folds(None, len(data.train))  # refuses too few before the long work
    check_results_folder(out)
    train, test = (cache_features(model, part, cache or out / "cache", progress) for part in (data.train, data.test))
    _check_labels(train, labels, data.labels)
    journal = Journal(out / "rows.jsonl")  # one: each writes all that it knows
    turns = [(train, test)] if data.folds is None else rotated(train, data.folds)
    results = []
    for count in labels:
        contests = [Contest(*turn, data.target, budget, journal, count) for turn in turns]
        repeats = seeds or (1 if data.folds else seeds_of(count))
        results += over_folds([contest.run(chosen, repeats, progress) for contest in contests])
    best = contests[-1].best(chosen)
    seconds = train.seconds, train.unsorted_seconds
    comparison = ProbeComparison(name, data.name, data.metric, *seconds, results, best, len(turns))
    comparison.write(out)
    if best is not None:
        head, _ = contests[-1].fit(best, chosen[best], seed=0)
        run = {"command": "probe", "model": name, "data": data.place, "head": head.config.to_dict()}
        problem = "regression" if data.labels is None else "single_label_classification"
        save_model(with_head(model, head, data.labels or ["score"], problem), out / "best", run)
    return comparison


def seeds_of(labels: int | None) -> int:
    """How many times heads are fitted: few labels make more of a difference."""
    return 10 if labels is not None and labels <= FEW_LABELS else 3


def _check_labels(train: Features, labels: Sequence[int | None], names: list[str] | None) -> None:
    wanted = max((count for count in labels if count is not None), default=None)
    if wanted is None:
        return
    if names is None:
        raise SettingError("{labels} are drawn of classes, and these labels are numbers")
    counts = np.bincount(train.labels[train.rows].astype(int), minlength=len(names))
    if counts.min() < wanted:
        said = "{labels} {}: class {} has {} training samples"
        raise SettingError(said, wanted, names[int(counts.argmin())], int(counts.min()))
