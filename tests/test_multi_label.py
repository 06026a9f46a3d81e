"""Several labels for a sample: how tables have them, scores and thresholds, and every command on such models."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import f1_score
from test_cli import sot
from transformers import pipeline

import sot as package
from sot.data.images import load_images
from sot.data.tags import PictureColumns, Tags
from sot.data.texts import Columns, load_set, load_table
from sot.evaluation.multi_label import best_thresholds, chosen, multi_label_scores
from sot.models.configuration import SoTConfig

ROWS = [{"tags": "a; b"}, {"tags": ""}, {"tags": "b"}, {"tags": ["c", "a"]}]


# --- tables ------------------------------------------------------------------------------------------------------


def test_labels_of_a_cell():
    tags = Tags(("tags",))
    names = tags.classes(ROWS, "t.csv")
    assert names == ["a", "b", "c"]
    assert tags.targets(ROWS, names, "t.csv") == [(1, 1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 1)]
    with pytest.raises(ValueError, match="row 4: label 'c' is none of a, b"):
        tags.targets(ROWS, ["a", "b"], "t.csv")
    with pytest.raises(ValueError, match="at least two classes, t has a"):
        tags.classes([{"tags": "a"}], "t")


def test_labels_of_columns(caplog):
    tags, rows = Tags(("a", "b")), [{"a": "1", "b": "0"}, {"a": True, "b": 0.0}, {"a": "", "b": "yes"}]
    assert tags.targets(rows, tags.classes(rows, "t"), "t") == [(1, 0), (1, 0), (0, 1)]
    assert "No sample of t has two labels" in caplog.text
    with pytest.raises(ValueError, match="t, row 1: column 'a' must hold 0 or 1, got '2'"):
        tags.targets([{"a": "2", "b": 1}], ["a", "b"], "t")


def test_a_table_of_texts(tmp_path):
    (tmp_path / "t.csv").write_text("sentence,tags\none,x|y\ntwo,\nthree,y\n")
    data = load_table(tmp_path / "t.csv", None, Columns(tags=Tags(("tags",), "|")))
    assert (data.labels, data.multi_label, data.metric) == (["x", "y"], True, "macro_f1")
    assert data.train.labels == [(1, 1), (0, 0), (0, 1)] and data.train.texts == ["one", "two", "three"]
    (tmp_path / "f.csv").write_text("sentence,y,x\none,1,0\n")  # a trained model's classes as columns
    data = load_table(None, tmp_path / "f.csv", Columns(tags=Tags(("label",))), ["x", "y"])
    assert data.dev.labels == [(0, 1)]


def test_a_set_of_the_hub_with_lists_of_classes(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "labels": datasets.List(datasets.ClassLabel(names=["x", "y"]))}
    )
    rows = datasets.Dataset.from_dict({"text": ["one", "two"], "labels": [[0, 1], []]}, features=features)
    rows.to_parquet(str(tmp_path / "train.parquet"))
    rows.to_parquet(str(tmp_path / "validation.parquet"))
    data = load_set(f"hfds/{tmp_path}", Columns("text", tags=Tags(("labels",))))
    assert data.labels == ["x", "y"] and data.dev.labels == [(1, 1), (0, 0)] and data.multi_label


def test_a_table_of_pictures_with_one_label_or_several(pictures):
    columns = PictureColumns(tags=Tags(("tags",)))
    data = load_images(str(pictures / "tags.csv"), 0, columns=columns)
    assert (data.labels, data.multi_label, len(data.train), len(data.val)) == (["blue", "red"], True, 32, 8)
    image, target = data.train[0]
    assert image.size == (32, 32) and target in {(0, 0), (0, 1), (1, 0), (1, 1)}
    single = load_images(str(pictures / "one.csv"), 0, columns=PictureColumns("colour"))
    assert single.labels == ["blue", "red"] and not single.multi_label and len(single.val) == 4
    with pytest.raises(ValueError, match="has no column 'label'"):
        load_images(str(pictures / "one.csv"))


# --- scores ------------------------------------------------------------------------------------------------------


def test_scores_are_scikit_learns_and_the_loss_is_torchs():
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(50, 4)), (random.random((50, 4)) < 0.3).astype(float)
    scores = multi_label_scores(logits, labels)
    said = 1 / (1 + np.exp(-logits)) >= 0.5
    assert scores["macro_f1"] == pytest.approx(f1_score(labels, said, average="macro"))
    assert scores["subset_accuracy"] == pytest.approx((said == labels).all(1).mean())
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(torch.tensor(logits), torch.tensor(labels))
    assert scores["loss"] == pytest.approx(float(wanted))
    perfect = multi_label_scores(np.where(labels > 0, 9.0, -9.0), labels)
    assert [perfect[name] for name in ("macro_f1", "micro_f1", "map", "subset_accuracy")] == [1.0] * 4


def test_thresholds_are_the_best_for_each_class():
    random = np.random.default_rng(1)
    labels = (random.random((200, 3)) < [0.05, 0.3, 0.0]).astype(float)
    logits = random.normal(size=(200, 3)) + 2 * labels - [3, 0, 0]
    found = best_thresholds(logits, labels)
    assert found[2] == 0.5 and all(0 < place < 1 for place in found)
    for number in range(2):
        grid = [f1_score(labels[:, number], chosen(logits, [place] * 3)[:, number]) for place in np.linspace(0, 1, 99)]
        assert f1_score(labels[:, number], chosen(logits, found)[:, number]) >= max(grid) - 1e-9
    assert multi_label_scores(logits, labels, found)["macro_f1"] > multi_label_scores(logits, labels)["macro_f1"]


def test_thresholds_are_saved_and_checked():
    config = SoTConfig(num_labels=2, problem_type="multi_label_classification", thresholds=[0.1, 0.2])
    assert SoTConfig.from_dict(config.to_dict()).thresholds == [0.1, 0.2]
    with pytest.raises(ValueError, match="thresholds must be one for each of 2 classes"):
        SoTConfig(num_labels=2, problem_type="multi_label_classification", thresholds=[0.1])


# --- all of it ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "t.csv"
    kinds = [
        ("cat sleep", "one;quiet"),
        ("cats sleep", "many;quiet"),
        ("cat", "one"),
        ("cats", "many"),
        ("the the", ""),
    ]
    file.write_text("sentence,tags\n" + "".join(f"{text},{tags}\n" for text, tags in kinds * 12))
    return file


@pytest.fixture(scope="module")
def text_run(texts, stand_ins):
    model, out = stand_ins["google-bert/bert-base-uncased"], texts.parent / "run"
    sizes = ["--set", "epochs=12", "--set", "lr=2e-2", "--set", "batch_size=12", "--head", "representation_size=16"]
    data = ["--data", texts, "--dev", texts, "--label", "tags", "--separator", ";", "--set", "tune_thresholds=true"]
    result = sot("finetune", "--model", model, "--out", out, "--logger", "none", *data, *sizes, "--json")
    assert result.returncode == 0, result.stderr
    return out, json.loads(result.stdout)


def test_finetune_and_evaluate_texts(text_run, texts):
    out, trained = text_run
    config = json.loads((out / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification" and len(config["thresholds"]) == 3
    assert trained["eval_macro_f1"] == 1.0 and {"eval_map", "eval_micro_f1", "eval_subset_accuracy"} <= set(trained)
    assert "macro_f1 | 1.0000" in (out / "README.md").read_text()
    result = sot("evaluate", out, "--data", texts, "--label", "tags", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["macro_f1"] == 1.0 and [row[:2] for row in found["classes"]] == [
        ["many", 24],
        ["one", 24],
        ["quiet", 24],
    ]
    assert all(row[2:] == [1.0, 1.0] for row in found["classes"])
    assert found["f1"] == {"many": 1.0, "one": 1.0, "quiet": 1.0}
    for options, said in (
        (["--label", "tags", "--confusion", out / "c.png"], "is for one class a sample"),
        (["--label", "sentence"], "label 'cat sleep' is none of many, one, quiet"),
    ):
        result = sot("evaluate", out, "--data", texts, *options)
        assert result.returncode == 2 and said in " ".join(result.stderr.split()), result.stderr


def test_such_a_run_and_search_resume(texts, stand_ins, tmp_path):
    model, data = stand_ins["google-bert/bert-base-uncased"], ["--data", texts, "--dev", texts, "--label", "tags"]
    sizes = ["--multi-label", "--set", "epochs=1", "--head", "representation_size=16", "--logger", "none"]
    for command in (["finetune", "--model", model], ["tune", model, "--search", "lr=1e-3"]):
        for resume in ([], ["--resume"]):
            result = sot(*command, *data, *sizes, "--out", tmp_path / command[0], *resume)
            assert result.returncode == 0, result.stderr


def test_predict_and_pipeline_of_texts(text_run, tmp_path):
    out, _ = text_run
    result = sot("predict", out, "--text", "cats sleep", "--text", "the the", "--top", "1", "--json")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [sorted(row["labels"]) for row in rows] == [["many", "quiet"], []]
    assert len(rows[0]["classes"]) == len(rows[1]["classes"]) == 1
    assert sot("predict", out, "--text", "cats sleep").stdout.count("✓") == 2
    (tmp_path / "in.csv").write_text("sentence,id\ncats sleep,7\nthe,8\n")
    result = sot("predict", out, "--data", tmp_path / "in.csv", "--output", tmp_path / "out.csv")
    assert result.returncode == 0, result.stderr
    written = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [(row["id"], row["labels"]) for row in written] == [("7", "many;quiet"), ("8", "")]
    scores = pipeline("text-classification", str(out), top_k=None)(["cats sleep"])[0]
    assert sum(score["score"] for score in scores) > 1.5  # of each class by itself


def test_explain_and_export_of_texts(text_run, tmp_path):
    out, _ = text_run
    result = sot("explain", out, "--text", "cats sleep", "--target", "many", "--out", tmp_path / "e", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["target"] == "many"
    result = sot("export", out, "--to", "torch", "--out", tmp_path / "m" / "model.pt2")
    assert result.returncode == 0, result.stderr
    result = sot("predict", tmp_path / "m" / "model.pt2", "--text", "cats sleep", "--json")
    assert sorted(json.loads(result.stdout)["labels"]) == ["many", "quiet"]


def test_the_page_shows_such_a_model(text_run):
    from sot.ui.results import answer
    from sot.ui.shown import open_models

    shown = open_models([text_run[0]], lambda items, title: items)["run"]
    assert "quiet" in answer(shown, None, "cats sleep", None, "", "", "")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    kinds = [((0, 0, 0), ""), ((255, 0, 0), "red"), ((0, 0, 255), "blue"), ((255, 0, 255), "red;blue")]
    lines = []
    for number, (colour, tags) in enumerate(kinds * 10):
        Image.new("RGB", (32, 32), colour).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{tags},{int('red' in tags)},{int('blue' in tags)}")
    (folder / "tags.csv").write_text("path,tags,red,blue\n" + "\n".join(lines))
    ones = [f"{number}.png,{('red', 'blue')[number % 4 - 1]}" for number in range(40) if number % 4 in (1, 2)]
    (folder / "one.csv").write_text("file,colour\n" + "\n".join(ones))
    return folder


def test_train_evaluate_and_predict_pictures(pictures, tmp_path):
    out = tmp_path / "run"
    small = ["--set", "model_args={embed: naive, patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2}"]
    sizes = ["--recipe", "demo", "--set", "epochs=10", "--set", "batch_size=8", "--set", "lr=1e-2", *small]
    data = ["--data", pictures / "tags.csv", "--label", "red,blue", "--multi-label"]
    result = sot("train", "--model", "sot_7", *data, "--out", out, "--logger", "none", *sizes, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["eval_map"] > 0.9
    for columns in (["--label", "red,blue"], ["--label", "tags"]):
        result = sot("evaluate", out, "--data", pictures / "tags.csv", *columns, "--json")
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        assert "macro_f1" in found and {row[0] for row in found["classes"]} <= {"red", "blue"}
    result = sot("predict", out, pictures / "3.png", "--json")
    assert result.returncode == 0 and "labels" in json.loads(result.stdout), result.stderr
    result = sot("evaluate", out, "--data", "digits")
    assert result.returncode == 2 and "--data must be a table, got digits" in " ".join(result.stderr.split())


def test_what_cannot_have_several_labels_is_refused(pictures, texts, stand_ins, tmp_path):
    train = ["train", "--model", "sot_7", "--data", pictures / "tags.csv", "--label", "tags", "--multi-label"]
    tune = ["finetune", "--model", stand_ins["google-bert/bert-base-uncased"], "--data", texts, "--dev", texts]
    for command, message in (
        ([*train, "--recipe", "demo", "--set", "mixup=0.8"], "mixup and cutmix mix images of one class each"),
        ([*train, "--recipe", "demo", "--head", "fusion=late"], "fusion 'late' adds softmax scores of classes"),
        (
            ["train", "--model", "sot_7", "--data", "digits", "--multi-label"],
            "digits is no table of images: leave out",
        ),
        ([*tune, "--multi-label", "--regression"], "--regression and --multi-label exclude each other"),
        ([*tune, "--label", "a,b", "--separator", ";"], "divides the cells of one column, got --label a,b"),
        ([*tune, "--label", "kind", "--multi-label"], "has no column 'kind'"),
        (["finetune", *tune[1:3], "--task", "acceptability", "--multi-label"], "--multi-label is for tables, and task"),
    ):
        result = sot(*command, "--out", tmp_path / "out")
        assert result.returncode == 2 and message in " ".join(result.stderr.split()), result.stderr
        assert "Traceback" not in result.stderr and not (tmp_path / "out").exists()


def test_label_smoothing_of_several_labels_goes_to_a_half():
    model = package.equip(
        "test_vit", labels=["a", "b"], pretrained=False, problem_type="multi_label_classification", label_smoothing=0.2
    )
    pixels, labels = torch.randn(3, 3, 160, 160), torch.tensor([[1.0, 0], [0, 0], [1, 1]])
    found = model.eval()(pixels, labels=labels)
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(found.logits, labels * 0.8 + 0.1)
    assert torch.allclose(found.loss, wanted)


def test_tuning_several_labels(texts, stand_ins, tmp_path):
    command = ["tune", stand_ins["google-bert/bert-base-uncased"], "--data", texts, "--dev", texts, "--label", "tags"]
    sizes = ["--multi-label", "--set", "epochs=1", "--set", "batch_size=24", "--head", "representation_size=16"]
    result = sot(*command, *sizes, "--search", "lr=1e-3,1e-2", "--out", tmp_path / "out", "--logger", "none", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["metric"] == "macro_f1"
