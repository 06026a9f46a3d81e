"""What can be refused of a page before torch is loaded: its folders and its address."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from sot.saved import folder_modality

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_folders(folders: Sequence[Path]) -> None:
    """Raise for a folder that is no model, or given twice, before any of them is opened."""
    for folder in folders:
        if folder_modality(folder) == "audio":
            raise ValueError(f"{folder} is a model for sounds, and the page shows images and texts: use sot explain")
        if folders.count(folder) > 1:
            raise ValueError(f"{folder} was given twice")


def check_address(host: str, port: int | None) -> None:
    """Raise ValueError if nothing can listen there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on {host} port {port or 'any'}: {error.strerror or error}") from error
