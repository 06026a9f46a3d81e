"""Files as they should be written: whole or not at all, and read: named where they are damaged; tables and figures."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


def write_atomically(path: Path, content: str | bytes) -> None:
    """All of a file or none of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(partial, path)


def digest(file: Path) -> str:
    """SHA-256 of what a file holds."""
    hashed = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 20):
            hashed.update(chunk)
    return hashed.hexdigest()


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object that a file holds."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:  # of JSON, or of its encoding
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: it holds {str(content)[:40]!r}, not an object of JSON")
    return content


@contextmanager
def weights_of(folder: str | Path) -> Iterator[None]:
    """Loading weights: what the libraries say of damaged ones, or of other shapes, does not name them."""
    try:
        yield
    except (SafetensorError, RuntimeError, EOFError, KeyError) as error:
        said = one_line(error)
        raise ValueError(f"the weights in {folder} are damaged or do not fit its config.json: {said}") from error


def one_line(error: Exception) -> str:
    """What an error says, or else its kind, short enough for the end of a sentence."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows under the names of all their columns, in the order in which these first occur."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def rich_table(words: Sequence[Any], numbers: Iterable[str], rows: Iterable[Sequence[Any]] = (), **look: Any) -> Table:
    """Columns of words, right-aligned columns of numbers beside them, and rows, for a terminal."""
    from rich.table import Column, Table

    table = Table(*words, *(Column(name, justify="right") for name in numbers), **look)
    for row in rows:
        table.add_row(*row)
    return table


def as_png(figure: Figure) -> bytes:
    """A figure of matplotlib."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()
