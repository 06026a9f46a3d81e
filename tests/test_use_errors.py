"""Trained models used wrongly, damaged, or on inputs that nobody should have: one sentence, and nothing lost."""

import io
import json
import pickle
import shutil
import sys

import numpy as np
import pytest
import torch
from ddp_worker import HEAD, SIZE
from PIL import Image
from safetensors.torch import load_file, save_file
from test_cli import sot

import sot as package
from sot.cli.explain import _file_names
from sot.cli.main import option_of, worded
from sot.errors import SettingError
from sot.evaluation.export import export_model
from sot.evaluation.metrics import image_scores
from sot.evaluation.predict import predict_texts
from sot.models.folder import load_model
from sot.paper.convert import read_weights
from sot.training.recipe import Recipe
from sot.training.run_folder import open_run


def picture_model(folder, labels):
    arguments = {"pretrained": False, "model_args": {"img_size": SIZE}}
    package.equip("test_vit", labels=labels, head=HEAD, **arguments).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def place(stand_ins, tmp_path_factory):
    """Models of images, of texts and of numbers, and an image."""
    root = tmp_path_factory.mktemp("use")
    picture_model(root / "image", ["[bold]a[/b]", ":cat:", "c"])
    bert = stand_ins["google-bert/bert-base-uncased"]
    package.equip(bert, labels=["no", "yes"], head=HEAD).save_pretrained(root / "text")
    package.equip(bert, labels=["score"], head=HEAD, problem_type="regression").save_pretrained(root / "number")
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(root / "x.png")
    return root


def refused(*words, says, cwd=None):
    result = sot(*words, cwd=cwd)
    assert result.returncode == 2 and says in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("\n") == 1, result.stderr


# --- what errors say ---------------------------------------------------------------------------------------


def test_settings_are_options_on_the_command_line_only():
    error = SettingError("{img_size} {!r} does not fit {}, see {settings}", "{out}", "{model}")
    assert isinstance(error, ValueError) and error.settings == ["img_size", "settings"]
    assert str(error) == "img_size '{out}' does not fit {model}, see settings"
    assert error.worded(option_of) == "--img-size '{out}' does not fit {model}, see --set"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # as workers hand it on


# --- what --overwrite may delete ---------------------------------------------------------------------------


def start(out, overwrite=True, resume=False, **identity):
    settings = {"command": "train", "model": "test_vit", "data": "digits", **identity}
    with open_run(out, settings, Recipe(), resume=resume, overwrite=overwrite):
        pass


def test_overwrite_deletes_runs_only(tmp_path, monkeypatch):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("years")
    with pytest.raises(ValueError, match=r"precious is not the folder of a run: it has no run\.json"):
        start(tmp_path / "precious")
    run = tmp_path / "run"
    start(run)
    for name in ("data", "checkpoint-1"):
        (run / name).mkdir()
    (run / "table.csv").write_text("")
    for name, value in (("data", run / "data"), ("data", f"wds/a@{run / 'data'}"), ("source", run / "table.csv")):
        with pytest.raises(ValueError, match=f"overwrite would delete the {name}, which is in"):
            start(run, **{name: str(value)})
    with pytest.raises(ValueError, match="would delete the model"):
        start(run, model=str(run))
    for here, out in ((run, "."), (run, ""), (run / "data", "..")):
        monkeypatch.chdir(here)
        with pytest.raises(ValueError, match="would delete the current directory"):
            start(type(tmp_path)(out))
    assert (tmp_path / "precious" / "thesis.tex").is_file() and (run / "table.csv").is_file()
    monkeypatch.chdir(tmp_path)
    start(run)
    assert {path.name for path in run.iterdir()} == {"run.json", "recipe.yaml"}


