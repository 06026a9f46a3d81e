"""`sot predict` as people use it: folders, tables, files to write, long texts."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ddp_worker import HEAD, SIZE
from PIL import Image
from test_cli import sot
from test_program import HEAVY, loaded, start

import sot as package
from sot.evaluation.predict import predict_texts
from sot.models.folder import load_model

CLASSES = ["cat", "dog", "bird"]


@pytest.fixture(scope="module")
def place(stand_ins, tmp_path_factory):
    """Models of images, of texts of at most 8 tokens, and of numbers; images in a folder."""
    root = tmp_path_factory.mktemp("predict")
    arguments = {"pretrained": False, "model_args": {"img_size": SIZE}}
    package.equip("test_vit", labels=CLASSES, head=HEAD, **arguments).save_pretrained(root / "image")
    bert = stand_ins["google-bert/bert-base-uncased"]
    for name, labels, options in (("text", ["no", "yes"], {}), ("number", ["score"], {"problem_type": "regression"})):
        model = package.equip(bert, labels=labels, head=HEAD, **options)
        model.processor.model_max_length = 8
        model.save_pretrained(root / name)
    draw = np.random.default_rng(0)
    for name in ("b.png", "a.jpg", "deep/er/c.PNG", ".hidden/d.png", ".e.png"):
        (root / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(root / "photos" / name)
    (root / "photos" / "notes.txt").write_text("no image")
    (root / "texts.csv").write_text("id;text;other\n1;the cat;sleeps\n2;cats, cats;sleep\n3;sleep;the\n")
    return root


def run(*words, code=0):
    result = sot("predict", *words)
    assert result.returncode == code and "Traceback" not in result.stderr, result.stderr
    return result


def lines(*words):
    return [json.loads(line) for line in run(*words, "--json").stdout.splitlines()]


def table(file, delimiter=","):
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened, delimiter=delimiter))


# --- folders and tables ------------------------------------------------------------------------------------


def test_a_folder_stands_for_all_pictures_in_it(place, tmp_path):
    photos = place / "photos"
    expected = [str(photos / name) for name in ("a.jpg", "b.png", "deep/er/c.PNG")]
    found = lines(place / "image", photos, photos / "b.png", "--top", "2")
    assert [row["source"] for row in found] == [*expected, expected[1]] and found[1] == found[3]
    assert all(len(row["classes"]) == 2 for row in found)
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty'} holds no images" in run(place / "image", tmp_path / "empty", code=2).stderr


def test_a_table_comes_back_with_scores_beside_its_columns(place, tmp_path):
    out = tmp_path / "scores.csv"
    result = run(place / "text", "--data", place / "texts.csv", "--output", out, "--batch-size", "2")
    assert "3 predictions in" in result.stdout and list(tmp_path.iterdir()) == [out]
    rows = table(out)
    assert list(rows[0]) == ["id", "text", "other", "predicted", "score", "predicted_2", "score_2", "note"]
    assert [(row["id"], row["text"]) for row in rows] == [("1", "the cat"), ("2", "cats, cats"), ("3", "sleep")]
    expected = lines(place / "text", "--text", "the cat", "--text", "cats, cats", "--text", "sleep")
    for row, line in zip(rows, expected):
        (first, high), (second, low) = line["classes"]
        assert (row["predicted"], row["predicted_2"]) == (first, second)
        assert (float(row["score"]), float(row["score_2"])) == pytest.approx((high, low), abs=2e-6)
    again = tmp_path / "again.tsv"  # what was predicted before is replaced
    run(place / "text", "--data", out, "--top", "1", "--output", again)
    assert [row["predicted"] for row in table(again, "\t")] == [row["predicted"] for row in rows]


def test_a_table_of_pairs_names_both_columns(place, tmp_path):
    out = tmp_path / "scores.jsonl"
    run(place / "text", "--data", place / "texts.csv", "--text", "text", "--pair", "other", "--output", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    expected = lines(place / "text", "--text", "the cat", "--pair", "sleeps")[0]["classes"][0]
    assert (rows[0]["predicted"], rows[0]["score"]) == (expected[0], pytest.approx(expected[1], abs=2e-6))
    assert rows[2]["id"] == "3" and rows[2]["other"] == "the"


def test_rows_of_json_may_have_different_columns(place, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "cat", "n": 1}\n{"text": "cats", "m": [2], "n": null}\n')
    run(place / "text", "--data", tmp_path / "a.jsonl", "--top", "1", "--output", tmp_path / "b.csv")
    rows = table(tmp_path / "b.csv")
    assert [(row["text"], row["n"], row["m"]) for row in rows] == [("cat", "1", ""), ("cats", "", "[2]")]


def test_numbers_and_pictures_are_written_too(place, tmp_path):
    out = tmp_path / "out.csv"
    run(place / "number", "--text", "the cat", "--output", out)
    value = lines(place / "number", "--text", "the cat")[0]["classes"][0][1]
    assert table(out) == [{"text": "the cat", "predicted": str(value), "note": ""}]
    result = run(place / "image", place / "photos" / "a.jpg", "no.png", "--top", "1", "--output", out, code=2)
    assert "1 of 2 inputs could not be read" in result.stderr
    good, bad = table(out)
    assert good["predicted"] in CLASSES and good["file"].endswith("a.jpg") and good["note"] == ""
    assert bad == {"file": "no.png", "predicted": "", "score": "", "note": "no such file"}


def test_other_encodings_are_read_by_name(place, tmp_path):
    (tmp_path / "a.csv").write_bytes("text\ncat à\n".encode("latin-1"))
    words = [place / "text", "--data", tmp_path / "a.csv"]
    said = run(*words, code=2).stderr
    assert "is not text in UTF-8, name its --encoding" in said
    assert lines(*words, "--encoding", "latin-1")[0]["source"] == "cat à"


def test_inputs_are_read_as_they_are_needed(place):
    """However many there are, no more than a batch of them is in memory."""
    model, tokenizer = load_model(place / "text")
    read = []

    def texts():
        for number in range(1000):
            read.append(number)
            yield "the cat"

    found = predict_texts(model, tokenizer, texts(), 1, 4)
    assert next(found).classes and len(read) == 4
    assert [next(found).source for _ in range(4)][-1] == "the cat" and len(read) == 8


# --- long texts --------------------------------------------------------------------------------------------


def test_a_long_text_is_short_in_the_table_and_its_cut_is_told(place, tmp_path):
    result = run(place / "text", "--text", "the cat " * 20_000, "--text", "cat")
    assert len(result.stdout) < 2000 and "…" in result.stdout
    assert "Cut 1 text at 8 tokens, the model's limit." in result.stderr
    assert [row["cut"] for row in lines(place / "text", "--text", "cat " * 9, "--text", "cat")] == [True, False]
    whole = run(place / "text", "--text", "the cat sleeps")
    assert "the cat sleeps" in whole.stdout and not whole.stderr
    run(place / "text", "--text", "cat " * 9, "--text", "cat", "--output", tmp_path / "o.csv")
    assert [row["note"] for row in table(tmp_path / "o.csv")] == ["cut at 8 tokens", ""]


def test_a_text_that_just_fits_is_not_cut(place):
    model, tokenizer = load_model(place / "text")
    room = 8 - len(tokenizer("")["input_ids"])
    texts = ["cat " * room, "cat " * (room + 1)]
    assert [found.cut for found in predict_texts(model, tokenizer, texts, 1, 2)] == [False, True]


# --- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, says",
    [
        (["text", "--data", "photos"], "photos is a folder, and a table is a file: .csv, .tsv, .txt, .jsonl"),
        (["text", "photos/a.jpg"], "text is a model for texts: give --text"),
        (["image", "--data", "photos"], "image is a model for images, and --data is a table of texts: give the fold"),
        (["image", "--data", "texts.csv"], "image is a model for images, and --data is a table of texts"),
        (["image", "photos", "--output", "o.xls"], "--output must end in .csv, .tsv or .jsonl, got o.xls"),
        (["image", "photos", "--output", "o.csv", "--json"], "--output writes a file: leave out --json"),
        (["image", "photos", "--output", "no/o.csv"], "cannot write no/o.csv: there is no folder no"),
        (["image", "photos", "--output", "/proc/o.csv"], "cannot write in /proc: "),
        (["image", "photos", "--encoding", "utf-8"], "there is no --data: leave out --encoding"),
        (["text", "--data", "texts.csv", "--text", "words"], "texts.csv has no column 'words'; it has id, text, other"),
        (["text", "--data", "texts.csv", "--text", "id", "--text", "text"], "--text and --pair name one column each"),
        (["text", "--data", "texts.csv", "--encoding", "x"], "--encoding must be one that Python knows"),
        (["text", "--data", "texts.csv", "photos"], "--data is the only input: leave out 'photos'"),
        (["unfinished", "photos"], "unfinished is an unfinished run: continue it with --resume"),
        (["text", "--data", "open.csv"], "open.csv, row 2: a quote that is never closed"),
        (["text"], "nothing to predict"),
    ],
)
def test_mistakes_are_told_in_a_sentence_before_torch_is_loaded(words, says, place, monkeypatch):
    (place / "unfinished").mkdir(exist_ok=True)
    (place / "unfinished" / "run.json").write_text("{}")
    (place / "open.csv").write_text('text\na\n"b\nc\n')
    heavy = [name for name in ("sot.evaluation.predict", "sot.models.folder") if name in sys.modules]
    for name in heavy:
        monkeypatch.setitem(sys.modules, name, None)  # importing one of these would now fail
    result = sot("predict", *words, cwd=place)
    assert result.returncode == 2 and says in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_a_mistake_loads_no_torch(place):
    result = start("-X", "importtime", "-m", "sot", "predict", str(place / "text"), str(place / "photos"))
    assert result.returncode == 2 and "is a model for texts" in result.stderr
    assert not (HEAVY - {"numpy"}) & loaded(result)


# --- quick -------------------------------------------------------------------------------------------------

UNNEEDED = {"numba", "sklearn", "matplotlib", "datasets", "pandas", "onnxruntime", "tensorboard", "gradio", "peft"}


def test_one_picture_loads_only_what_it_needs(place):
    words = ("-m", "sot", "predict", str(place / "image"), str(place / "photos" / "a.jpg"), "--json")
    result = start("-X", "importtime", *words)
    assert result.returncode == 0 and json.loads(result.stdout)["classes"]
    assert not UNNEEDED & loaded(result) and "transformers.trainer" not in result.stderr


def cpu_seconds(*words):
    """Processor time of a fresh Python, the least of three."""
    script = (
        "import os, resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime)"
    )
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, sys.executable, *map(str, words)]
    return min(
        float(subprocess.run(command, capture_output=True, text=True, check=True, env=threads).stdout) for _ in range(3)
    )


@pytest.mark.slow
def test_one_picture_takes_little_more_than_the_libraries(place):
    imports = cpu_seconds("-c", "import sot, torch, timm, transformers, sot.models.modeling")
    whole = cpu_seconds("-m", "sot", "predict", place / "image", place / "photos" / "a.jpg")
    assert whole - imports < 1.5


def test_the_page_on_predicting_is_true():
    """Names of columns that the page speaks of."""
    page = (Path(__file__).parent.parent / "docs" / "predicting.md").read_text()
    assert all(f"`{name}`" in page for name in ("predicted", "score", "note"))
