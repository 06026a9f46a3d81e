"""The words of a text as a page of HTML that stands alone; every character of the text is escaped."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING

from sot.explain.figure import STRONG, WEAK, colour, mark

if TYPE_CHECKING:
    from sot.explain.result import Column, TextExplanation

STYLE = """
body { font: 16px/1.9 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #111; background: #fff }
h1 { font-size: 1.2em } h2 { font-size: 1em; margin: 1.2em 0 0 } p { margin: 0; overflow-wrap: anywhere }
mark { color: #000; border-radius: 3px; padding: 1px 3px } img { max-width: 100%; margin-top: 1.5em }
table { border-collapse: collapse; margin-top: 1em } td, th { padding: 0 1em 0 0; text-align: left; font-size: .9em }
small { color: #555; display: block }
"""


def coloured(explanation: TextExplanation, column: Column) -> str:
    """The text as it was read, each word on its colour, with its value to see by pointing at it."""
    words, pieces, text, position = explanation.words, [], 0, 0
    for (number, start, end), value, strength in zip(words.spans, column.values, column.strength):
        if number != text:
            pieces.append("</p><p>")
            text, position = number, 0
        pieces.append(escape(words.texts[number][position:start]))
        red, green, blue = colour(float(strength))
        shade = f"background: rgb({red}, {green}, {blue})"
        pieces.append(f'<mark style="{shade}" title="{value:.4g}">{escape(words.texts[number][start:end])}</mark>')
        position = end
    return f"<p>{''.join(pieces)}</p>"


def text_blocks(explanation: TextExplanation, picture: bytes) -> str:
    """What stands in the page, with the figure as `picture`."""
    name, score = explanation.predictions[0]
    blocks = [f"<h1>{escape(name)} ({score:.3f}); evidence for {escape(explanation.target)}</h1>"]
    blocks.append(f'<p>Influence: <mark style="background: rgb{STRONG}">strong</mark> ')
    blocks.append(f'<mark style="background: rgb{WEAK}">weak</mark>, by {escape(explanation.method)}.</p>')
    for column in explanation.columns:
        blocks.append(f"<h2>{escape(column.name)}: {escape(column.predicted)}{mark(column)}</h2>")
        blocks.append(coloured(explanation, column))
    if explanation.evidence is not None and (pairs := explanation.evidence.strongest(8)):
        names = explanation.words.names
        rows = (
            f"<tr><td>{escape(names[i])}</td><td>{escape(names[j])}</td><td>{v:+.4f}</td></tr>" for i, j, v in pairs
        )
        blocks.append(f"<table><tr><th>pair of words</th><th></th><th>evidence</th></tr>{''.join(rows)}</table>")
    data = base64.b64encode(picture).decode()
    blocks.append(f'<img alt="contributions, spectrum and pairs" src="data:image/png;base64,{data}">')
    return "".join([*blocks, *(f"<small>{escape(note)}</small>" for note in explanation.notes)])


def text_page(explanation: TextExplanation, picture: bytes) -> str:
    """The whole page, with the figure as `picture`."""
    name, _ = explanation.predictions[0]
    head = f'<meta charset="utf-8"><title>{escape(name)}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body>{text_blocks(explanation, picture)}</body></html>\n'
    )
