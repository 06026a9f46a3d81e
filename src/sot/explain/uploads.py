"""Images from strangers."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from PIL import Image

from sot.data.pictures import open_picture

MAX_PIXELS = 50_000_000  # 150 MB decoded


def open_upload(source: Path | BinaryIO, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open an image as training reads it; ValueError says what is wrong, its size before decoding."""
    return open_picture(source, max_pixels)
