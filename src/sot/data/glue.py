"""Columns of tables of texts, and GLUE's tasks: their files, columns, scores and classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sot.data.rows import Row
from sot.data.tags import Tags


@dataclass(frozen=True)
class Columns:
    """Names of the columns that hold the text, its partner in a pair, and the label; or `tags` in its place."""

    text: str = "sentence"
    pair: str | None = None
    label: str = "label"
    tags: Tags | None = None

    @property
    def needed(self) -> list[str]:
        """Every column that a table must have."""
        labels = (self.label,) if self.tags is None else self.tags.columns
        return [name for name in (self.text, self.pair, *labels) if name is not None]

    def check(self, row: Row, file: str) -> None:
        """Raise ValueError for a column that a row of a file lacks."""
        for name in self.needed:
            if name not in row:
                raise ValueError(f"{file} has no column {name!r}; it has {', '.join(map(str, row))}")


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


def check_task(name: str) -> None:
    """Raise ValueError for a name that is no task."""
    if name not in (*TASKS, BUILT_IN):
        raise ValueError(f"unknown task {name!r}; accepted: {', '.join([*TASKS, BUILT_IN])}")


def task_of(folder: str | Path) -> str | None:
    """The GLUE task whose files a folder holds, by its name as GLUE has it, such as RTE or SST-2."""
    name = Path(folder).name.lower().replace("-", "")
    return name if name in TASKS and Path(folder).is_dir() else None
