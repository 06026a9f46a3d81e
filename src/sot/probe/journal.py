"""Finished rows of a comparison, one JSON object a line, so that an interrupted one goes on where it was."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from sot.files import write_atomically

logger = logging.getLogger("sot")


class Journal:
    """Rows in a file, found again by what they are about."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []
        for line in file.read_text().splitlines() if file.is_file() else []:
            try:
                self.rows.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                logger.warning("A line of %s is damaged: what it said is computed again.", file)

    def find(self, **about: Any) -> dict[str, Any] | None:
        """The row that says this."""
        return next((row for row in self.rows if about.items() <= row.items()), None)

    def add(self, row: dict[str, Any]) -> None:
        """Write a finished row."""
        self.rows.append(row)
        write_atomically(self.file, "".join(f"{json.dumps(each)}\n" for each in self.rows))
