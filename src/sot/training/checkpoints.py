"""Folders of checkpoints: whole, or passed over."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

from sot.files import digest, read_object

logger = logging.getLogger("sot")
MANIFEST = "manifest.json"
UNFINISHED = "unfinished"  # where a checkpoint is written, in the folder of its run


def finish_checkpoint(folder: Path, target: Path) -> None:
    """Record what the folder holds, and move it into place in one step."""
    manifest = {str(file.relative_to(folder)): digest(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    shutil.rmtree(target, ignore_errors=True)
    folder.replace(target)


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint holds every file it was written with, unchanged."""
    try:
        manifest = read_object(folder / MANIFEST)
        return all(digest(folder / name) == expected for name, expected in manifest.items())
    except (OSError, ValueError):
        return False


def checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run, the newest first."""
    found = [path for path in out.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)


def last_whole_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint that is whole; those that are not are named and passed over."""
    for path in checkpoints(out):
        if is_whole(path):
            return path
        logger.warning("%s is damaged or unfinished: falling back to the one before.", path)
    return None


def remove_old(out: Path, keep: int) -> None:
    """Remove all but the newest checkpoints."""
    for path in checkpoints(out)[keep:]:
        shutil.rmtree(path)
