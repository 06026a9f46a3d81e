"""Texts with labels: GLUE's own files, tables with named columns, the hub, or the built-in acceptability set."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sot.data.acceptability import acceptability

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Columns:
    """Names of the columns that hold the text, its partner in a pair, and the label."""

    text: str = "sentence"
    pair: str | None = None
    label: str = "label"


@dataclass(frozen=True)
class Task:
    """A GLUE task: its columns, its score, and the names of its labels in the order of their numbers."""

    columns: Columns
    metric: str = "accuracy"
    labels: tuple[str, ...] | None = None  # None: a number to regress
    header: tuple[str, ...] | None = None  # of files that have none
    dev: str = "dev"


ENTAILMENT = ("entailment", "not_entailment")
PAIR = Columns("sentence1", "sentence2")
TASKS = {
    "cola": Task(Columns(), "mcc", ("unacceptable", "acceptable"), ("source", "label", "mark", "sentence")),
    "sst2": Task(Columns(), "accuracy", ("negative", "positive")),
    "mrpc": Task(Columns("#1 String", "#2 String", "Quality"), "f1", ("not_equivalent", "equivalent")),
    "qqp": Task(Columns("question1", "question2", "is_duplicate"), "f1", ("not_duplicate", "duplicate")),
    "stsb": Task(Columns("sentence1", "sentence2", "score"), "pearson"),
    "mnli": Task(
        Columns("sentence1", "sentence2", "gold_label"),
        "accuracy",
        ("entailment", "neutral", "contradiction"),
        dev="dev_matched",
    ),
    "qnli": Task(Columns("question", "sentence"), "accuracy", ENTAILMENT),
    "rte": Task(PAIR, "accuracy", ENTAILMENT),
    "wnli": Task(PAIR, "accuracy", ("not_entailment", "entailment")),
}
BUILT_IN = "acceptability"


@dataclass
class TextSplit:
    """Texts, their partners if they are pairs, and labels: numbers of classes, or values to regress."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[float]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass
class TextData:
    """The splits of a data set; `labels` names the classes, or is None for regression."""

    train: TextSplit | None
    dev: TextSplit | None
    labels: list[str] | None
    metric: str


def load_task(name: str, folder: Path | None) -> TextData:
    """A GLUE task from the folder of its files, or the built-in set, which needs none."""
    if name == BUILT_IN:
        made = {key: _from_pairs(rows) for key, rows in acceptability().items()}
        return TextData(made["train"], made["dev"], ["unacceptable", "acceptable"], "mcc")
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; accepted: {', '.join([*TASKS, BUILT_IN])}")
    if folder is None:
        raise ValueError(f"task {name} needs --data: the folder with its train.tsv and dev.tsv")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    task = TASKS[name]
    splits: dict[str, TextSplit | None] = {}
    for key, stem in (("train", "train"), ("dev", task.dev)):
        file = folder / f"{stem}.tsv"
        splits[key] = (
            _split(list(read_rows(file, task.header)), task.columns, task.labels, file) if file.is_file() else None
        )
    if splits["train"] is None and splits["dev"] is None:
        raise ValueError(f"{folder} has neither train.tsv nor {task.dev}.tsv")
    return TextData(splits["train"], splits["dev"], list(task.labels) if task.labels else None, task.metric)


def load_table(train: Path | None, dev: Path | None, columns: Columns, labels: list[str] | None = None) -> TextData:
    """CSV, TSV or JSONL files; classes are the labels of the training file in order, numbers by size."""
    rows = {file: list(read_rows(file, None)) for file in (train, dev) if file is not None}
    for file, table in rows.items():
        _check_columns(table, columns, file)
    if labels is None:
        found = {str(row[columns.label]) for row in rows[train or dev]}  # type: ignore[index]
        labels = sorted(found, key=_by_number_then_name)
    if len(labels) < 2:
        raise ValueError(f"a classifier needs at least two classes, found {', '.join(labels) or 'none'}")
    splits = [None if file is None else _split(rows[file], columns, tuple(labels), file) for file in (train, dev)]
    return TextData(splits[0], splits[1], labels, "accuracy")


def _by_number_then_name(label: str) -> tuple[bool, int, str]:
    number = label.lstrip("-").isdigit()
    return not number, int(label) if number else 0, label


def read_rows(file: Path, header: tuple[str, ...] | None) -> Iterator[Row]:
    """Rows of a .csv, .jsonl, or tab-separated .tsv or .txt file; GLUE's quote nothing and may begin with a mark."""
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    with file.open(encoding="utf-8-sig", newline="") as lines:
        if file.suffix == ".jsonl":
            yield from (json.loads(line) for line in lines if line.strip())
        elif file.suffix == ".csv":
            yield from csv.DictReader(lines)
        elif file.suffix in (".tsv", ".txt"):
            yield from csv.DictReader(lines, fieldnames=header, delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            raise ValueError(f"{file} must be .csv, .tsv, .txt or .jsonl")


def _check_columns(rows: list[Row], columns: Columns, file: Path) -> None:
    if not rows:
        raise ValueError(f"{file} has no rows")
    for name in (columns.text, columns.pair, columns.label):
        if name is not None and name not in rows[0]:
            raise ValueError(f"{file} has no column {name!r}; it has {', '.join(map(str, rows[0]))}")


def _split(rows: list[Row], columns: Columns, labels: tuple[str, ...] | None, file: Path) -> TextSplit:
    _check_columns(rows, columns, file)
    numbers = {} if labels is None else {name: float(i) for i, name in enumerate(labels)}
    numbers |= {str(i): float(i) for i in range(len(numbers)) if str(i) not in numbers}  # GLUE writes some as numbers
    values = []
    for number, row in enumerate(rows, 1):
        value = str(row[columns.label])
        if labels is not None and value not in numbers:
            raise ValueError(f"{file}, row {number}: label {value!r} is none of {', '.join(labels)}")
        values.append(float(value) if labels is None else numbers[value])
    pairs = None if columns.pair is None else [str(row[columns.pair]) for row in rows]
    return TextSplit([str(row[columns.text]) for row in rows], pairs, values)


def _from_pairs(rows: list[tuple[str, int]]) -> TextSplit:
    return TextSplit([text for text, _ in rows], None, [float(label) for _, label in rows])
