"""Pictures from strangers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from sot.data.sources import FORMATS

MAX_PIXELS = 50_000_000  # 150 MB decoded


def open_picture(source: Path | BinaryIO, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """A picture in RGB, or ValueError saying what is wrong; its size is looked at before it is decoded."""
    name = source.name if isinstance(source, Path) else "the picture"
    if isinstance(source, Path) and not source.is_file():
        raise FileNotFoundError(f"no such picture: {source}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is lower
            with Image.open(source, formats=FORMATS) as picture:
                width, height = picture.size
                if width * height > max_pixels:
                    raise ValueError(f"it has {width}×{height} pixels, and at most {max_pixels:,} are accepted")
                return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = "it is no picture that can be read" if "BytesIO" in str(error) or "identify" in str(error) else error
        raise ValueError(f"cannot read {name}: {reason}") from error
