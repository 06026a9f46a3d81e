"""What the page answers: an explanation as HTML whose pictures and downloads are inside it; nothing is written."""

from __future__ import annotations

import base64
import logging
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from sot.data.pictures import FORMATS
from sot.explain import MAX_PIXELS, Column, Explanation, ImageExplanation, TextExplanation, explain_item, open_upload
from sot.explain.figure import draw_contributions, draw_links, draw_map, draw_spectrum, mark
from sot.explain.report_page import coloured
from sot.figures import as_svg, clean
from sot.files import as_png
from sot.ui.shown import Shown

MAX_SIDE = 2048  # of a picture; what is larger is made smaller, or preparing it takes gigabytes
MAX_LETTERS = 10_000  # of a text
PREDICTED = "the predicted one"
UNKNOWN = "unknown"
CHART, LETTERS = (3.3, 3.0), 11  # inches and points of a chart; a card is about as wide
SPECTRUM = (
    "Each colour is a head: how strongly its patterns count, strongest first. "
    "Normalisation flattens it, so that weak patterns are heard too."
)
# One thread, as the allocator keeps for each what it freed: 200 MB after a large picture.
_DECODER = ThreadPoolExecutor(1)
logger = logging.getLogger(__name__)


# --- input -------------------------------------------------------------------------------------------------


