"""Tables of images: a file and its label, or labels, in every row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from timm.utils.misc import natural_key

from sot.data.rows import Row, read_rows
from sot.data.sources import SPLITS, ImageData, Pictures, divided
from sot.data.splits import Split
from sot.data.tags import PATHS, PictureColumns, check_classes
from sot.errors import SettingError


def picture_table(file: Path, columns: PictureColumns, split: Split, kind: type[Pictures] = Pictures) -> ImageData:
    """The images, or other `kind`, of a table, whose files are named from its folder on.

    A column `split` says which are to validate on; without it they are divided.
    """
    rows = list(read_rows(file, None))
    if not rows:
        raise ValueError(f"{file} has no rows")
    path = next((name for name in PATHS if name in rows[0]), None)
    if path is None:
        raise ValueError(f"{file} needs a column of files, called {', '.join(PATHS)}; it has {_names(rows[0])}")
    tags, classes = columns.tags, columns.classes
    if tags is not None and classes is not None:
        tags = tags.fitting(rows[0], classes)
    for name in (columns.label,) if tags is None else tags.columns:
        if name not in rows[0]:
            raise SettingError("{} has no column {!r}: name it by {label}; it has {}", file, name, _names(rows[0]))
    if tags is not None:
        classes = classes or tags.classes(rows, str(file))
        targets: list[Any] = [*tags.targets(rows, classes, str(file))]
    else:
        classes = classes or sorted({str(row[columns.label]) for row in rows}, key=natural_key)
        targets = _numbers(rows, columns.label, classes, file)
    root = _root(file, str(rows[0][path]), kind)
    items = [(str(root / str(row[path])), target) for row, target in zip(rows, targets)]
    if "split" not in rows[0]:
        return replace(divided(kind(items), classes, split), multi_label=tags is not None)
    train, val = ([items[number] for number in part] for part in _parts(rows, file))
    return ImageData(kind(train), kind(val), classes, multi_label=tags is not None)


def _root(file: Path, first: str, kind: type[Pictures]) -> Path:
    """Where the files are: beside the table, or in a folder `audio` there or one above, as sets of sounds have it."""
    places = [file.parent, *(place / "audio" for place in (file.parent, file.parent.parent) if kind.noun == "sounds")]
    return next((place for place in places if (place / first).is_file()), file.parent)


def _names(row: Row) -> str:
    return ", ".join(map(str, row))


def _numbers(rows: list[Row], column: str, classes: list[str], file: Path) -> list[int]:
    check_classes(classes, file)
    numbers = {name: number for number, name in enumerate(classes)}
    for number, row in enumerate(rows, 1):
        if str(row[column]) not in numbers:
            raise ValueError(f"{file}, row {number}: label {str(row[column])!r} is none of {', '.join(classes)}")
    return [numbers[str(row[column])] for row in rows]


def _parts(rows: list[Row], file: Path) -> tuple[list[int], list[int]]:
    """Numbers of the rows to train on and of those to validate on, by the column `split`."""
    named = {name: key for key, names in SPLITS.items() for name in names}
    parts: dict[str, list[int]] = {"train": [], "val": []}
    for number, row in enumerate(rows):
        key = named.get(str(row["split"]).strip().lower())
        if key is None:
            raise ValueError(f"{file}, row {number + 1}: split {row['split']!r} is none of {', '.join(named)}")
        parts[key].append(number)
    if not parts["train"] or not parts["val"]:
        raise ValueError(f"{file} has rows to train on or to validate on only, by its column split")
    return parts["train"], parts["val"]