def test_a_run_killed_while_it_was_started_or_replaced_can_be_started(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.partial").write_text("{")
    start(tmp_path / "run", overwrite=False)
    for name in ("a", "model.safetensors", "z"):
        (tmp_path / "run" / name).write_text("")
    with monkeypatch.context() as killed:
        killed.setattr("sot.training.run_folder.write_atomically", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            start(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]
    start(tmp_path / "run")


def test_where_no_run_can_be(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=r"out must be a folder, and .*file is a file"):
            start(out)
    with pytest.raises(ValueError, match="give one of them"):
        start(tmp_path / "run", resume=True)
    assert (tmp_path / "file").is_file() and not (tmp_path / "run").exists()


# --- exporting into folders in use -------------------------------------------------------------------------


def test_an_export_never_borrows_the_classes_of_another(place, tmp_path):
    first, second = picture_model(tmp_path / "first", ["a", "b", "c"]), picture_model(tmp_path / "second", ["d", "e"])
    out = tmp_path / "exports"
    (out / ".export-model.pt2").mkdir(parents=True)
    (out / ".export-model.pt2" / "model.pt2").write_text("of an export that was killed")
    export_model(first, "torch", out / "model.pt2")
    assert not list(out.glob(".export-*"))
    with pytest.raises(ValueError, match=r"exports holds the config.json of another model: export to a folder of its"):
        export_model(second, "torch", out / "other.pt2")
    export_model(first, "torch", out / "other.pt2")
    with pytest.raises(ValueError, match="of another model"):
        export_model(second, "torch", out / "model.pt2")  # which other.pt2 needs
    (out / "other.pt2").unlink()
    export_model(second, "torch", out / "model.pt2")
    result = sot("predict", out / "model.pt2", place / "x.png", "--json")
    assert {name for name, _ in json.loads(result.stdout)["classes"]} == {"d", "e"}
    (tmp_path / "file").write_text("")
    refused("export", first, "--out", tmp_path / "file" / "model.onnx", says="--out must be in a folder, and")
    (out / "config.json").write_text('{"model_type": "bert"}')
    refused("predict", out / "model.pt2", place / "x.png", says="is a model of type bert, not one that sot trained")


# --- predicting --------------------------------------------------------------------------------------------


def rows_of(*words):
    result = sot("predict", *words, "--json")
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_scores_follow_the_problem(place, tmp_path):
    texts = ["--text", "the cats sleep", "--text", "cat"]
    values = [row["classes"][0][1] for row in rows_of(place / "number", *texts)]
    assert values[0] != pytest.approx(values[1])  # softmax of one is 1
    export_model(place / "number", "torch", tmp_path / "model.pt2")
    exported = [row["classes"][0][1] for row in rows_of(tmp_path / "model.pt2", *texts)]
    assert exported == pytest.approx(values, abs=1e-4)
    shutil.copytree(place / "text", tmp_path / "several")
    config = json.loads((place / "text" / "config.json").read_text())
    config["problem_type"] = "multi_label_classification"
    (tmp_path / "several" / "config.json").write_text(json.dumps(config))
    (one,), (several,) = (rows_of(folder, "--text", "cat") for folder in (place / "text", tmp_path / "several"))
    odds = [(score / (1 - score)) for _, score in several["classes"]]
    (_, high), (_, low) = one["classes"]
    assert odds[0] / odds[1] == pytest.approx(high / low, rel=1e-4) and sum(odds) != pytest.approx(high / low + 1)


def test_both_texts_of_a_pair_are_read(place):
    pairs = ["--text", "the cat", "--pair", "sleeps", "--text", "the cat", "--pair", "the cats sleep"]
    first, second = rows_of(place / "text", *pairs)
    assert first["classes"] != second["classes"] and (first["source"], first["pair"]) == ("the cat", "sleeps")
    model, tokenizer = load_model(place / "text")
    with torch.inference_mode():
        encoded = tokenizer("the cat", "sleeps", return_tensors="pt")
        expected = model(**encoded).logits.softmax(-1).max().item()
    assert first["classes"][0][1] == pytest.approx(expected, abs=1e-5)
    assert "sleeps" in sot("predict", place / "text", *pairs).stdout


def test_options_that_would_be_ignored_are_refused(place, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("cat\n"))
    image, text = place / "image", place / "text"
    for words, says in (
        (["predict", text, "-", "--text", "x"], "- reads every input from standard input: leave out --text"),
        (["predict", text, "-", "x"], "leave out other inputs"),
        (["predict", text, "-", "--pair", "x"], "--pair is given once for each --text, and for no other input, got 1"),
        (["predict", text, "--text", "x", "--pair", "y", "--pair", "z"], "--pair is given once for each --text"),
        (["predict", image, "--text", "x"], "is a model for images: leave out --text"),
        (["predict", text, place / "x.png"], "text is a model for texts: give --text, or - for one a line, not"),
        (["evaluate", image, "--data", "digits", "--confusion", "c.jpg"], "--confusion must end in .png, got c.jpg"),
        (["predict", text, "--text", "bad \udcff"], r"the text 'bad \udcff' is not valid UTF-8"),
        (["explain", text, "--text", "bad \udcff", "--out", place / "o"], r"the text 'bad \udcff' is not valid UTF-8"),
        (["evaluate", image, "--task", "cola"], "image is a model for images: leave out --task"),
        (["evaluate", image, "--text", "a", "--pair", "b"], "leave out --text and --pair"),
        (["evaluate", text, "--samples", "3"], "text is a model for texts: leave out --samples"),
        (["evaluate", text, "--all-classes", "--corruptions", "all"], "leave out --all-classes and --corruptions"),
        (["evaluate", image, "--corruptions", "all", "--confusion", "c.png"], "leave out --confusion"),
        (["evaluate", image, "--severities", "1"], "there are no --corruptions: leave out --severities"),
        (["evaluate", image, "--data", "digits", "--confusion", "nowhere/c.png"], "needs the folder nowhere, which is"),
    ):
        refused(*words, says=says)
    assert not (place / "o").exists()


@pytest.mark.parametrize(
    "words, says",
    [
        (
            ["evaluate", "text", "--data", "images"],
            "text is a model for texts: give --data a table of them, and im",
        ),
        (["evaluate", "image", "--data", "a.csv"], "image is a model for images, and a.csv is a table of texts"),
        (["evaluate", "image", "--data", "a.csv", "--encoding", "x"], "a model for images: leave out --encoding"),
        (["evaluate", "image", "--data", "digits", "--confusion", "/proc/c.png"], "cannot write in /proc: "),
        (["evaluate", "text", "--data", "none.csv"], "no such file: none.csv"),
        (["export", "image", "--out", "/proc/model.onnx"], "cannot write in /proc: "),
        (["export", "images"], "images is not a model: it has no config.json"),
        (["explain", "image", "x.png", "--out", "/proc/maps"], "cannot write in /proc: "),
        (["explain", "text", "x.png", "--out", "o"], "text is a model for texts: give --text, not images"),
        (["explain", "image", "none.png", "--out", "o"], "no such image: none.png"),
        (["explain", "image", "x.png", "--out", "o", "--method", "foo"], "unknown method 'foo' for images; accepted:"),
        (["explain", "image", "x.png", "--out", "o", "--target", "foo"], "the target 'foo' is not a class of the mod"),
        (["explain", "text", "--text", "a", "--out", "o", "--label", "foo"], "the label 'foo' is not a class"),
        (["evaluate", "image", "--data", "digits", "--corruptions", "noise", "--severities", "x"], "numbers from 1 to"),
    ],
)
def test_mistakes_in_arguments_are_found_before_torch_is_loaded(words, says, place, monkeypatch):
    (place / "images" / "cat").mkdir(parents=True, exist_ok=True)
    (place / "a.csv").write_text("sentence,label\na,no\n")
    for name in (
        "sot.evaluation.robustness",
        "sot.evaluation.evaluate",
        "sot.evaluation.export",
        "sot.explain",
        "sot.models.folder",
    ):
        monkeypatch.setitem(sys.modules, name, None)  # importing one of these would now fail
    refused(*words, says=says, cwd=place)


def test_five_likeliest_of_few_classes_are_not_scored():
    logits, labels = np.eye(7)[:, ::-1], np.arange(7)
    assert "top5" not in image_scores(logits[:, :5], labels % 5) and image_scores(logits, labels)["top5"] == 5 / 7


def test_what_the_system_says_of_a_file_is_shown_without_its_number():
    error = PermissionError(13, "Permission denied", "a/b.csv")
    assert worded(error) == "a/b.csv: Permission denied" and worded(OSError("no such file: x")) == "no such file: x"


def test_one_bad_input_is_reported_and_the_others_predicted(place, tmp_path, monkeypatch):
    Image.new("RGB", (1, 6000)).save(tmp_path / "long.png")
    lines = [str(place / "x.png").encode(), b"a" * 300, b"\xff.png", str(tmp_path / "long.png").encode()]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n".join(lines)), encoding="utf-8"))
    result = sot("predict", place / "image", "-", "--json")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["error"] for row in found[:3]] == [None, "no such file", "no such file"]
    assert found[3]["error"] == "it has 1×6000 pixels, and sides of at most 200 to 1 are accepted"
    assert result.returncode == 2 and "3 of 4 inputs could not be read" in result.stderr
    refused("explain", place / "image", "long.png", "--out", "o", says="long.png: it has 1×6000 pixels", cwd=tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"cat\n\xff\nthe cat\n"), encoding="utf-8"))
    result = sot("predict", place / "text", "-")
    assert r"Cannot read \udcff: it is not valid UTF-8" in result.stderr and "1 of 3 inputs" in result.stderr
    assert "the cat" in result.stdout
    model, tokenizer = load_model(place / "text")
    assert [p.error is None for p in predict_texts(model, tokenizer, ["\udcff", "cat"], 1, 1)] == [False, True]


