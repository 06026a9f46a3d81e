"""Files as they should be written: whole or not at all, and read: named where they are damaged; tables and figures."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TextIO

from safetensors import SafetensorError

from sot.errors import SettingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")  # and turns of direction
MARKS = re.compile(r"[\\`*\[\]<>|&~$]")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Writing a file or folder: what the libraries say of a full disk does not name it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise OSError(f"cannot write {path}: {said}") from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """All of a file or none of it."""
    with writing(path), written_atomically(path) as opened:
        opened.buffer.write(content.encode() if isinstance(content, str) else content)


def check_folder(folder: Path, rule: str = "{out} must be a folder") -> None:
    """Raise ValueError where a folder can neither be written to nor made: better known before long work than after."""
    found = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not found.is_dir():
        raise SettingError(f"{rule}, and {{}} is a file", found)
    try:
        TemporaryFile(dir=found).close()
    except OSError as error:
        raise ValueError(f"cannot write in {found}: {error.strerror}") from error


def check_writable(file: Path) -> None:
    """Raise ValueError where a file cannot be written."""
    if file.is_dir():
        raise ValueError(f"cannot write {file}: it is a folder")
    if not file.parent.is_dir():
        raise ValueError(f"cannot write {file}: there is no folder {file.parent}")
    check_folder(file.parent)


@contextmanager
def written_atomically(path: Path) -> Iterator[TextIO]:
    """A file to write line by line, in place when the block ends well and gone if it does not."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as opened:
            yield opened
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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
    except (ValueError, RecursionError) as error:  # of JSON, or of its encoding; of what is nested without end
        raise ValueError(f"{file} is damaged: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: it holds {str(content)[:40]!r}, not an object of JSON")
    return content


@contextmanager
def weights_of(folder: str | Path) -> Iterator[None]:
    """Loading weights: what the libraries say of damaged ones, or of other shapes, does not name them."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:  # of a stranger's files they raise nearly anything
        said = one_line(error)
        raise ValueError(f"the weights in {folder} are damaged or do not fit its config.json: {said}") from error


@contextmanager
def inputs_taken() -> Iterator[None]:
    """Running a model of a folder: timm asserts what fits its layers, and the folder's settings may be for others."""
    try:
        yield
    except AssertionError as error:
        raise ValueError(f"the model does not take what its processor makes: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """What an error says, or else its kind, short enough for the end of a sentence."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def counted(number: int, nouns: str) -> str:
    """A number with its noun, given in the plural: 1 image, 3 classes."""
    one = nouns.removesuffix("es") if nouns.endswith("sses") else nouns.removesuffix("s")
    return f"{number:,} {one if number == 1 else nouns}"


def in_words(seconds: float) -> str:
    """A time as people say it: 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def visible(text: str) -> str:
    """A text with its control characters, which a terminal would obey, and its other halves of none, as escapes."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def as_markdown(text: str) -> str:
    """A text that Markdown shows as it is, in a line or a cell: no link, no HTML, no table of its own."""
    return MARKS.sub(lambda found: f"\\{found[0]}", visible(" ".join(text.split())))


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
