"""Rows of tables in files: .csv, .tsv, .txt and .jsonl."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def read_rows(file: Path, header: tuple[str, ...] | None) -> Iterator[Row]:
    """Rows of a .csv, .jsonl, or tab-separated .tsv or .txt file; GLUE's quote nothing and may begin with a mark."""
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    with file.open(encoding="utf-8-sig", newline="") as lines:
        try:
            yield from _parsed(lines, file, header)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not text in UTF-8: {error}") from error


def _parsed(lines: Iterable[str], file: Path, header: tuple[str, ...] | None) -> Iterator[Row]:
    if file.suffix == ".jsonl":
        yield from (_parse(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip())
    elif file.suffix == ".csv":
        yield from _cells(csv.DictReader(lines), file)
    elif file.suffix in (".tsv", ".txt"):
        yield from _cells(csv.DictReader(lines, fieldnames=header, delimiter="\t", quoting=csv.QUOTE_NONE), file)
    else:
        raise ValueError(f"{file} must be .csv, .tsv, .txt or .jsonl")


def _cells(reader: csv.DictReader[str], file: Path) -> Iterator[Row]:
    try:
        names = list(filter(None, reader.fieldnames or ()))
        if len(set(names)) < len(names):
            raise ValueError(f"{file} has two columns of one name; it has {', '.join(names)}")
        yield from reader
    except csv.Error as error:  # a cell of more than 131,072 characters, mostly for want of a closing quote
        raise ValueError(f"{file}, line {reader.line_num + 1}: {error}") from error  # where the row begins


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not a JSON object")
    return row


def is_unicode(text: str) -> bool:
    """No tokenizer takes half of a pair of surrogates: JSON may escape one, and Python keeps other bytes as such."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
