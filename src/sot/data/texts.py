"""Texts with labels: GLUE's files, tables with named columns, sets of `datasets`, or the built-in acceptability set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sot.data.acceptability import acceptability
from sot.data.glue import BUILT_IN, GLUE, Task, check_task
from sot.data.glue import TASKS as TASKS
from sot.data.glue import Columns as Columns
from sot.data.glue import task_of as task_of
from sot.data.hub import load_splits
from sot.data.rows import Row, check_cells, check_length, read_rows, text_column
from sot.data.sources import choose_split, drawn
from sot.data.splits import Split
from sot.data.tags import Tags, Targets
from sot.errors import SettingError


@dataclass
class TextSplit:
    """Texts, their partners if they are pairs, and labels: numbers of classes, values to regress, or targets."""

    texts: list[str]
    pairs: list[str] | None
    labels: Sequence[float | Targets]

    def __len__(self) -> int:
        return len(self.texts)

    def part(self, samples: int) -> TextSplit:
        """Some of them, always the same; 0 is all."""
        return self.take(drawn(len(self), samples))

    def take(self, kept: Sequence[int]) -> TextSplit:
        """Those of these numbers."""
        pairs = None if self.pairs is None else [self.pairs[index] for index in kept]
        return TextSplit([self.texts[index] for index in kept], pairs, [self.labels[index] for index in kept])


@dataclass
class TextData:
    """The splits of a data set; `labels` names the classes, or is None for regression."""

    train: TextSplit | None
    dev: TextSplit | None
    labels: list[str] | None
    metric: str
    multi_label: bool = False  # a text may have several of them, or none

    def divided(self, split: Split) -> TextData:
        """What is there to train on, divided into texts to train on and a development set."""
        if self.train is None or self.dev is not None:
            raise SettingError("{folds} and a split need texts to train on, and no development set of their own")
        train, dev = split.divide([0] * len(self.train) if self.labels is None else self.train.labels)
        return replace(self, train=self.train.take(train), dev=self.train.take(dev))


def load_task(name: str, data: str | Path | None, wanted: str = "{data}, the folder with its") -> TextData:
    """A GLUE task from the folder of its files or from `hfds/…`, else from the hub; or the built-in set.

    `wanted` is how a SettingError asks for files that are missing.
    """
    if name == BUILT_IN:
        if data is not None:
            raise SettingError("task {} is built in and takes no {data}, got {}", BUILT_IN, data)
        made = {
            key: TextSplit([text for text, _ in rows], None, [float(label) for _, label in rows])
            for key, rows in acceptability().items()
        }
        return TextData(made["train"], made["dev"], ["unacceptable", "acceptable"], "mcc")
    check_task(name)
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
    column = columns.label if columns.tags is None else columns.tags.columns[0]
    declared = getattr(_kind(splits[str(dev)].features.get(column)), "names", None)
    tables = {key: (f"{spec} {name}", _rows(splits[name])) for key, name in chosen.items() if name is not None}
    return _from_tables(tables, columns, labels or declared, regression)


def _rows(dataset: Any) -> list[Row]:
    """Rows with the names of classes in place of their numbers."""
    kinds = {name: _kind(kind) for name, kind in dataset.features.items()}
    named = {name: kind.int2str for name, kind in kinds.items() if hasattr(kind, "int2str")}

    def names(row: Row) -> Row:
        return {name: to_name(row[name]) for name, to_name in named.items() if row[name] is not None}

    return [{**{name: "" if cell is None else cell for name, cell in row.items()}, **names(row)} for row in dataset]


def _kind(feature: Any) -> Any:
    """What a column of `datasets` holds; of lists, what is in them."""
    return getattr(feature, "feature", feature)


def load_table(
    train: Path | None,
    dev: Path | None,
    columns: Columns,
    labels: list[str] | None = None,
    regression: bool = False,
    encoding: str | None = None,
) -> TextData:
    """CSV, TSV or JSONL files; classes are the labels of the training file in order, numbers by size.

    For `regression` labels are the numbers themselves. Without a column `sentence` that is the default, `text` is read.
    """
    files = {key: file for key, file in (("train", train), ("dev", dev)) if file is not None}
    tables = {key: (str(file), list(read_rows(file, None, encoding))) for key, file in files.items()}
    return _from_tables(tables, columns, labels, regression)


def _from_tables(
    tables: dict[str, tuple[str, list[Row]]], columns: Columns, labels: list[str] | None, regression: bool
) -> TextData:
    first = next(iter(tables.values()))[1][:1]
    columns = _fitted(columns, first[0], labels) if first else columns
    for source, rows in tables.values():
        for number, row in enumerate(rows, 1):
            check_length(row, f"{source}, row {number}")
        _check_rows(rows, columns, source)
    if regression:
        return _data(tables, columns, None, "pearson")
    if columns.tags is not None:
        return _tagged(tables, columns, columns.tags, labels)
    if labels is None:
        _, rows = tables.get("train") or tables["dev"]
        labels = sorted({str(row[columns.label]) for row in rows}, key=_by_number_then_name)
    if len(labels) < 2:
        raise ValueError(f"a classifier needs at least two classes, found {', '.join(labels) or 'none'}")
    return _data(tables, columns, labels, "macro_f1")


def _fitted(columns: Columns, row: Row, labels: list[str] | None) -> Columns:
    """The columns as this table calls them."""
    tags = columns.tags if labels is None or columns.tags is None else columns.tags.fitting(row, labels)
    return replace(columns, text=text_column(columns.text, row), tags=tags)


def _tagged(
    tables: dict[str, tuple[str, list[Row]]], columns: Columns, tags: Tags, labels: list[str] | None
) -> TextData:
    """Texts that may have several labels."""
    source, rows = tables.get("train") or tables["dev"]
    names = labels or tags.classes(rows, source)

    def split(source: str, rows: list[Row]) -> TextSplit:
        return TextSplit(*_texts(rows, columns), tags.targets(rows, names, source))

    made = {key: split(*table) for key, table in tables.items()}
    return TextData(made.get("train"), made.get("dev"), names, "macro_f1", multi_label=True)


def _texts(rows: list[Row], columns: Columns) -> tuple[list[str], list[str] | None]:
    pairs = None if columns.pair is None else [str(row[columns.pair]) for row in rows]
    return [str(row[columns.text]) for row in rows], pairs


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
    columns.check(rows[0], file)
    for name in columns.needed:
        for number, row in enumerate(rows, 1):
            if columns.tags is None and name == columns.label and row.get(name) == "":
                raise ValueError(f"{file}, row {number}: nothing in column {name!r}")
            check_cells(row, [name], f"{file}, row {number}")


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
    return TextSplit(*_texts(rows, columns), values)


def _score(value: str, where: str) -> float:
    try:
        score = float(value)
    except ValueError:
        score = math.nan
    if not math.isfinite(score) or "_" in value:  # Python takes 1_0 for 10
        raise ValueError(f"{where}: score {value!r} is not a finite number")
    return score