def test_pictures_are_turned_as_their_camera_says(place, tmp_path):
    picture = Image.open(place / "x.png")
    notes = Image.Exif()
    notes[0x0112] = 3  # upside down
    picture.rotate(180).save(tmp_path / "turned.png", exif=notes)
    upright, turned = rows_of(place / "image", place / "x.png", tmp_path / "turned.png")
    assert [score for _, score in turned["classes"]] == pytest.approx([score for _, score in upright["classes"]])


def test_brackets_and_colons_are_shown_as_they_are(place, tmp_path):
    for text in ("closing [/b] tag", "a [bold] word", "a :cat: sleeps"):
        result = sot("predict", place / "text", "--text", text)
        assert result.returncode == 0 and text in result.stdout, result.stderr
    result = sot("predict", place / "image", place / "x.png")
    assert "[bold]a[/b]" in result.stdout and ":cat:" in result.stdout, result.stderr
    result = sot("explain", place / "text", "--text", "the [/b] :cat:", "--out", tmp_path / "[/b]")
    assert result.returncode == 0 and "[/b]" in result.stdout, result.stderr
    shutil.copy(place / "x.png", tmp_path / "[b].png")
    result = sot("explain", place / "image", "[b].png", "--label", "[bold]a[/b]", "--out", "o", cwd=tmp_path)
    assert result.returncode == 0 and "[b].png" in result.stdout and "[bold]" in result.stdout, result.stderr


