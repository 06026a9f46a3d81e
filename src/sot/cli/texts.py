"""What commands on texts share: their tables, and what can be refused of them before torch is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sot.cli.options import (
    DevOption,
    EncodingOption,
    LabelOption,
    MultiLabelOption,
    PairOption,
    RegressionOption,
    SeparatorOption,
    TaskOption,
    TextOption,
    of_data,
    read_tags,
    refuse_both,
)

if TYPE_CHECKING:
    from sot.data.tags import Tags

NO_TEXTS = "name a --task, or give --data a table with columns --text and --label"


@dataclass(frozen=True)
class TextOptions:
    """Which texts, and which columns of their tables."""

    task: TaskOption = None
    data: Annotated[
        str | None, of_data(help="A .csv, .tsv or .jsonl table, the folder of a GLUE task, or hfds/NAME[:CONFIG].")
    ] = None
    dev: DevOption = None
    text: TextOption = "sentence"
    pair: PairOption = None
    label: LabelOption = "label"
    regression: RegressionOption = False
    encoding: EncodingOption = None
    multi_label: MultiLabelOption = False
    separator: SeparatorOption = None

    @property
    def columns(self) -> tuple[str, str | None, str]:
        """Of the text, its partner and the label."""
        return self.text, self.pair, self.label

    @property
    def tags(self) -> Tags | None:
        """Where a text has several labels."""
        return read_tags(self.label, self.multi_label, self.separator)

    def read(self, labels: list[str] | None = None) -> tuple[Any, str]:
        """Texts and what they are called; a table is to train on, or, for a model that knows `labels`, to evaluate.

        A model of one label predicts numbers.
        """
        from sot.data.texts import Columns, load_set, load_table, load_task, task_of

        task, data, dev, tags = self.task, self.data, self.dev, self.tags
        task = task or (data and task_of(data))
        if task is not None:
            usual = Columns()
            defaults = {"--text": usual.text, "--pair": usual.pair, "--label": usual.label}
            changed = {
                name: value for (name, default), value in zip(defaults.items(), self.columns) if value != default
            }
            others = {"--encoding": self.encoding, "--regression": self.regression, "--multi-label": tags is not None}
            _refuse_of_tables(f"task {task}", {"--dev": dev, **changed, **others})
            return load_task(task, data), task
        if data is None:
            raise ValueError(NO_TEXTS)
        refuse_both("--regression", "--multi-label", self.regression and tags is not None)
        regression = self.regression or (labels is not None and len(labels) == 1)
        columns = Columns(*self.columns, tags)
        if data.startswith("hfds/"):
            _refuse_of_tables(data, {"--dev": dev, "--encoding": self.encoding})
            return load_set(data, columns, labels, regression), data
        train, dev = (Path(data), dev) if labels is None else (None, Path(data))
        return load_table(train, dev, columns, labels, regression, self.encoding), Path(data).name

    def source(self) -> dict[str, Any]:
        """What tells the texts from others of the same name, for a run that is resumed."""
        from sot.training.run_folder import full_name

        source: dict[str, Any] = {"source": self.data and full_name(self.data)}
        source |= {"dev": self.dev and full_name(str(self.dev)), "columns": [*self.columns]}
        return source | {"regression": self.regression, **({} if self.tags is None else {"tags": str(self.tags)})}

    def check(self, folds: int | None = None) -> None:
        """Refuse what names and files tell of a table of texts, before any library is loaded."""
        from sot.data.glue import check_task, task_of

        task, data, dev, tags = self.task, self.data, self.dev, self.tags
        if task is not None:
            check_task(task)
        elif data is None:
            raise ValueError(NO_TEXTS)
        refuse_both("--regression", "--multi-label", self.regression and tags is not None)
        if folds is not None and (task is not None or dev is not None):
            raise ValueError(f"--folds {folds} divides a table: leave out {'--dev' if dev is not None else '--task'}")
        if task is None and data is not None and not data.startswith("hfds/") and task_of(data) is None:
            self._check_columns([Path(data), *([] if dev is None else [dev])])

    def _check_columns(self, files: list[Path]) -> None:
        """Refuse tables that are not there, and columns that their first row does not have."""
        from sot.data.glue import Columns
        from sot.data.rows import check_table, read_rows, text_column

        for file in files:
            check_table(file, self.encoding)
        named = [name for name in self.columns if name is not None]
        if len(set(named)) < len(named):
            twice = next(name for name in named if named.count(name) > 1)
            raise ValueError(f"--text, --pair and --label must be different columns, got {twice!r} twice")
        for file in files:
            first = next(read_rows(file, None, self.encoding), None)
            if first is not None:
                Columns(text_column(self.text, first), self.pair, self.label, self.tags).check(first, str(file))


def check_text_model(model: str) -> None:
    """Refuse a timm name, which the hub would only call missing; timm's sources are searched and not loaded."""
    name, found = model.partition(".")[0], importlib.util.find_spec("timm")
    if not name.isidentifier() or Path(model).exists() or found is None or found.origin is None:
        return
    files = (Path(found.origin).parent / "models").glob("*.py")
    if name.startswith("sot_") or any(f"@register_model\ndef {name}(" in file.read_text() for file in files):
        raise ValueError(f"{model} is a timm model, for images: use sot train; accepted: a text model")


def _refuse_of_tables(what: str, options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        if value not in (None, False):
            shown = option if value is True else f"{option} {value}"
            raise ValueError(f"{shown} is for tables, and {what} has its own")
