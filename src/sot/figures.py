"""Figures that show themselves in notebooks, in whatever scripts their texts are."""

from __future__ import annotations

import warnings
from functools import cache, lru_cache
from typing import Any

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.text import Text

from sot.files import as_png

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
