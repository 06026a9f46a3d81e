"""Labels in tables: several of a sample in a cell, in a list, or in columns of 0 and 1; and those of images."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sot.data.rows import SUFFIXES, Row, read_rows

logger = logging.getLogger("sot")
SEPARATOR = ";"
PATHS = ("path", "file", "file_name", "filename", "image", "audio")  # what a table calls the column of its files
YES, NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no", "")
Targets = tuple[float, ...]  # of one sample: 1 for each class that it has, 0 for the others


@dataclass(frozen=True)
class Tags:
    """Where a table has the labels of a sample: one column, or one of 0 and 1 for each label."""

    columns: tuple[str, ...]
    separator: str = SEPARATOR

    @property
    def flags(self) -> bool:
        """Whether each label has a column."""
        return len(self.columns) > 1

    def read(self, row: Row, where: str) -> list[str]:
        """The labels of a row."""
        if self.flags:
            return [name for name in self.columns if _is_set(row, name, where)]
        cell = row.get(self.columns[0])
        parts = cell if isinstance(cell, list) else str("" if cell is None else cell).split(self.separator)
        return [name for part in parts if (name := str(part).strip())]

    def classes(self, rows: Sequence[Row], where: str) -> list[str]:
        """The labels that occur, in order; or the columns that have them."""
        found = [self.read(row, f"{where}, row {number}") for number, row in enumerate(rows, 1)]
        if not any(len(names) > 1 for names in found):
            told = "" if self.flags else f": is {self.separator!r} what stands between them?"
            logger.warning("No sample of %s has two labels%s", where, told)
        names = list(self.columns) if self.flags else sorted({name for names in found for name in names})
        check_classes(names, where)
        return names

    def targets(self, rows: Sequence[Row], classes: Sequence[str], where: str) -> list[Targets]:
        """For every row 1 for the classes that it has, and 0 for the others."""
        found = []
        for number, row in enumerate(rows, 1):
            names = set(self.read(row, f"{where}, row {number}"))
            if unknown := names - set(classes):
                raise ValueError(f"{where}, row {number}: label {min(unknown)!r} is none of {', '.join(classes)}")
            found.append(tuple(float(name in names) for name in classes))
        return found

    def fitting(self, row: Row, classes: Sequence[str]) -> Tags:
        """Itself, or the columns of a trained model's classes where the table has those and not the one named."""
        columns = self.columns
        return Tags(tuple(classes)) if columns[0] not in row and all(name in row for name in classes) else self


def check_classes(names: Sequence[str], where: str | Path) -> None:
    """Refuse data of one class, or none."""
    if len(names) < 2:
        raise ValueError(f"a classifier needs at least two classes, {where} has {', '.join(names) or 'none'}")


def _is_set(row: Row, name: str, where: str) -> bool:
    value = str("" if row.get(name) is None else row[name]).strip().lower()
    if value not in YES + NO:
        raise ValueError(f"{where}: column {name!r} must hold 0 or 1, got {row[name]!r}")
    return value in YES


@dataclass(frozen=True)
class PictureColumns:
    """Where a table of images has their labels: in one column, one an image, or as `tags` say.

    `classes` are those of a trained model; None leaves them to the table.
    """

    label: str = "label"
    tags: Tags | None = None
    classes: list[str] | None = None


def is_picture_table(spec: str) -> bool:
    """Whether a name is that of a table."""
    return spec.endswith(SUFFIXES) and Path(spec).is_file()


def has_pictures(spec: str) -> bool:
    """Whether a table has a column of images."""
    row = next(read_rows(Path(spec)), {})
    return any(name in row for name in PATHS)
