"""Pictures of compared heads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sot.evaluation.metrics import interval

if TYPE_CHECKING:
    from sot.figures import Drawing
    from sot.probe.outcome import Result


def _kind(result: Result) -> str:
    if result.head == "sot":
        return "sot.Classifier"
    config = result.config
    second = config is not None and config.pool in ("mgcrp", "gcp", "mhc3") and config.fusion != "class"
    return "second order" if second else "first order"


def draw_dots(results: list[Result], score: str, title: str) -> Drawing:
    """Heads sorted by their mean, the best on top: a dot with its interval each, its parameters in a column."""
    from matplotlib.lines import Line2D

    from sot.figures import BLUE, ORANGE, SMALL, VERMILION, dots, sheet

    colours = {"sot.Classifier": VERMILION, "second order": ORANGE, "first order": BLUE}
    shown = [result for result in results if result.head != "majority"] or results  # which would squeeze the others
    ordered = sorted(shown, key=lambda result: -result.mean)
    figure, ((axes,),) = sheet(max(2.3, 1.6 + 0.24 * len(ordered)))
    points = [(100 * row.mean, 100 * (interval(row.scores) or 0), colours[_kind(row)]) for row in ordered]
    dots(axes, [row.head for row in ordered], points)
    column: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center", "fontsize": SMALL}
    for row, result in enumerate(ordered):
        axes.annotate(f"{result.params:,}", (1.14, row), **column)
    axes.annotate("parameters", (1.14, -1), **column)
    axes.set_xlabel(f"{score}: mean and 95 % CI")
    kinds = [kind for kind in colours if kind in map(_kind, ordered)]
    keys = [Line2D([], [], marker="o", color=colours[kind], label=kind) for kind in kinds]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=SMALL, frameon=False)
    figure.suptitle(title, fontsize=11, parse_math=False)
    return figure


def draw_lines(results: list[Result], score: str, title: str) -> Drawing:
    """A line for each head over labels a class, with intervals; all labels come last. The legend is beside them."""
    from sot.figures import MARKERS, SERIES, SMALL, VERMILION, sheet

    counts = sorted({math.inf if result.labels is None else result.labels for result in results})
    places = {count: place for place, count in enumerate(counts)}
    figure, ((axes,),) = sheet(5)
    names = list(dict.fromkeys(result.head for result in results))
    others = [name for name in names if name != "sot"]
    ends = {result.head: result.mean for result in sorted(results, key=lambda row: row.labels or math.inf)}
    for name in sorted(names, key=lambda name: -ends[name]):  # the legend in the order of the lines' ends
        rows = sorted((places[row.labels or math.inf], row.mean, row.scores) for row in results if row.head == name)
        shift = 0.04 * (names.index(name) - (len(names) - 1) / 2)  # so that intervals do not hide each other
        number = -1 if name == "sot" else others.index(name)
        look: dict[str, Any] = {"color": SERIES[number % len(SERIES)], "marker": MARKERS[number % len(MARKERS)]}
        if name == "sot":
            look |= {"color": VERMILION, "linewidth": 2.5, "zorder": 5}
        halves = [100 * (interval(scores) or 0) for *_, scores in rows]
        where, means = [place + shift for place, *_ in rows], [100 * mean for _, mean, _ in rows]
        axes.errorbar(where, means, halves, label=name, capsize=2, markersize=5, **look)
    axes.set_xticks(range(len(counts)), ["all" if math.isinf(count) else str(count) for count in counts])
    axes.set_xlabel("labels a class")
    axes.set_ylabel(f"{score}: mean and 95 % CI over draws")
    figure.legend(loc="outside right center", fontsize=SMALL, frameon=False)
    figure.suptitle(title, fontsize=11, parse_math=False)
    return figure
