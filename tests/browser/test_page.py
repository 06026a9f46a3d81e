"""The page in a real browser. `make test-browser` runs this; UI_SCREENSHOTS=docs keeps the pictures of the docs."""

import io
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

from ui_models import save_digits, save_verbs

from sot.data.images import load_images
from sot.explain import explain_item
from sot.ui.serve import serving
from sot.ui.shown import first_models, open_models, small_recipe

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.browser, pytest.mark.timeout(1200)]
PATIENCE = 240_000  # milliseconds: a busy machine is no failure
RESULT, REFUSAL = "#left .sot-result", "#left .sot-refusal"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    folders = [
        save_digits(root / "digits"),
        save_digits(root / "digits-class-token", "class", steps=120),
        save_verbs(root / "verbs"),
    ]
    return open_models(folders)


@pytest.fixture(scope="module")
def address(models):
    with serving(models) as found:
        yield found


@pytest.fixture(scope="module")
def chromium():
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("chromium is not installed: make test-browser installs it")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, headless=True, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium, address):
    """A function that opens the page at a width; afterwards nothing outside was asked for and no script failed."""
    contexts, asked, failures = [], [], []

    def open_page(width=1280, height=860, scheme="light"):
        contexts.append(chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.goto(address)
        page.locator("#explain").wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    own = (address, "data:", "blob:")
    assert len(asked) > 5 and [url for url in asked if not url.startswith(own)] == []
    assert failures == []


@pytest.fixture(scope="module")
def digit(models):
    """A picture that the models were not trained on and the first one knows, as a file, and its class."""
    data, first = load_images("digits"), models["digits"]
    for enlarged in (p.resize((160, 160), Image.Resampling.BICUBIC) for p, label in data.val if label == 3):
        name, score = explain_item(first.model, first.processor, enlarged).predictions[0]
        if name == "3" and score > 0.8:
            break
    file = io.BytesIO()
    enlarged.save(file, "PNG")
    return {"name": "three.png", "mimeType": "image/png", "buffer": file.getvalue()}, name


def upload(page, file):
    page.locator("#picture input[type=file]").first.set_input_files(file)


def choose(page, dropdown, value):
    page.locator(f"#{dropdown} input").click()
    page.get_by_role("option", name=value, exact=True).click()


def keep(page, name):
    """A screenshot for the docs, if they are to be made anew."""
    if "UI_SCREENSHOTS" in os.environ:
        page.mouse.move(0, 0)
        page.wait_for_timeout(1500)
        picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
        picture.convert("RGB").save(Path(os.environ["UI_SCREENSHOTS"]) / name, optimize=True)


def titles(page, side="left"):
    return page.locator(f"#{side} .sot-card h3").all_inner_texts()


def fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_an_uploaded_picture_is_explained_and_its_figure_downloaded(visit, digit):
    file, label = digit
    page = visit()
    assert page.title().startswith("SoT") and fits(page)
    upload(page, file)
    page.locator(RESULT).wait_for()
    assert page.locator(".sot-predictions li").first.inner_text().split()[0] == label
    heads = titles(page)
    assert [title.split(":")[0] for title in heads[1:4]] == ["Class token", "Words", "Both"]
    assert heads[4].startswith("Pairs") and "branch" in heads[5] and heads[6].startswith("Spectrum")
    widths = page.locator("#left .sot-card img").evaluate_all("images => images.map(image => image.naturalWidth)")
    assert len(widths) == 4 and min(widths) > 200 and page.locator("#left .sot-plot svg").count() == 2
    tops = page.locator("#left .sot-map").evaluate_all("cards => cards.map(card => card.getBoundingClientRect().top)")
    assert len(set(tops)) == 1  # side by side
    with page.expect_download() as download:
        page.get_by_text("Figure (.png)").click()
    assert Image.open(download.value.path()).width >= 960 and download.value.suggested_filename == "explanation.png"
    with page.expect_download() as download:
        page.get_by_text("Raw values (.npz)").click()
    assert np.load(download.value.path())["map_both"].shape == (8, 8)
    assert fits(page)


CONTRASTS = (Path(__file__).parent / "contrast.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["picture", "text", "refusal"])
def test_every_text_can_be_read_in_light_and_dark(visit, digit, scheme, kind):
    page = visit(scheme=scheme)
    page.get_by_text("Options").click()
    if kind == "text":
        choose(page, "model", "verbs")
        page.locator(".sot-examples button:visible").first.click()
    elif kind == "picture":
        upload(page, digit[0])
    else:
        page.locator("#explain").click()
    page.locator(REFUSAL if kind == "refusal" else RESULT).wait_for()
    page.wait_for_timeout(1000)  # colours fade in
    found = page.evaluate(CONTRASTS)
    page.get_by_text("Options").click()
    if kind == "picture":
        keep(page, "ui.png" if scheme == "light" else "ui-dark.png")
    assert len(found) > (10 if kind == "refusal" else 40)
    assert [each for each in found if each["ratio"] < each["needed"]] == []
    assert [each for each in found if each["size"] < 8 * 96 / 72] == []  # eight points
    if kind != "refusal":
        assert sum(each["drawn"] for each in found) > 15
    dark = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", dark)[:3])) < 80) == (scheme == "dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_has_the_focus_is_outlined(visit, scheme):
    page = visit(scheme=scheme)
    outline = "e => { const s = getComputedStyle(e); return s.outlineStyle + ' ' + parseFloat(s.outlineWidth) }"
    for name in ("#model input", "#other input", "#explain"):
        page.locator(name).focus()
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Tab")
        assert page.locator(name).evaluate("e => e === document.activeElement")
        assert page.locator(name).evaluate(outline) == "solid 3"


def test_training_shows_how_far_it_is(chromium, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = small_recipe().changed(["epochs=2", "evaluate_every=2"])
    monkeypatch.setattr("sot.ui.shown.small_recipe", lambda: recipe)
    with serving(first_models(lambda text: None)) as address:
        page = chromium.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(address)
        page.locator("#training progress").wait_for()
        page.wait_for_function("document.querySelector('#training progress')?.value > 0.05")
        page.locator("#training").wait_for(state="hidden")
        page.locator(".sot-examples button:visible").nth(1).click()
        page.locator(RESULT).wait_for()
        page.close()


def test_an_example_a_true_class_and_another_method(visit):
    page = visit()
    page.locator(".sot-examples button:visible").nth(1).click()
    page.locator(RESULT).wait_for()
    page.get_by_text("Options").click()
    page.get_by_label("True class").fill("8")
    page.get_by_label("True class").press("Enter")
    page.get_by_label("Method").fill("gradcam")
    page.get_by_label("Method").press("Enter")
    page.locator("#explain").click()
    page.locator("#left .sot-truth").wait_for()
    assert page.locator("#left .sot-truth").inner_text() == "It is 8."
    assert "by gradcam" in page.locator("#left header").inner_text()
    assert all(title[-1] in "✓✗" for title in titles(page)[1:4])


def test_a_sentence_is_explained_word_by_word(visit):
    page = visit()
    choose(page, "model", "verbs")
    page.locator("#text textarea").wait_for()
    assert not page.locator("#picture").is_visible()
    page.locator("#text textarea").fill("the old cat <b>sleeps</b> near the {{tailors}} ${1+1}")
    page.locator("#explain").click()
    page.locator(RESULT).wait_for()
    words = page.locator("#left .sot-words").last
    assert "<b>sleeps</b> near the {{tailors}} ${1+1}" in words.inner_text()
    assert words.locator("mark").count() >= 7 and page.locator("#left .sot-words").count() == 3
    assert words.locator("b").count() == 0 and fits(page)
    page.locator("#text textarea").fill("x" * 100_000)
    page.locator("#explain").click()
    page.locator(REFUSAL).wait_for()
    assert "100,000 characters" in page.locator(REFUSAL).inner_text()
    page.locator(".sot-examples button:visible").first.click()
    page.locator(RESULT).wait_for()


def test_two_models_are_compared_side_by_side(visit, digit):
    page = visit()
    choose(page, "other", "digits-class-token")
    upload(page, digit[0])
    page.locator("#right .sot-result").wait_for()
    assert [page.locator(f"#{side} h2").inner_text() for side in ("left", "right")] == ["digits", "digits-class-token"]
    assert [title.split(":")[0] for title in titles(page, "right")[1:2]] == ["Class token"]
    left, right = (page.locator(f"#{side}").bounding_box() for side in ("left", "right"))
    assert left["x"] + left["width"] <= right["x"] + 1 and fits(page)
    choose(page, "other", "no other model")
    page.locator("#explain").click()
    page.locator("#right .sot-result").wait_for(state="hidden")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("no.png", b"this is no picture", "no image that can be read"),
        ("half.png", None, "cannot read"),
        ("large.png", b"\0" * 22_000_000, "maximum allowed size of 20"),
    ],
)
def test_a_bad_upload_is_refused_in_words(visit, digit, name, content, said):
    page = visit()
    upload(page, {**digit[0], "name": name, "buffer": digit[0]["buffer"][:900] if content is None else content})
    message = page.locator(f"{REFUSAL}, .toast-body").first
    message.wait_for()
    assert said in message.inner_text() and "Traceback" not in page.content()
    upload(visit(), digit[0])  # and the next one is served


def test_the_page_fits_a_phone(visit, digit):
    page = visit(390, 844)
    assert fits(page)
    upload(page, digit[0])
    page.locator(RESULT).wait_for()
    assert fits(page)
    boxes = [page.locator("#left .sot-map").nth(number).bounding_box() for number in range(3)]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["width"] > 90 for box in boxes)
    keep(page, "ui-phone.png")
    choose(page, "other", "digits-class-token")
    page.locator("#explain").click()
    page.locator("#right .sot-result").wait_for()
    assert fits(page)
    left, right = (f"document.getElementById('{side}').getBoundingClientRect()" for side in ("left", "right"))
    page.wait_for_function(f"{right}.top > {left}.bottom - 1", timeout=20_000)  # below each other, once all is drawn
