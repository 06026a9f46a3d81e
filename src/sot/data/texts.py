"""Texts with labels: GLUE's files, tables with named columns, sets of `datasets`, or the built-in acceptability set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sot.data.acceptability import acceptability
from sot.data.hub import load_splits
from sot.data.rows import Row, is_unicode, read_rows
from sot.data.sources import choose_split, drawn
from sot.errors import SettingError


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
    train: str = "train"
    dev: str = "dev"
    suffix: str = ".tsv"
    on_hub: bool = True
    hub_columns: Columns | None = None  # where the hub calls them otherwise


ENTAILMENT = ("entailment", "not_entailment")
PAIR = Columns("sentence1", "sentence2")
GLUE = "hfds/nyu-mll/glue"
TASKS = {
    "cola": Task(Columns(), "mcc", ("unacceptable", "acceptable"), ("source", "label", "mark", "sentence")),
    "sst2": Task(Columns(), "accuracy", ("negative", "positive")),
    "mrpc": Task(
        Columns("#1 String", "#2 String", "Quality"), "f1", ("not_equivalent", "equivalent"), hub_columns=PAIR
    ),
    "qqp": Task(
        Columns("question1", "question2", "is_duplicate"),
        "f1",
        ("not_duplicate", "duplicate"),
        hub_columns=Columns("question1", "question2"),
    ),
    "stsb": Task(Columns("sentence1", "sentence2", "score"), "pearson", hub_columns=PAIR),
    "mnli": Task(
        Columns("sentence1", "sentence2", "gold_label"),
        "accuracy",
        ("entailment", "neutral", "contradiction"),
        dev="dev_matched",
        hub_columns=Columns("premise", "hypothesis"),
    ),
    "qnli": Task(Columns("question", "sentence"), "accuracy", ENTAILMENT),
    "rte": Task(PAIR, "accuracy", ENTAILMENT),
    "wnli": Task(PAIR, "accuracy", ("not_entailment", "entailment")),
    "sick": Task(  # not of GLUE: three-way entailment, as its authors' files have it
        Columns("sentence_A", "sentence_B", "entailment_judgment"),
        "accuracy",
        ("NEUTRAL", "ENTAILMENT", "CONTRADICTION"),
        train="SICK_train",
        dev="SICK_test_annotated",
        suffix=".txt",
        on_hub=False,
    ),
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

    def part(self, samples: int) -> TextSplit:
        """Some of them, always the same; 0 is all."""
        kept = drawn(len(self), samples)
        pairs = None if self.pairs is None else [self.pairs[index] for index in kept]
        return TextSplit([self.texts[index] for index in kept], pairs, [self.labels[index] for index in kept])


@dataclass
class TextData:
    """The splits of a data set; `labels` names the classes, or is None for regression."""

    train: TextSplit | None
    dev: TextSplit | None
    labels: list[str] | None
    metric: str


def load_task(name: str, data: str | Path | None, wanted: str = "{data}, the folder with its") -> TextData:
    """A GLUE task from the folder of its files or from `hfds/…`, else from the hub; or the built-in set.

    `wanted` is how a SettingError asks for files that are missing.
    """
    if name == BUILT_IN:
        if data is not None:
            raise SettingError("task {} is built in and takes no {data}, got {}", BUILT_IN, data)
        made = {key: _from_pairs(rows) for key, rows in acceptability().items()}
        return TextData(made["train"], made["dev"], ["unacceptable", "acceptable"], "mcc")
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; accepted: {', '.join([*TASKS, BUILT_IN])}")
    task = TASKS[name]
    labels = None if task.labels is None else list(task.labels)
    if data is None and not task.on_hub:
        raise SettingError(f"task {{}} needs {wanted} {{}}", name, task.train + task.suffix)
    if data is None or str(data).startswith("hfds/"):
        tables = _glue_tables(name, None if data is None else str(data), wanted)
        columns = task.hub_columns or task.columns
    else:
        tables, columns = _glue_files(Path(data), task), task.columns
    for source, rows in tables.values():
        _check_rows(rows, columns, source)
    return _data(tables, columns, labels, task.metric, numbered=True)


def _glue_files(folder: Path, task: Task) -> dict[str, tuple[str, list[Row]]]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    files = {key: folder / (stem + task.suffix) for key, stem in (("train", task.train), ("dev", task.dev))}
    found = {key: (str(file), list(read_rows(file, task.header))) for key, file in files.items() if file.is_file()}
    if not found:
        raise ValueError(f"{folder} has neither {files['train'].name} nor {files['dev'].name}")
    return found


def _glue_tables(name: str, data: str | None, wanted: str) -> dict[str, tuple[str, list[Row]]]:
    try:
        splits = load_splits(data or f"{GLUE}:{name}")
    except ValueError as error:
        if data is not None:
            raise
        said = f"task {{}} needs {wanted} train.tsv and {{}}.tsv, as the hub gives nothing: {{}}"
        raise SettingError(said, name, TASKS[name].dev, error) from error
    parts = {"train": "train", "dev": TASKS[name].dev.replace("dev", "validation")}
    return {key: (f"{name} {split}", _rows(splits[split])) for key, split in parts.items() if split in splits}


def load_set(spec: str, columns: Columns, labels: list[str] | None = None, regression: bool = False) -> TextData:
    """A set of `datasets` with named columns; its classes are those it declares, or the labels that occur."""
    splits = load_splits(spec)
    dev = choose_split(spec, splits, "val")
    chosen = {"train": choose_split(spec, splits, "train", needed=False), "dev": dev}
    declared = getattr(splits[str(dev)].features.get(columns.label), "names", None)
    tables = {key: (f"{spec} {name}", _rows(splits[name])) for key, name in chosen.items() if name is not None}
    return _from_tables(tables, columns, labels or declared, regression)


def _rows(dataset: Any) -> list[Row]:
    """Rows with the names of classes in place of their numbers."""
    named = {name: kind.int2str for name, kind in dataset.features.items() if hasattr(kind, "int2str")}

    def names(row: Row) -> Row:
        return {name: to_name(row[name]) for name, to_name in named.items() if row[name] is not None}

    return [{**row, **names(row)} for row in dataset]


def load_table(
    train: Path | None, dev: Path | None, columns: Columns, labels: list[str] | None = None, regression: bool = False
) -> TextData:
    """CSV, TSV or JSONL files; classes are the labels of the training file in order, numbers by size.

    For `regression` labels are the numbers themselves.
    """
    files = {key: file for key, file in (("train", train), ("dev", dev)) if file is not None}
    tables = {key: (str(file), list(read_rows(file, None))) for key, file in files.items()}
    return _from_tables(tables, columns, labels, regression)


def _from_tables(
    tables: dict[str, tuple[str, list[Row]]], columns: Columns, labels: list[str] | None, regression: bool
) -> TextData:
    for source, rows in tables.values():
        for number, row in enumerate(rows, 1):
            if None in row:  # where csv puts what is left: mostly of a text that holds the separator
                raise ValueError(f"{source}, row {number}: more cells than the {len(row) - 1} of the header")
        _check_rows(rows, columns, source)
    if regression:
        return _data(tables, columns, None, "pearson")
    if labels is None:
        _, rows = tables.get("train") or tables["dev"]
        labels = sorted({str(row[columns.label]) for row in rows}, key=_by_number_then_name)
    if len(labels) < 2:
        raise ValueError(f"a classifier needs at least two classes, found {', '.join(labels) or 'none'}")
    return _data(tables, columns, labels, "accuracy")


def _data(
    tables: dict[str, tuple[str, list[Row]]],
    columns: Columns,
    labels: list[str] | None,
    metric: str,
    numbered: bool = False,
) -> TextData:
    """What checked rows hold; `labels` None is a number to regress."""
    if labels is None and "dev" in tables and len(tables["dev"][1]) < 2:
        raise ValueError(f"{tables['dev'][0]} has one row, and a correlation needs at least two")
    splits = {key: _split(rows, columns, labels, source, numbered) for key, (source, rows) in tables.items()}
    return TextData(splits.get("train"), splits.get("dev"), labels, metric)


def _by_number_then_name(label: str) -> tuple[bool, int, str]:
    number = label.removeprefix("-").isdecimal()
    return not number, int(label) if number else 0, label


def _check_rows(rows: list[Row], columns: Columns, file: str) -> None:
    """Refuse a table that lacks a column, or a cell of one: only a text may be empty."""
    if not rows:
        raise ValueError(f"{file} has no rows")
    for name in filter(None, (columns.text, columns.pair, columns.label)):
        if name not in rows[0]:
            raise ValueError(f"{file} has no column {name!r}; it has {', '.join(map(str, rows[0]))}")
        for number, row in enumerate(rows, 1):
            if row.get(name) is None or (name == columns.label and row[name] == ""):
                raise ValueError(f"{file}, row {number}: nothing in column {name!r}")
            if not is_unicode(str(row[name])):
                raise ValueError(f"{file}, row {number}: column {name!r} is not Unicode, got {str(row[name])!a}")


def _split(rows: list[Row], columns: Columns, labels: list[str] | None, file: str, numbered: bool) -> TextSplit:
    numbers = {} if labels is None else {name: float(i) for i, name in enumerate(labels)}
    if numbered:  # GLUE writes some by their number; in a table 0 may be a label like -1 and 1
        numbers |= {str(i): float(i) for i in range(len(numbers))}
    values = []
    for number, row in enumerate(rows, 1):
        value = str(row[columns.label])
        if labels is not None and value not in numbers:
            raise ValueError(f"{file}, row {number}: label {value!r} is none of {', '.join(labels)}")
        values.append(_score(value, f"{file}, row {number}") if labels is None else numbers[value])
    pairs = None if columns.pair is None else [str(row[columns.pair]) for row in rows]
    return TextSplit([str(row[columns.text]) for row in rows], pairs, values)


def _score(value: str, where: str) -> float:
    try:
        score = float(value)
    except ValueError:
        score = math.nan
    if not math.isfinite(score) or "_" in value:  # Python takes 1_0 for 10
        raise ValueError(f"{where}: score {value!r} is not a finite number")
    return score


def _from_pairs(rows: list[tuple[str, int]]) -> TextSplit:
    return TextSplit([text for text, _ in rows], None, [float(label) for _, label in rows])
