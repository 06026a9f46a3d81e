"""How every picture looks: one palette, letters that can be read, in whatever scripts the texts are."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from html import escape
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from sot.files import as_png

# Okabe and Ito's colours, which colour-blind readers tell apart.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
GREY, INK = "#777777", "#000000"
NAMES = {BLUE: "blue", ORANGE: "orange", GREEN: "green", VERMILION: "vermilion", PURPLE: "purple", SKY: "sky"}
NAMES |= {GREY: "grey"}
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, INK)
MARKERS = "os^Dvp"
WIDTH = 8.0  # inches: 960 pixels, which pages show at about 800
SMALL = 9  # points of the smallest letters
LAST_RESORT = "Last Resort"  # how matplotlib's font of boxes is called, which claims to have every letter


@cache
def _letters(file: str) -> frozenset[int]:
    """The characters that a font file has, or none where it cannot be opened."""
    try:
        return frozenset(get_font(file).get_charmap())
    except (OSError, RuntimeError, ValueError):
        return frozenset()


@lru_cache(maxsize=512)
def families_for(text: str, families: tuple[str, ...]) -> tuple[str, ...]:
    """The families, and after them others that are installed and have the letters which these lack."""
    left = {ord(letter) for letter in text if letter.isprintable() and not letter.isspace()}
    for family in families:
        left -= _letters(findfont(FontProperties(family=[family])))
    found = list(families)
    for entry in fontManager.ttflist if left else ():
        if not entry.name.startswith(LAST_RESORT) and left & _letters(entry.fname):
            found.append(entry.name)
            left -= _letters(entry.fname)
    return tuple(found)


class Drawing(Figure):
    """A figure whose texts take the letters that their font lacks from other installed fonts; never a warning."""

    def draw(self, renderer: Any) -> None:
        for text in self.findobj(Text):
            chosen = tuple(text.get_fontfamily())
            wider = families_for(text.get_text(), chosen)
            if wider != chosen:
                text.set_fontfamily(list(wider))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # what no font here has
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        return as_png(self)


def sheet(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Drawing, Any]:
    """A figure as wide as a page, of so many inches, and its axes in an array of two dimensions."""
    figure = Drawing(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06))
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for each in axes.flat:
        calm(each)
    return figure, axes


def calm(axes: Any) -> None:
    """A light grid behind the data, and no frame above and beside it."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL)


def dots(axes: Any, names: Sequence[str], points: Sequence[tuple[float, float, str]], hollow: bool = False) -> None:
    """A row for each name, from the top: a dot of a colour at its mean, and half of its interval to both sides."""
    for row, (mean, half, colour) in enumerate(points):
        look = {"fmt": "D", "markerfacecolor": "white"} if hollow else {"fmt": "o"}
        axes.errorbar(mean, row, xerr=half or None, color=colour, capsize=3, **look)
    axes.set_yticks(range(len(names)), names, fontsize=SMALL, parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def clean(text: str, width: int = 40) -> str:
    """One printable line of at most `width` characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= width else line[: width - 1] + "…"


def short_name(model: str) -> str:
    """What a model is called in a title: not where a machine keeps it."""
    return "/".join(Path(model).parts[-2:]) if Path(model).is_absolute() else model


def as_svg(figure: Figure, title: str) -> str:
    """The figure as an element of a page, which sets its colours: `--sot-blue` and so on, and that of letters."""
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "sot"}):
        figure.savefig(file, format="svg", transparent=True)
    drawn = file.getvalue()
    drawn = re.sub("<metadata>.*?</metadata>|<style.*?</style>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    for colour, name in NAMES.items():
        drawn = drawn.replace(f": {colour}", f": var(--sot-{name}, {colour})")
    drawn = drawn.replace(f": {INK}", ": currentColor")
    drawn = re.sub(r' (width|height)="[0-9.]+pt"', "", drawn, count=2)
    return drawn.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
