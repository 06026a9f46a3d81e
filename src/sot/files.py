"""Files as they should be written: whole or not at all; tables and figures as their contents."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_atomically(path: Path, content: str | bytes) -> None:
    """All of a file or none of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(partial, path)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows under the names of all their columns, in the order in which these first occur."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_png(figure: Figure) -> bytes:
    """A figure of matplotlib."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()
