"""The paper's first table in small: class token, word tokens, and both, on real images that need no download."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sot.core.head import HeadConfig
from sot.files import as_png, write_atomically
from sot.training.recipe import Recipe, load_recipe
from sot.training.run import draw_curves
from sot.training.train_images import train_images

HEADS = {"ClassT": "class", "WordT": "word", "ClassT+WordT": "sum"}


def run_demo(
    out: Path, seeds: Sequence[int], say: Callable[[str], None], changes: Sequence[str] = ()
) -> dict[str, list[float]]:
    """Train every head with every seed, leave the runs and a figure in `out`, and return the accuracies in percent.

    A run that is finished is not done again, so an interrupted demo continues where it was.
    """
    recipe = load_recipe("demo").changed(changes)
    accuracies: dict[str, list[float]] = {name: [] for name in HEADS}
    curves: dict[str, list[dict[str, Any]]] = {}
    for number, seed in enumerate(seeds):
        for name, fusion in HEADS.items():
            say(f"seed {number + 1} of {len(seeds)}, {name}")
            rows = _run(out / f"{fusion}-{seed}", recipe.changed([f"seed={seed}"]), fusion)
            accuracies[name].append(100 * rows[-1]["eval_accuracy"])
            curves.setdefault(name, rows)
            write_atomically(out / "demo.png", as_png(draw_curves(curves)))
    write_atomically(out / "demo.json", json.dumps(accuracies))
    return accuracies


def _run(folder: Path, recipe: Recipe, fusion: str) -> list[dict[str, Any]]:
    metrics = folder / "metrics.json"
    if not (folder / "model.safetensors").is_file():
        head = HeadConfig.from_dict(recipe.with_head({"fusion": fusion}).head)
        again: dict[str, Any] = {"resume": metrics.is_file(), "overwrite": not metrics.is_file()}
        train_images("sot_7", "digits", folder, recipe, head, report_to="none", **again)
    rows: list[dict[str, Any]] = json.loads(metrics.read_text())
    return rows


def summary(accuracies: Mapping[str, Sequence[float]]) -> list[tuple[str, str, str]]:
    """Name, mean and spread of each head."""
    rows = []
    for name, values in accuracies.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append((name, f"{statistics.mean(values):.2f}", f"{spread:.2f}"))
    return rows
