"""Files of exported models, as far as they can be judged without torch."""

from __future__ import annotations

from pathlib import Path

from sot.errors import SettingError
from sot.files import check_folder

FORMATS = {"onnx": ".onnx", "torch": ".pt2"}


def export_target(folder: Path, to: str, out: Path | None) -> Path:
    """Where the model of `folder` is written for `to`; ValueError if that is not possible."""
    if to not in FORMATS:
        raise ValueError(f"unknown format {to!r}; accepted: {', '.join(FORMATS)}")
    file = folder / f"model{FORMATS[to]}" if out is None else out
    if file.suffix != FORMATS[to]:
        raise ValueError(f"the file must end in {FORMATS[to]} for {to}, got {file}")
    check_folder(file.parent, "{out} must be in a folder")
    if file.is_dir():
        raise SettingError("{out} must be a file, and {} is a folder", file)
    return file


def exported_folder(file: Path) -> Path:
    """The folder of an exported model, with the configuration and processor that belong to it."""
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    if not (file.parent / "config.json").is_file():
        raise ValueError(f"{file} needs the config.json and processor that sot export wrote beside it")
    return file.parent
