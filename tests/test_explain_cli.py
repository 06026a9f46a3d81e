"""`sot explain` as people type it, whole explanations of images, and images from strangers."""

import io
import json
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from test_cli import sot
from test_explain_text import SENTENCES, enlarge, make_bert, make_tokenizer

from sot.cli.explain import METHODS
from sot.explain import (
    BOTH,
    CLASS,
    IMAGE_METHODS,
    SOUND_METHODS,
    TEXT_METHODS,
    WORDS,
    columns_figure,
    explain_image,
    explain_item,
    open_upload,
)
from sot.models.equip import equip

HEAD = {"heads": 2, "left_dim": 4, "right_dim": 4}
LABELS = ["cat", "dog", "$fish$"]


def make_model(folder=None, seed=0, **head):
    torch.manual_seed(seed)
    size = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    model = equip("vit_tiny_patch16_224", head={**HEAD, **head}, labels=LABELS, pretrained=False, model_args=size)
    enlarge(model)
    if folder is not None:
        model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models, and images of which two lie in folders with the name of their class."""
    root, draw = tmp_path_factory.mktemp("explain"), np.random.default_rng(0)
    make_model(root / "model")
    make_model(root / "class", seed=1, fusion="class")
    tokenizer = make_tokenizer(SENTENCES)
    text = enlarge(equip(make_bert(tokenizer), labels=["no", "yes"], head=HEAD))
    text.processor = tokenizer
    text.save_pretrained(root / "text")
    for folder in ("cat", "dog", "other"):
        (root / folder).mkdir()
        Image.fromarray(draw.integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(root / folder / "1.png")
    (root / "no.png").write_text("no image")
    return root


def test_pictures_to_figures_and_raw_maps(place, tmp_path):
    pictures = [place / name / "1.png" for name in ("cat", "dog", "other")]
    result = sot("explain", place / "model", *pictures, "--out", tmp_path / "a/b", "--json")
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["truth"] for record in records] == ["cat", "dog", None]
    assert [c["name"] for c in records[0]["columns"]] == [CLASS, WORDS, BOTH]
    assert all(c["correct"] == (c["predicted"] == "cat") for c in records[0]["columns"])
    assert all(c["correct"] is None for c in records[2]["columns"])
    added = records[0]["contributions"]
    assert added["class token"] + added["words"] + added["bias"] == pytest.approx(added["logit"], abs=1e-4)
    names = {path.name for path in (tmp_path / "a/b").iterdir()}
    assert names == {"columns.png", *(f"{n}-1.{kind}" for n in (1, 2, 3) for kind in ("png", "npz"))}
    arrays = np.load(tmp_path / "a/b/1-1.npz", allow_pickle=False)
    assert arrays["map_both"].shape == (4, 4) and arrays["evidence_pairs"].shape == (16, 16)
    assert arrays["spectrum_before"].shape == (2, 4) and list(arrays["labels"]) == LABELS
    assert Image.open(tmp_path / "a/b/1-1.png").size[0] >= 800  # the width that pages show


def test_a_table_with_marks_and_columns_of_other_models(place, tmp_path):
    options = (place / "other/1.png", "--label", "dog", "--target", "cat", "--method", "hirescam")
    result = sot("explain", place / "model", *options, "--out", tmp_path, "--class-model", place / "class")
    assert result.returncode == 0, result.stderr
    assert "By hirescam" in result.stdout and ("✓" in result.stdout or "✗" in result.stdout)
    assert sot("explain", place / "class", *options, "--out", tmp_path / "alone").returncode == 0
    both, one = np.load(tmp_path / "1.npz"), np.load(tmp_path / "alone/1.npz")
    assert both["map_class_token"] == pytest.approx(one["map_class_token"], abs=1e-6)


def test_a_text_to_a_page(place, tmp_path):
    options = ("--text", "the old cat", "--pair", "the <kings>", "--label", "yes", "--out", tmp_path)
    result = sot("explain", place / "text", *options)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"text.html", "text.png", "text.npz"}
    assert "&lt;" in (tmp_path / "text.html").read_text() and "By relevance" in result.stdout
    assert "rest was cut off" in sot("explain", place / "text", "--text", "the cat " * 12500, "--out", tmp_path).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model"], "is a model for images: give at least one"),
        (["model", "--text", "a"], "is a model for images: give images, not --text"),
        (["text", "cat/1.png"], "is a model for texts: give --text, not images"),
        (["text"], "is a model for texts: give --text"),
        (["model", "none.png"], "no such image"),
        (["model", "cat/1.png", "no.png"], "cannot read no.png: it is no image"),
        (["model", "cat/1.png", "--method", "cam"], "unknown method 'cam' for images; accepted: gradcam"),
        (
            ["text", "--text", "a", "--method", "gradcam"],
            "unknown method 'gradcam' for texts; accepted: relevance, gra",
        ),
        (["model", "cat/1.png", "--label", "cow"], "the label 'cow' is not a class of the model; accepted: cat, dog"),
        (["model", "cat/1.png", "--target", "cow"], "the target 'cow' is not a class of the model"),
        (["model", "cat/1.png", "--label", "cat", "--label", "dog"], "--label must be given once, or once for each"),
        (["model", "cat/1.png", "--word-model", "text"], "has not the same inputs and classes"),
        (["nowhere", "cat/1.png"], "nowhere"),
    ],
)
def test_errors_are_one_sentence_before_any_work(place, arguments, message, tmp_path):
    result = sot("explain", *arguments, "--out", tmp_path / "out", cwd=place)
    assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert not (tmp_path / "out").exists()


def test_help_lists_the_methods():
    shown = sot("explain", "--help").stdout
    assert all(method in shown for method in (*IMAGE_METHODS, "gradient"))
    assert METHODS == {"images": IMAGE_METHODS, "texts": TEXT_METHODS, "sounds": SOUND_METHODS}


def test_the_file_of_figures_is_no_picture(place, tmp_path):
    (tmp_path / "out").write_text("")
    result = sot("explain", place / "model", place / "cat/1.png", "--out", tmp_path / "out")
    assert result.returncode == 2 and "--out must be a folder" in result.stderr
    result = sot("explain", place / "model", place / "cat/1.png", "--out", tmp_path / "why.png")
    assert result.returncode == 2 and "why.png: leave out .png" in result.stderr and not (tmp_path / "why.png").exists()


# --- the function a page calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", ["sum", "concat", "late", "aggr_all", "class", "word"])
def test_one_call_has_everything(fusion):
    model = make_model(fusion=fusion)
    found = explain_item(model, model.processor, Image.new("RGB", (50, 40), (200, 30, 90)), truth="$fish$")
    parts = [column.name for column in found.columns]
    expected = {"aggr_all": ["all tokens"], "class": [CLASS], "word": [WORDS]}
    assert parts == expected.get(fusion, [CLASS, WORDS, BOTH])
    assert found.method == "relevance" and found.grid == (4, 4) and found.picture.shape == (32, 32, 3)
    assert np.abs(found.picture.astype(int) - [200, 30, 90]).max() <= 1  # as it was, its normalisation undone
    assert (found.evidence is None) == (fusion == "class") and found.contributions.note == found.notes[0]
    assert len(found.figure().get_axes()) == 1 + len(parts) + 1 + 3  # with the key of the colours


def test_pictures_in_rows_as_in_the_paper():
    model = make_model()
    one = explain_image(model, model.processor, Image.new("RGB", (32, 32)))
    assert len(columns_figure([one, one]).get_axes()) == 8 + 1  # with the key of the colours


def test_parallel_calls_on_one_model_agree_with_one():
    model = make_model()
    pictures = [Image.effect_noise((40, 40), 20 + number).convert("RGB") for number in range(6)]
    alone = [explain_image(model, model.processor, picture) for picture in pictures]
    together: list = [None] * 6

    def work(number):
        together[number] = explain_image(model, model.processor, pictures[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, together):
        assert all(np.allclose(a.values, b.values, atol=1e-6) for a, b in zip(one.columns, other.columns))


def test_models_of_others_are_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"Linear cannot be explained; accepted: a model that sot\.equip"):
        explain_item(torch.nn.Linear(2, 2), None, "text")


def test_pictures_from_strangers():
    large = io.BytesIO()
    Image.new("1", (9000, 9000)).save(large, "PNG")
    with pytest.raises(ValueError, match="9000×9000 pixels, and at most 50,000,000 are accepted"):
        open_upload(io.BytesIO(large.getvalue()))
    with pytest.raises(ValueError, match="no image that can be read"):
        open_upload(io.BytesIO(b"no image at all" * 9))
    with pytest.raises(ValueError, match="cannot read the image"):
        open_upload(io.BytesIO(large.getvalue()[:60]))
    small = io.BytesIO()
    Image.new("RGBA", (3, 2)).save(small, "PNG")
    assert open_upload(io.BytesIO(small.getvalue())).mode == "RGB"
