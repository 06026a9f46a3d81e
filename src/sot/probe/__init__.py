"""Heads on a frozen backbone: tokens are computed once, then every head is trained on them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sot.core.head import HeadConfig, SecondOrderHead
from sot.data.images import seeded
from sot.files import write_atomically
from sot.models.accelerate import accelerate
from sot.models.equip import Equipped
from sot.probe.cache import Progress, cache_features, silent
from sot.probe.contest import Contest
from sot.probe.features import Features
from sot.probe.fitting import Budget, split_rows
from sot.probe.frozen import Data, FrozenBackbone, read_images, read_texts
from sot.probe.heads import HEADS, check_names, choose_heads
from sot.probe.journal import Journal
from sot.probe.outcome import ProbeComparison, check_output
from sot.training.run import RUN_FILE

__all__ = [
    "HEADS",
    "Budget",
    "Data",
    "Features",
    "FrozenBackbone",
    "ProbeComparison",
    "cache_features",
    "check_names",
    "choose_heads",
    "compare_heads",
    "open_backbone",
    "read_images",
    "read_texts",
]


def open_backbone(backbone: FrozenBackbone) -> Equipped:
    """The backbone to compute tokens with; its head is a placeholder that every backbone can have."""
    with seeded(0):  # weights that are not loaded are the same every time
        model = backbone.equip(HeadConfig(pool="gap", fusion="word")).eval()
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    return accelerate(model)


def compare_heads(
    model: Equipped,
    name: str,
    data: Data,
    heads: Sequence[str],
    out: Path,
    *,
    cache: Path | None = None,
    seeds: int = 3,
    budget: Budget | None = None,
    representation: int | None = None,
    progress: Progress = silent,
) -> ProbeComparison:
    """Compare heads on the backbone of `model`, called `name`; tables, a picture and the best model go to `out`."""
    chosen = choose_heads(heads, model.config.hidden_size, model.config.has_class_token, representation)
    budget = budget or Budget()
    split_rows(np.arange(len(data.train)), budget.held_out)  # refuses too few before the long work
    check_output(out)
    train, test = (cache_features(model, part, cache or out / "cache", progress) for part in (data.train, data.test))
    contest = Contest(train, test, data.target, budget, Journal(out / "rows.jsonl"))
    results = contest.run(chosen, seeds, progress)
    best = contest.best(chosen)
    seconds = train.seconds, train.unsorted_seconds
    comparison = ProbeComparison(name, data.name, data.metric, *seconds, results, best)
    comparison.write(out)
    head, _ = contest.fit(chosen[best], seed=0)
    run = {"command": "probe", "model": name, "data": data.place, "head": chosen[best].to_dict()}
    save_model(with_head(model, head, data), out / "best", run)
    return comparison


def with_head(model: Equipped, head: SecondOrderHead, data: Data) -> Equipped:
    """The backbone of `model`, itself, with a trained head."""
    config = copy.deepcopy(model.config)
    if config.layout:
        config.layout.pop("branches", None)  # the head was trained on the first
    labels = data.labels or ["score"]
    config.head, config.id2label = head.config.to_dict(), dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = "regression" if data.labels is None else "single_label_classification"
    combined = type(model)(config).eval()
    combined.backbone, combined.processor = model.backbone, model.processor
    combined.classifier.load_state_dict(head.state_dict())
    return combined


def save_model(model: Equipped, folder: Path, run: dict[str, Any]) -> None:
    """All of a model folder or none of it; `run` says what it was trained on."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    write_atomically(partial / RUN_FILE, json.dumps(run, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
