"""Text data: GLUE's layouts with their quirks, tables, and the built-in acceptability set."""

import json
from collections import Counter

import datasets
import pytest
from test_cli import sot

from sot.data.acceptability import CONSTRUCTIONS, acceptability
from sot.data.texts import TASKS, Columns, load_set, load_table, load_task


def write(folder, name, text):
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_cola_has_no_header_four_columns_and_no_final_newline(tmp_path):
    write(tmp_path, "train.tsv", 'gj04\t1\t\tThe sailors rode the "breeze.\ngj04\t0\t*\tThe car honked down road.\n')
    write(tmp_path, "dev.tsv", "gj04\t0\t*\tLast sentence")
    data = load_task("cola", tmp_path)
    assert data.train.texts == ['The sailors rode the "breeze.', "The car honked down road."]
    assert data.train.labels == [1.0, 0.0] and data.dev.texts == ["Last sentence"] and data.metric == "mcc"
    assert data.labels == ["unacceptable", "acceptable"]


def test_mrpc_begins_with_a_mark_and_has_pairs(tmp_path):
    write(
        tmp_path,
        "dev.tsv",
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tHe said " this\tShe said that\n',
    )
    data = load_task("mrpc", tmp_path)
    assert data.train is None and data.dev.texts == ['He said " this'] and data.dev.pairs == ["She said that"]
    assert data.dev.labels == [1.0]


def test_labels_by_name_and_scores_to_regress(tmp_path):
    write(tmp_path, "dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n")
    assert load_task("rte", tmp_path).dev.labels == [1.0]
    write(tmp_path, "dev.tsv", "index\tsentence1\tsentence2\tscore\n0\ta\tb\t3.250\n1\tc\td\t0\n")
    scores = load_task("stsb", tmp_path)
    assert scores.dev.labels == [3.25, 0.0] and scores.labels is None and scores.metric == "pearson"


def test_tables_in_three_formats_give_the_same_data(tmp_path):
    rows = [("one, two", "yes"), ('a "word"', "no"), ("x", "yes")]
    csv_file = write(tmp_path, "a.csv", 'words,answer\n"one, two",yes\n"a ""word""",no\nx,yes\n')
    tsv_file = write(tmp_path, "a.tsv", "words\tanswer\n" + "".join(f"{a}\t{b}\n" for a, b in rows))
    jsonl_file = write(tmp_path, "a.jsonl", "\n".join(json.dumps({"words": a, "answer": b}) for a, b in rows))
    for file in (csv_file, tsv_file, jsonl_file):
        data = load_table(file, file, Columns("words", None, "answer"))
        assert data.labels == ["no", "yes"] and data.train.labels == [1.0, 0.0, 1.0]
        assert data.train.texts == [text for text, _ in rows] and len(data.dev) == 3


def test_numeric_labels_are_ordered_by_size(tmp_path):
    file = write(tmp_path, "a.csv", "sentence,label\na,10\nb,2\nc,1\n")
    assert load_table(file, None, Columns()).labels == ["1", "2", "10"]
    file = write(tmp_path, "a.csv", "sentence,label\na,²\nb,--1\nc,2\nd,-1\ne,-\n")
    assert load_table(file, None, Columns()).labels == ["-1", "2", "-", "--1", "²"]


def test_acceptability_is_balanced_in_twins_without_overlap():
    splits = acceptability(600, 200, seed=3)
    train, dev = splits["train"], splits["dev"]
    assert (len(train), len(dev)) == (600, 200) and Counter(label for _, label in train) == {0: 300, 1: 300}
    texts = [text for text, _ in train + dev]
    assert len(set(texts)) == len(texts)
    assert splits == acceptability(600, 200, seed=3) != acceptability(600, 200, seed=4)
    bags = Counter(tuple(sorted(text.split())) for text, _ in dev)
    assert max(bags.values()) <= 2 and len(CONSTRUCTIONS) == 6


