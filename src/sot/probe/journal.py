"""Finished rows of a comparison, one JSON object a line, so that an interrupted one goes on where it was."""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

from sot.files import write_atomically
from sot.probe.fitting import Choice

logger = logging.getLogger("sot")
CHOSEN = {field.name for field in fields(Choice)}
SCORED = {"score", "loss", "seconds", "epoch_seconds"}


class Journal:
    """Rows in a file, found again by what they are about."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []
        for line in file.read_bytes().splitlines() if file.is_file() else []:
            row = _whole_row(line)
            if row is not None:
                self.rows.append(row)
            else:
                logger.warning("A line of %s is damaged: what it said is computed again.", file)

    def find(self, **about: Any) -> dict[str, Any] | None:
        """The row that says this."""
        return next((row for row in self.rows if about.items() <= row.items()), None)

    def add(self, row: dict[str, Any]) -> None:
        """Write a finished row."""
        self.rows.append(row)
        write_atomically(self.file, "".join(f"{json.dumps(each)}\n" for each in self.rows))


def _whole_row(line: bytes) -> dict[str, Any] | None:
    """A row that says all it should: of a seed its scores, of none the settings that were chosen."""
    try:
        row: dict[str, Any] = json.loads(line)
        numbers = row["choice"] if row["seed"] is None else {name: row[name] for name in SCORED}
        whole = numbers.keys() == (CHOSEN if row["seed"] is None else SCORED)
        return row if whole and all(isinstance(number, int | float) for number in numbers.values()) else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