def read_picture(path: str | None) -> Image.Image:
    """An uploaded picture, or ValueError."""
    if not path:
        raise ValueError("drop an image first, or choose an example")
    try:
        Image.open(path, formats=FORMATS).close()
    except Image.UnidentifiedImageError:
        raise ValueError(f"this file is no image that can be read; accepted: {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise ValueError(f"this image has too many pixels; at most {MAX_PIXELS:,} are accepted") from None
    except Exception as error:  # the libraries behind these formats raise nearly anything for a damaged file
        raise ValueError(f"this image cannot be read: {error}") from error
    return _DECODER.submit(_decode, path).result()


def _decode(path: str) -> Image.Image:
    with Path(path).open("rb") as file:
        picture = open_upload(file)
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    return picture


def typed_texts(text: str | None, pair: str | None) -> str | tuple[str, str]:
    """A text or a pair of them, or ValueError."""
    if not (text or "").strip():
        raise ValueError("type a sentence first, or choose an example")
    for given in (text or "", pair or ""):
        if len(given) > MAX_LETTERS:
            raise ValueError(f"the text has {len(given):,} characters, and at most {MAX_LETTERS:,} are accepted")
    return (text or "", pair) if (pair or "").strip() and pair else text or ""


def answer(
    shown: Shown, picture: str | None, text: str | None, pair: str | None, method: str, target: str, truth: str
) -> str:
    """What one model says about an input, or in words why it says nothing."""
    try:
        shown = shown.ready()
        item = typed_texts(text, pair) if shown.modality == "text" else read_picture(picture)
        options: dict[str, Any] = {} if method in ("", "default") else {"method": method}
        options["target"] = None if target in ("", PREDICTED) else target
        options["truth"] = None if truth in ("", UNKNOWN) else truth
        return result(shown.name, explain_item(shown.model, shown.processor, item, **options))
    except (ValueError, OSError) as error:
        return refusal(f"{shown.name}: {error}")
    except Exception:
        logger.exception("%s could not explain the input", shown.name)
        return refusal(f"{shown.name}: something went wrong here that is not your fault; the terminal says what.")


# --- output ------------------------------------------------------------------------------------------------


def inert(html: str) -> str:
    """HTML in which nothing looks like a template to the page's own engine."""
    return html.replace("{", "&#123;").replace("}", "&#125;")


def refusal(why: str) -> str:
    """A message in place of a result."""
    return inert(f'<p class="sot-refusal" role="alert">{escape(why[:400])}</p>')


def training_bar(share: float) -> str:
    """How far the training of the small model is."""
    said = f"Training a small model on handwritten digits, once: {share:.0%}"
    return f'<p class="sot-training" role="status">{said}<progress max="1" value="{share:.3f}"></progress></p>'


def result(name: str, explanation: ImageExplanation | TextExplanation) -> str:
    """Everything about one input as cards, and links that download it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the font has not every script; the page itself has
        cards = [_predictions(explanation)]
        if isinstance(explanation, ImageExplanation):
            cards += _picture_cards(explanation)
        else:
            cards += _text_cards(explanation)
        cards.append(_charted("What each branch adds", partial(draw_contributions, explanation=explanation)))
        cards.append(_spectrum(explanation))
        picture = explanation.png()
        links = [_link("Figure", "png", "image/png", picture)]
        links.append(_link("Raw values", "npz", "application/octet-stream", explanation.npz()))
        if isinstance(explanation, TextExplanation):
            links.append(_link("Page", "html", "text/html", explanation.html(picture).encode()))
    said = f"evidence for <b>{escape(explanation.target)}</b>, by {escape(explanation.method)}"
    notes = "".join(f"<li>{escape(note)}</li>" for note in explanation.notes)
    return inert(
        f'<section class="sot-result"><header><h2>{escape(name)}</h2><span>{said}</span></header>'
        f'<div class="sot-cards">{"".join(cards)}</div>'
        f'<footer><nav>{"".join(links)}</nav><ul class="sot-notes">{notes}</ul></footer></section>'
    )


def _card(title: str, body: str, kind: str = "") -> str:
    return f'<article class="sot-card {kind}"><h3>{escape(title)}</h3>{body}</article>'


def _predictions(explanation: Explanation) -> str:
    rows = []
    for name, score in explanation.predictions:
        share = min(max(score, 0.0), 1.0) if len(explanation.labels) > 1 else 0.0  # a regression has no share
        rows.append(
            f'<li><span class="sot-name">{escape(name)}</span><span class="sot-score">{score:.3f}</span>'
            f'<span class="sot-bar"><i style="width: {100 * share:.1f}%"></i></span></li>'
        )
    truth = "" if explanation.truth is None else f'<p class="sot-truth">It is {escape(explanation.truth)}.</p>'
    return _card("Predictions", f"<ol>{''.join(rows)}</ol>{truth}", "sot-predictions")


def _pictured(title: str, draw: Callable[[Any], None], kind: str, key: str) -> str:
    """A card with a drawing over the picture, which is as it is in any light."""
    figure = Figure(figsize=(3, 3), facecolor="none")
    draw(axes := figure.add_axes((0, 0, 1, 1)))
    axes.set_title("")  # the card has one
    picture = base64.b64encode(as_png(figure)).decode()
    return _card(title, f'<img alt="{escape(title)}" src="data:image/png;base64,{picture}">{key}', kind)


def _charted(title: str, draw: Callable[[Any], None], below: str = "") -> str:
    """A card with a chart in the colours and letters of the page."""
    figure = Figure(figsize=CHART, layout="constrained")
    draw(axes := figure.subplots())
    axes.set_title("")
    for text in figure.findobj(Text):
        text.set_fontsize(LETTERS)
    return _card(title, as_svg(figure, title) + below, "sot-plot")


def _spectrum(explanation: Explanation) -> str:
    title = "Spectrum, before and after"
    if explanation.spectrum is None:
        return _card(title, "<p>None: the head does not pool words in second order.</p>", "sot-plot")
    return _charted(title, partial(draw_spectrum, explanation=explanation), f'<p class="sot-said">{SPECTRUM}</p>')


def _heading(column: Column) -> str:
    return f"{column.name.capitalize()}: {clean(column.predicted, 24)}{mark(column)}"


def _picture_cards(explanation: ImageExplanation) -> list[str]:
    maps = [
        _pictured(
            _heading(column),
            partial(draw_map, picture=explanation.picture, column=column),
            "sot-map",
            _scale("sot-map"),
        )
        for column in explanation.columns
    ]
    if explanation.evidence is None:
        return [*maps, _card("Pairs of words", "<p>This head has no evidence of pairs: see below.</p>", "sot-plot")]
    pairs = partial(draw_links, explanation=explanation)
    return [*maps, _pictured("Pairs of words", pairs, "sot-links", _sides(explanation))]


def _scale(kind: str) -> str:
    return f'<p class="sot-key">weak <i class="sot-scale {kind}-scale"></i> strong</p>'


def _sides(explanation: Explanation) -> str:
    name = escape(clean(explanation.target, 20))
    return f'<p class="sot-key"><i class="sot-for"></i> for {name} <i class="sot-against"></i> against it</p>'


def _text_cards(explanation: TextExplanation) -> list[str]:
    key = _scale("sot-word")
    words = [
        _card(_heading(column), coloured(explanation, column) + key, "sot-words") for column in explanation.columns
    ]
    names = explanation.words.names
    pairs = explanation.evidence.strongest(8) if explanation.evidence is not None else []
    rows = "".join(
        f"<tr><td>{escape(names[i])}</td><td>{escape(names[j])}</td>"
        f'<td class="{"sot-for" if v > 0 else "sot-against"}">{v:+.3f}</td></tr>'
        for i, j, v in pairs
    )
    table = (
        f"<table>{rows}</table>{_sides(explanation)}" if rows else "<p>The words carry their evidence one by one.</p>"
    )
    return [_card("Pairs of words", table, "sot-pairs"), *words]


def _link(title: str, ending: str, kind: str, content: bytes) -> str:
    data = base64.b64encode(content).decode()
    return f'<a download="explanation.{ending}" href="data:{kind};base64,{data}">{title} (.{ending})</a>'
