"""Figures of explanations. No text of a stranger is ever read as a formula."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import FuncFormatter

from sot.explain.branches import CLASS, WORDS
from sot.figures import BLUE, GREY, ORANGE, SERIES, SMALL, VERMILION, WIDTH, Drawing, clean

if TYPE_CHECKING:
    from sot.explain.result import Column, Explanation, ImageExplanation, TextExplanation

STRONG, WEAK = (124, 242, 27), (13, 119, 234)  # the paper's green and blue
FOR, AGAINST = BLUE, VERMILION
COLOURS = {CLASS: BLUE, WORDS: ORANGE, "bias": GREY}
MAP = "viridis"  # from weak to strong; dark to light, for readers of any eyes
LINE = 88  # characters of a text beside each other
MAX_LINES = 12  # of a text in a figure; a page has all
MAX_ARCS_OVER = 40  # words; above, arcs could not be told apart


def colour(strength: float) -> tuple[int, int, int]:
    """Blue for 0 to green for 1."""
    mixed = [round(weak + (strong - weak) * strength) for weak, strong in zip(WEAK, STRONG)]
    return mixed[0], mixed[1], mixed[2]


def mark(column: Column) -> str:
    """A tick, a cross, or nothing where the true class is not known."""
    return "" if column.correct is None else " ✓" if column.correct else " ✗"


def _title(axes: Any, text: str, column: Column | None = None, where: str = "center", width: int = 30) -> None:
    shade = "black" if column is None or column.correct is None else FOR if column.correct else AGAINST
    text = "\n".join(textwrap.fill(line, width) for line in text.split("\n")) if where == "center" else text
    axes.set_title(text, fontsize=10, color=shade, parse_math=False, loc=where)


# --- parts -------------------------------------------------------------------------------------------------


def draw_map(axes: Any, picture: Any, column: Column) -> None:
    """A picture under the map of a column, with what the column predicts."""
    height, width = picture.shape[:2]
    axes.imshow(picture)
    overlay = {"cmap": MAP, "vmin": 0, "vmax": 1, "alpha": 0.6, "interpolation": "bilinear"}
    axes.imshow(column.strength, extent=(-0.5, width - 0.5, height - 0.5, -0.5), **overlay)
    axes.set_axis_off()
    _title(axes, f"{column.name}: {clean(column.predicted, 22)}{mark(column)}", column, width=22)


def draw_contributions(axes: Any, explanation: Explanation) -> None:
    """What each branch adds to the logits of the likeliest classes."""
    names = [name for name, _ in explanation.predictions]
    index = [explanation.labels.index(name) for name in names]
    found = explanation.contributions
    bars = {CLASS: found.class_part, WORDS: found.word_part, "bias": found.bias}
    height = 0.8 / len(bars)
    for number, (name, values) in enumerate(bars.items()):
        places = np.arange(len(index)) + (number - 1) * height
        axes.barh(places, values[index], height, color=COLOURS[name], label=name)
    axes.plot(found.logits[index], np.arange(len(index)), "k|", markersize=14, label="logit")
    axes.set_yticks(range(len(index)), [clean(name, 18) for name in names], parse_math=False)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.legend(fontsize=SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False)
    axes.tick_params(labelsize=SMALL)
    _title(axes, "what each branch adds to the logit")


def draw_spectrum(axes: Any, explanation: Explanation) -> None:
    """Singular values of each head, before and after normalisation."""
    if explanation.spectrum is None:
        return _nothing(axes, "no spectrum: the pooling is not of second order")
    for name, values, style in (
        ("before", explanation.spectrum.before, "--"),
        ("after", explanation.spectrum.after, "-"),
    ):
        for head, row in enumerate(np.where(values > 1e-6 * values.max(), values, np.nan)):
            number = np.arange(1, len(row) + 1)
            shade, said = SERIES[head % len(SERIES)], name if head == 0 else None
            axes.plot(number, row, style, color=shade, linewidth=1.2, label=said)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.tick_params(labelsize=SMALL)
    axes.set_xlabel("singular values, by rank", fontsize=SMALL)
    axes.legend(fontsize=SMALL, frameon=False)
    _title(axes, "spectrum before and after normalisation")


def draw_links(axes: Any, explanation: ImageExplanation) -> None:
    """The pairs of patches that carry most evidence, as links over the picture, in colours of FOR and AGAINST."""
    axes.imshow(explanation.picture)
    axes.imshow(np.ones((1, 1)), extent=axes.get_images()[0].get_extent(), cmap="gray", vmin=0, vmax=1, alpha=0.45)
    axes.set_axis_off()
    pairs = [] if explanation.evidence is None else explanation.evidence.strongest()
    if not pairs:
        return _title(axes, "words carry their evidence one by one" if explanation.evidence else "no evidence of pairs")
    height, width = explanation.picture.shape[:2]
    rows, columns = explanation.grid
    for pair, shade, line in _strokes(pairs):
        places = [((k % columns + 0.5) * width / columns, (k // columns + 0.5) * height / rows) for k in pair]
        axes.plot(*zip(*places), "-o", color=shade, linewidth=line, markersize=4, alpha=0.85)
    _title(axes, f"pairs of words: evidence for {clean(explanation.target, 20)}")


def _strokes(pairs: Sequence[tuple[int, int, float]]) -> list[tuple[list[int], str, float]]:
    """Pairs of words with the colour and width of their lines, the strongest last, above the others."""
    most = max((abs(value) for *_, value in pairs), default=1.0)
    return [(pair, FOR if value > 0 else AGAINST, 0.6 + 3 * abs(value) / most) for *pair, value in reversed(pairs)]


def _pairs_key(axes: Any, where: str = "upper center", anchor: tuple[float, float] = (0.5, 0)) -> None:
    for shade, name in ((FOR, "for"), (AGAINST, "against")):
        axes.plot([], [], color=shade, linewidth=3, label=name)
    axes.legend(loc=where, bbox_to_anchor=anchor, ncols=2, fontsize=SMALL, frameon=False)


def _nothing(axes: Any, why: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, textwrap.fill(why, 36), ha="center", va="center", fontsize=9)


# --- pictures ----------------------------------------------------------------------------------------------


def image_figure(explanation: ImageExplanation) -> Figure:
    """The picture, its maps by branch; below them links, contributions and spectrum."""
    figure = Drawing(figsize=(WIDTH, 5.8), layout="constrained")
    rows: Any = figure.subfigures(2, 1, height_ratios=(5, 6))
    top, bottom = rows
    axes = top.subplots(1, 1 + len(explanation.columns), squeeze=False)[0]
    _draw_row(axes, explanation)
    _map_key(top, axes)
    below = bottom.subplots(1, 3)
    draw_links(below[0], explanation)
    _pairs_key(below[0])
    draw_contributions(below[1], explanation)
    draw_spectrum(below[2], explanation)
    return figure


def _map_key(figure: Any, axes: Any) -> None:
    bar = figure.colorbar(ScalarMappable(Normalize(0, 1), MAP), ax=list(axes), ticks=[0, 1], shrink=0.6, aspect=12)
    bar.ax.set_yticklabels(["weak", "strong"], fontsize=SMALL)


def _draw_row(axes: Any, explanation: ImageExplanation) -> None:
    axes[0].imshow(explanation.picture)
    axes[0].set_axis_off()
    (name, score), truth = explanation.predictions[0], explanation.truth
    said = f"it is {clean(truth, 24)}" if truth else f"{clean(name, 24)} {score:.2f}"
    explained = "" if explanation.target == name else f"\nexplained: {clean(explanation.target, 24)}"
    _title(axes[0], said + explained)
    for place, column in zip(axes[1:], explanation.columns):
        draw_map(place, explanation.picture, column)


def columns_figure(explanations: Sequence[ImageExplanation]) -> Figure:
    """Draw the paper's figure: one row an image, with its maps by branch, ticks and crosses."""
    wide = 1 + max(len(explanation.columns) for explanation in explanations)
    figure = Drawing(figsize=(WIDTH, 2.3 * len(explanations)), layout="constrained")
    places = figure.subplots(len(explanations), wide, squeeze=False)
    _map_key(figure, places[0])
    for row, explanation in zip(places, explanations):
        _draw_row(row, explanation)
        for place in row[1 + len(explanation.columns) :]:
            place.set_axis_off()
    return figure


