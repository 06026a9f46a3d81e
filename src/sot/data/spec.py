"""What `--data` may name for images and sounds, told without opening it or loading any library."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from sot.data.rows import SUFFIXES, read_rows
from sot.data.tags import PATHS, has_pictures, is_picture_table

SOUND_SUFFIXES = (".wav", ".flac", ".ogg")
SOME = 20
READERS = ("torch", "hfds", "hfids", "wds")
ACCEPTED = "digits, a folder, a .tar file, torch/…@FOLDER, hfds/…, hfids/…, wds/…@FOLDER"


def holds_sounds(spec: str) -> bool:
    """Whether data are sounds: the set that comes with the package, a folder or a table of such files."""
    if spec == "tones" or not spec:
        return bool(spec)
    if is_picture_table(spec):
        row = next(read_rows(Path(spec)), {})
        first = next((str(row[name]) for name in PATHS if name in row), "")
        return first.lower().endswith(SOUND_SUFFIXES)
    return Path(spec).is_dir() and any(file.suffix.lower() in SOUND_SUFFIXES for file in _some_files(Path(spec)))


def _some_files(folder: Path) -> Iterator[Path]:
    """A few files of every folder, not hidden: enough to tell of what kind they are."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place) / name for name in files[:SOME] if not name.startswith("."))


def files_in(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """The files in a folder that are called so, however deep, in order; what is hidden is left out."""
    places = ((file, file.relative_to(folder).parts) for file in sorted(folder.rglob("*")))
    shown = (file for file, parts in places if not any(part.startswith(".") for part in parts))
    return [file for file in shown if file.suffix.lower() in suffixes and file.is_file()]


def check_pictures(spec: str) -> None:
    """Raise ValueError for a name that cannot be that of images."""
    path = Path(spec)
    kind, _, rest = spec.partition("/")
    if is_picture_table(spec) and has_pictures(spec):
        return
    known = spec == "digits" or (spec and path.is_dir()) or (path.is_file() and path.suffix == ".tar")
    if known or (rest and kind in READERS):
        return
    if path.suffix in SUFFIXES:
        raise ValueError(f"{spec} is a table of texts: use sot finetune; accepted as images: {ACCEPTED}")
    raise ValueError(f"unknown data {spec!r}; accepted: {ACCEPTED}")
