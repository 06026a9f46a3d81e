"""Figures and explanations in notebooks, and texts in scripts that the usual font lacks."""

import io
import warnings

import numpy as np
import pytest
from ddp_worker import HEAD, SIZE
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from PIL import Image

import sot
from sot.explain import columns_figure, explain_image, explain_text
from sot.figures import Drawing, _letters, families_for
from sot.files import as_png

LETTERS = "中文🧿"


@pytest.fixture
def font(tmp_path, monkeypatch):
    """A font that has only these letters, each a full square, installed for a while."""
    pen = TTGlyphPen(None)
    for place in ((0, 0), (0, 900), (900, 900), (900, 0)):
        (pen.moveTo if place == (0, 0) else pen.lineTo)(place)
    pen.closePath()
    square = pen.glyph()
    names = [".notdef", *(f"letter{ord(letter):x}" for letter in LETTERS)]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(letter): name for letter, name in zip(LETTERS, names[1:])})
    builder.setupGlyf({name: TTGlyphPen(None).glyph() if name == ".notdef" else square for name in names})
    builder.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": "Squares", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(tmp_path / "squares.ttf")
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [*font_manager.fontManager.ttflist])
    font_manager.fontManager.addfont(tmp_path / "squares.ttf")
    families_for.cache_clear()
    yield "Squares"
    families_for.cache_clear()
    _letters.cache_clear()


def ink(text):
    """Dark pixels of a figure that shows this text, drawn without a warning."""
    figure = Drawing(figsize=(3, 1))
    figure.text(0.1, 0.4, text, fontsize=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = np.asarray(Image.open(io.BytesIO(as_png(figure))).convert("L"))
    return int((picture < 128).sum())


def test_letters_that_the_font_lacks_come_from_another_that_is_installed(font):
    assert families_for("abc", ("DejaVu Sans",)) == ("DejaVu Sans",)
    assert families_for("a 中", ("DejaVu Sans",)) == ("DejaVu Sans", font)
    side = 20 / 72 * 120 * 0.9  # of the square, in pixels
    for letter in LETTERS:
        assert ink(letter) == pytest.approx(side**2, rel=0.15)
    assert ink("abc中") == pytest.approx(ink("abc") + side**2, rel=0.15)


def test_letters_that_no_font_has_give_no_warning():
    assert ink("\U0001f9fa ꣲ") >= 0


def test_a_figure_shows_itself_in_a_notebook():
    assert Drawing(figsize=(1, 1))._repr_png_().startswith(b"\x89PNG")


def test_an_image_explanation_shows_itself_and_is_one_screen():
    model = sot.equip("test_vit", labels=["a", "中" * 500], head=HEAD, pretrained=False, model_args={"img_size": SIZE})
    explanation = explain_image(model.eval(), model.processor, Image.new("RGB", (SIZE, SIZE), "orange"), truth="a")
    assert explanation._repr_png_().startswith(b"\x89PNG") and not hasattr(explanation, "_repr_html_")
    assert columns_figure([explanation])._repr_png_().startswith(b"\x89PNG")
    shown = repr(explanation)
    assert shown.startswith("ImageExplanation of ") and ", truth a\npredicted: " in shown and "class token: " in shown
    assert len(shown) < 2000 and shown.count("\n") < 20 and "array" not in shown


def test_a_text_explanation_shows_itself_and_is_one_screen(stand_ins):
    model = sot.equip(stand_ins["google-bert/bert-base-uncased"], labels=["no", "yes"], head=HEAD).eval()
    explanation = explain_text(model, model.processor, "the cat <b>sleeps 😀 " * 60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = explanation._repr_html_()
    assert page.startswith("<div><h1>") and "<style" not in page and "<b>" not in page and "data:image/png" in page
    assert explanation._repr_png_().startswith(b"\x89PNG")
    shown = repr(explanation)
    assert shown.startswith("TextExplanation of ") and len(shown) < 2000 and shown.count("\n") < 20