def test_a_picture_that_cannot_be_written_is_refused_before_scoring(tmp_path):
    labels = ["[bold]a", ":cat:"]
    folder = picture_model(tmp_path / "[/b]", labels)
    for number, name in enumerate(labels):
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (SIZE, SIZE), (90 * number, 0, 0)).save(tmp_path / "data" / name / "x.png")
    (tmp_path / "c.png").mkdir()
    words = ("evaluate", folder, "--data", tmp_path / "data", "--confusion")
    refused(*words, tmp_path / "c.png", says="c.png: it is a folder")
    result = sot(*words, tmp_path / "d.png")
    assert result.returncode == 0 and (tmp_path / "d.png").is_file()
    assert "accuracy" in result.stdout and all(name in result.stdout for name in labels)


# --- figures, damaged models and weights -------------------------------------------------------------------


def test_every_picture_has_figures_of_its_own(place, tmp_path):
    paths = [tmp_path / name for name in ("a/p.png", "b/P.png", "1-p.png", "columns.png")]
    assert _file_names(paths) == ["1-p", "2-P", "3-1-p", "4-columns"]
    shutil.copy(place / "x.png", tmp_path / "x.png")
    says = "would replace the image x.png: choose another --out"
    refused("explain", place / "image", "x.png", "--out", ".", says=says, cwd=tmp_path)
    assert (tmp_path / "x.png").read_bytes() == (place / "x.png").read_bytes()


def test_a_model_without_its_head_is_refused(place, tmp_path):
    shutil.copytree(place / "image", tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    kept = {name: value for name, value in state.items() if not name.startswith("classifier.")}
    save_file(kept, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    says = "model are not whole: they lack classifier."
    refused("predict", tmp_path / "model", place / "x.png", says=says)


@pytest.mark.parametrize(
    "layout, says", [({"dim": 64, "rows": 1}, "unknown 'rows'"), ({"norm": None}, "it lacks 'dim'")]
)
def test_a_damaged_layout_is_refused(layout, says, place, tmp_path):
    shutil.copytree(place / "image", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "layout": layout}))
    refused("predict", tmp_path / "model", place / "x.png", says=says)


@pytest.mark.parametrize("content", [[1, 2], torch.zeros(2), {"model": [1]}, {3: torch.zeros(1)}, {"cls_token": 3}])
def test_files_without_weights_by_name_are_refused(content, tmp_path):
    torch.save(content, tmp_path / "theirs.pth")
    with pytest.raises(ValueError, match=r"theirs\.pth holds no plain weights; accepted: safetensors, or tensors by"):
        read_weights(tmp_path / "theirs.pth")


def test_a_picture_that_cannot_be_read_is_not_scored(tmp_path, monkeypatch):
    monkeypatch.setattr("sot.data.images.MAX_BAD_SHARE", 1)
    folder = picture_model(tmp_path / "model", ["a", "b"])
    for name in ("a/1.png", "a/2.png", "b/1.png"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (SIZE, SIZE)).save(tmp_path / "data" / name)
    (tmp_path / "data" / "a" / "2.png").write_text("no image")
    result = sot("evaluate", folder, "--data", tmp_path / "data", "--json")
    assert result.returncode == 0, result.stderr
    assert [samples for _, samples, *_ in json.loads(result.stdout)["classes"]] == [1, 1]