def test_acceptability_twins_differ_in_one_verb():
    goods = [text.split() for text, label in acceptability(300, 2)["train"] if label == 1]
    bads = {text for text, label in acceptability(300, 2)["train"] if label == 0}
    for good in goods:
        twins = [bad for bad in bads if len(bad.split()) == len(good)]
        assert any(sum(a != b for a, b in zip(good, bad.split())) == 1 for bad in twins)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p: load_task("glue", p), "unknown task 'glue'; accepted: cola, sst2"),
        (lambda p: load_task("cola", None), "task cola needs data"),
        (lambda p: load_task("cola", p / "none"), "is not a folder"),
        (lambda p: load_task("cola", p), "has neither train.tsv nor dev.tsv"),
        (lambda p: load_table(p / "no.csv", None, Columns()), "no such file"),
        (
            lambda p: load_table(write(p, "a.csv", "x,label\n1,2\n"), None, Columns()),
            "no column 'sentence'; it has x, label",
        ),
        (lambda p: load_table(write(p, "a.csv", "sentence,label\n"), None, Columns()), "has no rows"),
        (
            lambda p: load_table(write(p, "a.csv", "sentence,label\na,1\n"), None, Columns()),
            "at least two classes, found 1",
        ),
        (lambda p: load_table(write(p, "a.bin", "x"), None, Columns()), "must be .csv"),
        (
            lambda p: load_table(write(p, "a.jsonl", '{"sentence": 1}\n{'), None, Columns()),
            "a.jsonl, row 2: not a JSON",
        ),
        (lambda p: load_table(write(p, "b.jsonl", "[1]"), None, Columns()), "b.jsonl, row 1: not a JSON object"),
        (lambda p: load_set(f"hfds/no/such@{p}", Columns()), "datasets cannot open 'no/such'"),
    ],
)
def test_bad_input_is_named(call, message, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        call(tmp_path)


def test_labels_never_seen_in_training_are_refused(tmp_path):
    train, dev = (
        write(tmp_path, "t.csv", "sentence,label\na,x\nb,y\n"),
        write(tmp_path, "d.csv", "sentence,label\na,z\n"),
    )
    with pytest.raises(ValueError, match=r"d.csv, row 1: label 'z' is none of x, y"):
        load_table(train, dev, Columns())


def test_every_task_has_a_known_metric():
    assert {task.metric for task in TASKS.values()} <= {"accuracy", "mcc", "f1", "pearson"}


GLUE_ROWS = {  # columns and splits as the hub has them
    "cola": ({"sentence": ["a b", "c d"], "label": [1, 0]}, "validation"),
    "mrpc": ({"sentence1": ["a", "c"], "sentence2": ["b", "d"], "label": [1, 0]}, "validation"),
    "qqp": ({"question1": ["a", "c"], "question2": ["b", "d"], "label": [1, 0]}, "validation"),
    "mnli": ({"premise": ["a", "c"], "hypothesis": ["b", "d"], "label": [2, 0]}, "validation_matched"),
    "qnli": ({"question": ["a", "c"], "sentence": ["b", "d"], "label": [1, 0]}, "validation"),
    "stsb": ({"sentence1": ["a", "c"], "sentence2": ["b", "d"], "label": [3.25, 0.0]}, "validation"),
}


def write_set(folder, splits, labels):
    """Parquet files as the hub has them."""
    (folder / "data").mkdir(parents=True)
    for name, table in splits.items():
        made = datasets.Dataset.from_dict(table)
        if labels is not None:
            made = made.cast_column("label", datasets.ClassLabel(names=list(labels)))
        made.to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("task", GLUE_ROWS)
def test_glue_as_the_hub_has_it(task, tmp_path):
    table, dev = GLUE_ROWS[task]
    unlabelled = {**table, "label": [table["label"][1]] * 2}
    splits = {"train": table, dev: table, dev.replace("validation", "test"): unlabelled}
    folder = write_set(tmp_path / "Set", splits, TASKS[task].labels)
    data = load_task(task, f"hfds/{folder}@{tmp_path / 'cache'}")
    columns = [name for name in table if name != "label"]
    for split in (data.train, data.dev):
        assert split.texts == table[columns[0]] and split.labels == [float(label) for label in table["label"]]
        assert split.pairs == (table[columns[1]] if len(columns) == 2 else None)
    assert data.metric == TASKS[task].metric and data.labels == (list(TASKS[task].labels or []) or None)


def test_any_set_of_datasets_with_named_columns(tmp_path):
    tables = {"train": {"words": ["a", "b"], "label": [1, 0]}, "test": {"words": ["c"], "label": [1]}}
    spec = f"hfds/{write_set(tmp_path / 'declared', tables, ['1', '0'])}@{tmp_path / 'cache'}"
    data = load_set(spec, Columns("words"))  # number 1 is the class called 0
    assert data.labels == ["1", "0"] and data.train.labels == [1.0, 0.0] and data.dev.texts == ["c"]
    with pytest.raises(ValueError, match="has no column 'sentence'; it has words, label"):
        load_set(spec, Columns())
    (tmp_path / "lines").mkdir()
    for split, rows in (("train", "xyx"), ("validation", "yx")):
        write(tmp_path / "lines", f"{split}.jsonl", "\n".join(json.dumps({"t": c * 2, "k": c}) for c in rows))
    data = load_set(f"hfds/{tmp_path / 'lines'}@{tmp_path / 'cache'}", Columns("t", None, "k"))
    assert data.labels == ["x", "y"] and data.train.labels == [0.0, 1.0, 0.0] and data.dev.labels == [1.0, 0.0]


def test_fine_tuning_on_a_set_of_datasets(stand_ins, tmp_path):
    rows = {"sentence": ["the cats sleep", "the cats sleeps"] * 8, "label": [1, 0] * 8}
    folder = write_set(tmp_path / "set", {"train": rows, "validation": rows}, TASKS["cola"].labels)
    data, out = f"hfds/{folder}@{tmp_path / 'cache'}", tmp_path / "run"
    sizes = ["--set", "epochs=1", "--set", "batch_size=8", "--set", "head.representation_size=16", "--logger", "none"]
    model = stand_ins["google-bert/bert-base-uncased"]
    result = sot("finetune", "--model", model, "--task", "cola", "--data", data, "--out", out, *sizes)
    assert result.returncode == 0, result.stderr
    for task in (["--task", "cola"], []):
        result = sot("evaluate", out, "--data", data, "--json", *task)
        assert result.returncode == 0, result.stderr
        assert [row[:2] for row in json.loads(result.stdout)["classes"]] == [["unacceptable", 8], ["acceptable", 8]]


def test_without_the_hub_a_task_asks_for_its_files():
    with pytest.raises(ValueError, match=r"task mnli needs data, the folder with its train.tsv and dev_matched.tsv"):
        load_task("mnli", None)
