"""What a search costs, and what its trials found: a line for each, and a figure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sot.files import as_png
from sot.training.recipe import Recipe
from sot.training.search import Choices, Range, Space, size

FIXED = ("trial", "state", "value", "seconds", "ended", "error")  # columns of every search


@dataclass(frozen=True)
class SearchCost:
    """Trials, steps of all of them and of the winner, and seconds if steps were timed; `exact` or at most so many."""

    trials: int
    steps: int
    winner_steps: int
    seconds: float | None
    exact: bool


def cost_of(space: Space, recipe: Recipe, trials: int, samples: tuple[int, int], rate: float | None) -> SearchCost:
    """The cost of so many trials and of the winner, at `rate` seconds for each sample of a step.

    Exact for a whole grid, which has all sizes equally often; else that of the most costly. An evaluation has no
    backward pass and counts a third.
    """
    train, held = min(samples[0], recipe.train_samples or samples[0]), samples[1]
    epochs = [epoch + recipe.cooldown_epochs for epoch in _values(space.get("epochs", [recipe.epochs]))]
    batches = _values(space.get("batch_size", [recipe.batch_size]))
    exact = trials % (size(space) or trials + 1) == 0
    steps = [epoch * math.ceil(train / batch) for epoch in epochs for batch in batches]
    each, length = (sum(steps) / len(steps), sum(epochs) / len(epochs)) if exact else (max(steps), max(epochs))
    everything = min(sum(samples), recipe.train_samples or sum(samples))
    winner = max(epochs) * math.ceil(everything / min(batches))
    work = trials * length * (train + held / 3) + max(epochs) * everything
    return SearchCost(trials, round(trials * each), round(winner), None if rate is None else rate * work, exact)


def _values(choices: Choices) -> list[float]:
    return [choices.low, choices.high] if isinstance(choices, Range) else list(choices)


def draw_trials(rows: list[dict[str, Any]], space: Space, metric: str) -> bytes:
    """The score by trial, and beside it by every setting that was searched, as PNG."""
    from sot.figures import BLUE, SMALL, sheet

    done = [row for row in rows if row["value"] is not None]
    columns = min(3, 1 + len(space))
    lines = math.ceil((1 + len(space)) / columns)
    figure, axes_of = sheet(2.6 * lines, lines, columns, sharey=True)
    panels = list(axes_of.flat)
    for axes, name in zip(panels, ["trial", *space]):
        values = [row[name] for row in done]
        names = [str(value) for value in values]
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        axes.scatter(values if numbers else names, [row["value"] for row in done], s=18, alpha=0.7, color=BLUE)
        axes.set_xlabel(name, fontsize=SMALL)
        choices = space.get(name)
        if isinstance(choices, Range) and choices.log:
            axes.set_xscale("log")
    for axes in panels[1 + len(space) :]:
        axes.remove()
    for row in range(lines):
        panels[row * columns].set_ylabel(f"{metric}, held out")
    return as_png(figure)


def shown(value: Any) -> str:
    """A setting as people read it: four digits of a number."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def last_line(rows: list[dict[str, Any]], metric: str, total: int, best: Any) -> str:
    """The trial that has just ended, in one line."""
    row = max((row for row in rows if row["seconds"] is not None), key=lambda row: row["ended"])
    done = sum(row["state"] in ("complete", "pruned", "failed") for row in rows)
    said = row["error"] or (row["state"] if row["value"] is None else f"{metric} {row['value']:.4f}")
    top = "" if best is None else f", best {best.value:.4f} (trial {best.number})"
    settings = ", ".join(f"{name}={shown(value)}" for name, value in row.items() if name not in FIXED)
    return f"trial {row['trial']}, {done} of {total}: {said}, {row['seconds']} s{top}; {settings}"
