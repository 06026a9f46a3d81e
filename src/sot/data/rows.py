"""Rows of tables in files: .csv, .tsv, .txt and .jsonl."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from sot.errors import SettingError

Row = Mapping[str, Any]
SUFFIXES = (".csv", ".tsv", ".txt", ".jsonl")
DELIMITERS = ",;\t"  # of a .csv file, the first of those that its header has most of
MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # how a file may begin that is not UTF-8
USUAL_TEXT, OTHER_TEXT = "sentence", "text"  # names of the column of the text
END = "\U0010ffff"  # no character: a cell that holds it was still open where the file ended


def check_table(file: Path, encoding: str | None = None) -> None:
    """Raise ValueError or FileNotFoundError for what `read_rows` cannot open, without a look inside."""
    if file.is_dir():
        raise ValueError(f"{file} is a folder, and a table is a file: {', '.join(SUFFIXES)}")
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file} must be {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    try:
        codecs.lookup(encoding or "utf-8")
    except LookupError:
        raise SettingError("{encoding} must be one that Python knows, such as latin-1, got {!r}", encoding) from None


def read_rows(file: Path, header: tuple[str, ...] | None = None, encoding: str | None = None) -> Iterator[Row]:
    """Rows of a .csv, .jsonl, or tab-separated .tsv or .txt file; GLUE's quote nothing and may begin with a mark.

    Cells of a .csv file are separated by commas, semicolons or tabs, as its header has it. Without an `encoding` it is
    UTF-8, or UTF-16 where the file says so. What is null in JSON is empty, as in the other formats.
    """
    check_table(file, encoding)
    with file.open(encoding=encoding or _marked(file), newline="") as lines:
        try:
            yield from _parsed(lines, file, header)
        except UnicodeError as error:
            said = "{} is not text in {}, name its {encoding}: {}"
            raise SettingError(said, file, encoding or "UTF-8", error) from error


def _marked(file: Path) -> str:
    with file.open("rb") as opened:
        return MARKS.get(opened.read(2), "utf-8-sig")


def _parsed(lines: Iterable[str], file: Path, header: tuple[str, ...] | None) -> Iterator[Row]:
    if file.suffix == ".jsonl":
        filled = (line for line in lines if line.strip())
        yield from (_parse(line, f"{file}, row {number}") for number, line in enumerate(filled, 1))
    elif file.suffix == ".csv":
        first = next(iter(lines), "")
        yield from _cells(chain([first], lines), file, {"delimiter": _delimiter(first)}, header)
    else:
        yield from _cells(lines, file, {"delimiter": "\t", "quoting": csv.QUOTE_NONE}, header)


def _delimiter(line: str) -> str:
    bare = re.sub('"[^"]*"', "", line)
    return max(DELIMITERS, key=bare.count)


def _cells(lines: Iterable[str], file: Path, form: dict[str, Any], header: tuple[str, ...] | None) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # texts may be long
    reader = csv.DictReader(chain(lines, [END]), fieldnames=header, **form)
    number = 0
    try:
        names = list(filter(None, reader.fieldnames or ()))
        if len(set(names)) < len(names):
            raise ValueError(f"{file} has two columns of one name; it has {', '.join(names)}")
        if names and names[-1].endswith(END) and names[-1] != END:
            raise ValueError(f"{file}: a quote in its header is never closed")
        for number, row in enumerate(reader, 1):
            cells = [cell for cell in row.values() if isinstance(cell, str)]
            if cells == [END]:
                return
            if any(cell.endswith(END) for cell in cells):
                raise ValueError(f"{file}, row {number}: a quote that is never closed")
            yield row
    except csv.Error as error:
        raise ValueError(f"{file}, row {number + 1}: {error}") from error


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not a JSON object")
    return {name: "" if cell is None else cell for name, cell in row.items()}


def check_cells(row: Row, names: Iterable[str], where: str) -> None:
    """Raise ValueError for a row that lacks one of these cells, or has one that is not Unicode."""
    for name in names:
        if row.get(name) is None:
            raise ValueError(f"{where}: nothing in column {name!r}")
        if not is_unicode(str(row[name])):
            raise ValueError(f"{where}: column {name!r} is not Unicode, got {str(row[name])!a}")


def check_length(row: Row, where: str) -> None:
    """Raise ValueError for a row that is longer than the header."""
    if None in row:  # where csv puts what is left: mostly of a text that holds the separator
        raise ValueError(f"{where}: more cells than the {len(row) - 1} of the header")


def check_texts(file: Path, text: str | None, pair: str | None, encoding: str | None) -> tuple[str, list[str], int]:
    """Column of the text, all columns and number of rows of a table of texts to predict, read once to the end.

    What is wrong with a row is said before anything is done.
    """
    names: dict[str, None] = {}
    column, number = text or USUAL_TEXT, 0
    for number, row in enumerate(read_rows(file, None, encoding), 1):
        check_length(row, f"{file}, row {number}")
        if number == 1:
            column = column if text else text_column(column, row)
            for name in filter(None, (column, pair)):
                if name not in row:
                    raise ValueError(f"{file} has no column {name!r}; it has {', '.join(row)}")
        check_cells(row, filter(None, (column, pair)), f"{file}, row {number}")
        names |= dict.fromkeys(row)
    if not number:
        raise ValueError(f"{file} has no rows")
    return column, list(names), number


def text_column(wanted: str, row: Row) -> str:
    """The column that holds the text: as wanted, or `text` where it is the usual one and not there."""
    return OTHER_TEXT if wanted == USUAL_TEXT and wanted not in row and OTHER_TEXT in row else wanted


def is_unicode(text: str) -> bool:
    """No tokenizer takes half of a pair of surrogates: JSON may escape one, and Python keeps other bytes as such."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_unicode(*texts: str | None) -> None:
    """Raise ValueError for a text whose bytes on the command line were not valid UTF-8."""
    for text in texts:
        if text is not None and not is_unicode(text):
            raise ValueError(f"the text {text!r} is not valid UTF-8")