# --- texts -------------------------------------------------------------------------------------------------


def lines_of(explanation: TextExplanation) -> list[tuple[int, int]]:
    """Line and first character of each word, broken where a line or a text ends."""
    places, line, column, before = [], 0, 0, 0
    for (text, *_), name in zip(explanation.words.spans, explanation.words.names):
        size = len(clean(name, LINE))
        if text != before or (column and column + size > LINE):
            line, column = line + 1, 0
        places.append((line, column))
        column, before = column + size + 1, text
    return places


def text_figure(explanation: TextExplanation) -> Figure:
    """The words coloured by influence, one block a branch; arcs of pairs; below them contributions and spectrum."""
    places = lines_of(explanation)
    lines = min(MAX_LINES, places[-1][0] + 1)
    tall = [0.26 * lines + 0.45] * len(explanation.columns)
    arcs = explanation.evidence is not None and len(places) <= MAX_ARCS_OVER
    heights = [*tall, *([0.26 * lines + 1.4] if arcs else []), 3.0]
    figure = Drawing(figsize=(WIDTH, sum(heights)), layout="constrained")
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    for part, column in zip(parts, explanation.columns):
        axes = part.subplots()
        _title(axes, f"{column.name}: {clean(column.predicted, 24)}{mark(column)}", column, "left")
        _draw_words(axes, explanation, places, lines, [colour(float(value)) for value in column.strength])
    if arcs:
        _draw_arcs(parts[-2].subplots(), explanation, places, lines)
    below = parts[-1].subplots(1, 2)
    draw_contributions(below[0], explanation)
    draw_spectrum(below[1], explanation)
    return figure


