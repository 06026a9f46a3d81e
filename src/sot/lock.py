"""One writer at a time, by a lock that the system ends with the process that has it, however that ends."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sot.errors import SettingError
from sot.files import visible

logger = logging.getLogger("sot")
LOCK = ".lock"  # the file, in the folder that it is for


@contextmanager
def only_writer(folder: Path, wait: bool = False) -> Iterator[None]:
    """Be the only process that writes to a folder, which is made; one that is in use is refused, or waited for."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            said = "{} writes to {}: wait until it ends, or choose another {out}"
            raise SettingError(said, _holder(file), folder) from None
        logger.warning("%s writes to %s: waiting for it.", _holder(file), folder)
        lock.acquire()
    try:
        with suppress(OSError):  # a name for whoever is refused; the lock holds without it
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        with suppress(OSError):  # before the lock ends: who gets hold of a file that is gone makes another
            file.unlink()
        lock.release()


def _holder(file: Path) -> str:
    try:
        return visible(file.read_text()[:100]) or "another process"
    except (OSError, ValueError):
        return "another process"
