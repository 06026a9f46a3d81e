"""Pictures of compared heads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sot.evaluation.metrics import interval
from sot.files import as_png

if TYPE_CHECKING:
    from sot.probe.outcome import Result

OURS, SECOND, OTHER = "C3", "C1", "C0"  # colours: what sot.Classifier fits, other second order, the rest


def _colour(result: Result) -> str:
    if result.head == "sot":
        return OURS
    return SECOND if result.config is not None and result.config.pool in ("mgcrp", "gcp", "mhc3") else OTHER


def draw_dots(results: list[Result], score: str, title: str) -> bytes:
    """Heads sorted by their mean, a dot with its interval each, their parameters beside them."""
    from matplotlib.figure import Figure

    ordered = sorted(results, key=lambda result: result.mean)
    figure = Figure(figsize=(8, 1.2 + 0.28 * len(ordered)), layout="constrained")
    axes = figure.subplots()
    for row, result in enumerate(ordered):
        half = 100 * (interval(result.scores) or 0)
        colour = OTHER if result.config is not None and result.config.fusion == "class" else _colour(result)
        axes.errorbar(100 * result.mean, row, xerr=half, fmt="o", color=colour, capsize=3)
        axes.annotate(f"{result.params:,}", (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    axes.set_yticks(range(len(ordered)), [result.head for result in ordered])
    axes.annotate("parameters", (1.01, len(ordered) - 0.3), xycoords=("axes fraction", "data"), fontsize=8)
    axes.set(xlabel=f"{score}, mean and 95 % interval", ylim=(-0.7, len(ordered) - 0.3))
    axes.set_title(f"{title}; red and orange: second order", fontsize=10, pad=14)
    axes.grid(axis="x", alpha=0.3)
    return as_png(figure)


def draw_lines(results: list[Result], score: str, title: str) -> bytes:
    """A line for each head over labels a class, with intervals; all labels come last."""
    from matplotlib.figure import Figure

    counts = sorted({math.inf if result.labels is None else result.labels for result in results})
    places = {count: place for place, count in enumerate(counts)}
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Any = figure.subplots()
    styles, colours = ["-", "--", "-.", ":"], ["C0", "C1", "C2", "C4", "C5", "C6", "C7", "C8", "C9"]
    for number, name in enumerate(dict.fromkeys(result.head for result in results)):
        rows = sorted((places[result.labels or math.inf], result) for result in results if result.head == name)
        means, halves = zip(*((100 * row.mean, 100 * (interval(row.scores) or 0)) for _, row in rows))
        shift = 0.02 * (number - 3)  # so that intervals do not hide each other
        look: dict[str, Any] = {"linewidth": 1.2, "alpha": 0.8, "color": colours[number % len(colours)]}
        if name == "sot":
            look = {"color": OURS, "linewidth": 2.5, "zorder": 5}
        axes.errorbar(
            [place + shift for place, _ in rows],
            means,
            halves,
            label=name,
            capsize=2,
            linestyle=styles[number % 4],
            **look,
        )
    axes.set_xticks(range(len(counts)), ["all" if math.isinf(count) else str(count) for count in counts])
    axes.set(xlabel="labels a class", ylabel=f"{score}, mean and 95 % interval over draws")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return as_png(figure)
