"""Numbers to predict from texts in tables: `--regression` where a model is trained; a trained one knows."""

import json

import datasets
import pytest
from test_cli import sot

from sot.data.texts import Columns, load_set, load_table

SCORES = {"the cats sleep": 3.5, "the cats sleeps": -2.0, "the cat sleeps": 1.0}
QUICK = ["--set", "batch_size=8", "--set", "head.representation_size=16", "--logger", "none"]


def write_table(file, rows):
    if file.suffix == ".jsonl":
        file.write_text("\n".join(json.dumps({"sentence": text, "label": value}) for text, value in rows))
    else:
        file.write_text("sentence,label\n" + "".join(f"{text},{value}\n" for text, value in rows))
    return file


@pytest.fixture
def table(tmp_path):
    return write_table(tmp_path / "table.csv", [*SCORES.items()] * 8)


def refused(result, says):
    assert result.returncode == 2 and says in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.stderr


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_table_of_numbers(name, tmp_path):
    file = write_table(tmp_path / name, [("a", 3), ("b", "-0.5"), ("c", " 1e2 "), ("d", 3)])
    data = load_table(file, file, Columns(), regression=True)
    assert data.labels is None and data.metric == "pearson"
    assert data.train.labels == data.dev.labels == [3.0, -0.5, 100.0, 3.0]


def test_a_set_of_datasets_with_numbers(tmp_path):
    for name, values in (("train", [0.25, 4.0, 1.0]), ("validation", [2.5, 0.0])):
        rows = {"words": ["x"] * len(values), "score": values}
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "set" / f"{name}.parquet")
    spec = f"hfds/{tmp_path / 'set'}@{tmp_path / 'cache'}"
    data = load_set(spec, Columns("words", None, "score"), regression=True)
    assert data.labels is None and data.train.labels == [0.25, 4.0, 1.0] and data.dev.labels == [2.5, 0.0]


@pytest.mark.parametrize("value", ["many", "3,5", "1_0", "nan", "inf", True])
def test_a_cell_that_is_no_number_is_named(value, tmp_path):
    file = write_table(tmp_path / "a.jsonl", [("a", 1), ("b", value)])
    with pytest.raises(ValueError, match=f"a.jsonl, row 2: score '{value}' is not a finite number"):
        load_table(file, file, Columns(), regression=True)


def test_one_row_is_too_few_to_evaluate(table, tmp_path):
    file = write_table(tmp_path / "a.csv", [("a", 1)])
    with pytest.raises(ValueError, match=r"a.csv has one row, and a correlation needs at least two"):
        load_table(table, file, Columns(), regression=True)


def test_fine_tuning_on_numbers_evaluating_and_predicting(stand_ins, table, tmp_path):
    data = ["--data", table, "--dev", table, "--regression"]
    command = ["finetune", "--model", stand_ins["google-bert/bert-base-uncased"], "--out", tmp_path / "run", *data]
    settings = ["--set", "epochs=60", "--set", "lr=1e-2", "--set", "weight_decay=0", *QUICK]
    trained = sot(*command, *settings, "--json")
    assert trained.returncode == 0, trained.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["problem_type"] == "regression"
    evaluated = sot("evaluate", tmp_path / "run", "--data", table, "--json")
    scores = json.loads(evaluated.stdout)
    assert scores["pearson"] > 0.99 and scores["loss"] < 0.1 and scores["spearman"] == pytest.approx(1)
    for name in ("pearson", "spearman", "loss"):
        assert json.loads(trained.stdout)[f"eval_{name}"] == pytest.approx(scores[name], abs=1e-6)
    texts = [word for text in SCORES for word in ("--text", text)]
    predicted = sot("predict", tmp_path / "run", *texts, "--json")
    values = [json.loads(line)["classes"] for line in predicted.stdout.splitlines()]
    assert [name for [(name, _)] in values] == ["score"] * 3
    assert [value for [(_, value)] in values] == pytest.approx(list(SCORES.values()), abs=0.5)
    words = write_table(tmp_path / "words.csv", [("the cat", "yes"), ("the cats", "no")])
    refused(sot("evaluate", tmp_path / "run", "--data", words), "row 1: score 'yes' is not a finite number")
    picture = ["--confusion", tmp_path / "x.png"]
    refused(sot("evaluate", tmp_path / "run", "--data", table, *picture), "the data has numbers to predict")


def test_a_run_on_classes_is_not_resumed_as_one_on_numbers(stand_ins, table, tmp_path):
    model, run = stand_ins["google-bert/bert-base-uncased"], tmp_path / "run"
    command = ["finetune", "--model", model, "--data", table, "--dev", table, "--set", "epochs=1", *QUICK]
    assert sot(*command, "--out", run).returncode == 0
    refused(sot(*command, "--out", run, "--resume", "--regression"), "run is a run of regression False, not True")
    scored = json.loads(sot("evaluate", run, "--data", table, "--json").stdout)
    assert [name for name, *_ in scored["classes"]] == ["-2.0", "1.0", "3.5"]


def test_probing_on_numbers(stand_ins, table, tmp_path):
    model, out = stand_ins["google-bert/bert-base-uncased"], tmp_path / "out"
    sizes = ["--heads", "class,gap", "--seeds", "1", "--max-length", "8", "--epochs", "2"]
    data = ["--data", table, "--dev", table, "--regression"]
    result = sot("probe", "--model", model, *data, "--out", out, *sizes, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["metric"] == "pearson"
    evaluated = json.loads(sot("evaluate", out / "best", "--data", table, "--json").stdout)
    assert {"pearson", "spearman", "loss"} <= evaluated.keys()


def test_where_there_is_nothing_to_regress_the_option_is_refused(stand_ins, tmp_path):
    text = ["--model", stand_ins["google-bert/bert-base-uncased"], "--task", "acceptability"]
    message = "--regression is for tables, and task acceptability has its own"
    for command in ("finetune", "probe"):
        refused(sot(command, *text, "--out", tmp_path / "out", "--regression"), message)
    image = ["--model", "test_vit", "--no-pretrained", "--data", "digits", "--out", tmp_path / "out"]
    refused(sot("probe", *image, "--regression"), "--regression is for texts, and test_vit is a model for images")
    assert not (tmp_path / "out").exists()