def _draw_words(axes: Any, explanation: TextExplanation, places: Any, lines: int, colours: Any) -> None:
    axes.set(xlim=(-0.5, LINE + 0.5), ylim=(lines, 0))
    axes.set_axis_off()
    for (line, column), name, shade in zip(places, explanation.words.names, colours):
        word = clean(name, LINE)
        if line >= lines:
            return
        if shade is not None:
            box = Rectangle((column - 0.25, line + 0.08), len(word) + 0.5, 0.84, color=tuple(c / 255 for c in shade))
            axes.add_patch(box)
        middle = {"ha": "center", "va": "center", "family": "monospace", "fontsize": 10}
        axes.text(column + len(word) / 2, line + 0.5, word, parse_math=False, **middle)


def _draw_arcs(axes: Any, explanation: TextExplanation, places: Any, lines: int) -> None:
    assert explanation.evidence is not None
    pairs = explanation.evidence.strongest(8)
    _draw_words(axes, explanation, places, lines, [None] * len(places))
    axes.set_ylim(lines, -1.5)
    said = f"pairs of words: evidence for {clean(explanation.target, 20)}"
    _title(axes, said if pairs else "words carry their evidence one by one", where="left")
    if pairs:
        _pairs_key(axes, "lower right", (1, 1))
    names = explanation.words.names
    for pair, shade, line in _strokes(pairs):
        left, right = sorted((places[k][1] + len(names[k]) / 2, places[k][0] + 0.15) for k in pair)
        bend: dict[str, Any] = {"arrowstyle": "-", "connectionstyle": "arc3,rad=-0.3", "clip_on": False}
        axes.add_patch(FancyArrowPatch(left, right, color=shade, linewidth=line, alpha=0.8, **bend))
