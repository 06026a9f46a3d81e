"""What commands on texts share: their tables, and what can be refused of them before torch is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sot.cli.options import refuse_both

if TYPE_CHECKING:
    from sot.data.tags import Tags

NO_TEXTS = "name a --task, or give --data a table with columns --text and --label"


def text_data(
    task: str | None,
    data: str | None,
    dev: Path | None,
    columns: tuple[str, str | None, str],
    labels: Any = None,
    regression: bool = False,
    encoding: str | None = None,
    tags: Tags | None = None,
) -> tuple[Any, str]:
    """Texts and what they are called; a table is one to train on, or, for a model that knows `labels`, to evaluate.

    A model of one label predicts numbers.
    """
    from sot.data.texts import Columns, load_set, load_table, load_task, task_of

    task = task or (data and task_of(data))
    if task is not None:
        usual = Columns()
        defaults = {"--text": usual.text, "--pair": usual.pair, "--label": usual.label}
        changed = {name: value for (name, default), value in zip(defaults.items(), columns) if value != default}
        others = {"--encoding": encoding, "--regression": regression, "--multi-label": tags is not None}
        _refuse_of_tables(f"task {task}", {"--dev": dev, **changed, **others})
        return load_task(task, data), task
    if data is None:
        raise ValueError(NO_TEXTS)
    refuse_both("--regression", "--multi-label", regression and tags is not None)
    regression |= labels is not None and len(labels) == 1
    if data.startswith("hfds/"):
        _refuse_of_tables(data, {"--dev": dev, "--encoding": encoding})
        return load_set(data, Columns(*columns, tags), labels, regression), data
    train = Path(data) if labels is None else None
    dev = dev if train else Path(data)
    return load_table(train, dev, Columns(*columns, tags), labels, regression, encoding), Path(data).name


def source_of(data: str | None, dev: Path | None, columns: Any, regression: bool, tags: Tags | None) -> dict[str, Any]:
    """What tells texts from others of the same name, for a run that is resumed."""
    from sot.training.run_folder import full_name

    source: dict[str, Any] = {"source": data and full_name(data), "dev": dev and full_name(str(dev))}
    return source | {"columns": [*columns], "regression": regression, **({} if tags is None else {"tags": str(tags)})}


def check_text_model(model: str) -> None:
    """Refuse a timm name, which the hub would only call missing; timm's sources are searched and not loaded."""
    name, found = model.partition(".")[0], importlib.util.find_spec("timm")
    if not name.isidentifier() or Path(model).exists() or found is None or found.origin is None:
        return
    files = (Path(found.origin).parent / "models").glob("*.py")
    if name.startswith("sot_") or any(f"@register_model\ndef {name}(" in file.read_text() for file in files):
        raise ValueError(f"{model} is a timm model, for images: use sot train; accepted: a text model")


def check_texts(
    task: str | None,
    data: str | None,
    dev: Path | None,
    columns: tuple[str, str | None, str],
    folds: int | None = None,
    encoding: str | None = None,
    tags: Tags | None = None,
    regression: bool = False,
) -> None:
    """Refuse what names and files tell of a table of texts, before any library is loaded."""
    from sot.data.glue import check_task, task_of

    if task is not None:
        check_task(task)
    elif data is None:
        raise ValueError(NO_TEXTS)
    refuse_both("--regression", "--multi-label", regression and tags is not None)
    if folds is not None and (task is not None or dev is not None):
        raise ValueError(f"--folds {folds} divides a table: leave out {'--dev' if dev is not None else '--task'}")
    if task is not None or data is None or data.startswith("hfds/") or task_of(data) is not None:
        return
    _check_columns([Path(data), *([] if dev is None else [dev])], columns, encoding, tags)


def _check_columns(
    files: list[Path], columns: tuple[str, str | None, str], encoding: str | None, tags: Tags | None
) -> None:
    """Refuse tables that are not there, and columns that their first row does not have."""
    from sot.data.glue import Columns
    from sot.data.rows import check_table, read_rows, text_column

    for file in files:
        check_table(file, encoding)
    named = [name for name in columns if name is not None]
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        raise ValueError(f"--text, --pair and --label must be different columns, got {twice!r} twice")
    for file in files:
        first = next(read_rows(file, None, encoding), None)
        if first is not None:
            text, pair, label = columns
            Columns(text_column(text, first), pair, label, tags).check(first, str(file))


def _refuse_of_tables(what: str, options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        if value not in (None, False):
            shown = option if value is True else f"{option} {value}"
            raise ValueError(f"{shown} is for tables, and {what} has its own")
