"""One way to open an image, for training and prediction alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sot.errors import PictureError
from sot.files import one_line

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # others call programs, or are read by nobody
PICTURE_SUFFIXES = frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS)
MAX_PIXELS = 178_956_970  # where Pillow stops by itself: 540 MB decoded
MAX_RATIO = 200  # of the sides: the shorter is enlarged to the model's, and the longer as many times


def open_picture(source: str | Path | BinaryIO, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image in a file as `to_rgb` has it, or ValueError saying what is wrong; too large ones are not decoded."""
    return _open(source, max_pixels, to_rgb)


def check_file(name: str) -> None:
    """Raise as `open_picture` does for a file that is no image, without decoding it; names of no files are passed."""
    if Path(name).is_file():
        _open(name, MAX_PIXELS, lambda picture: picture)


def _open(source: str | Path | BinaryIO, max_pixels: int, read: Callable[[Image.Image], Image.Image]) -> Image.Image:
    file = Path(source) if isinstance(source, str | Path) else None
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"no such image: {file}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of sizes below the limit and of damaged notes in the file
            with Image.open(source, formats=FORMATS) as picture:
                width, height = picture.size
                if width * height > max_pixels:
                    raise ValueError(f"it has {width}×{height} pixels, and at most {max_pixels:,} are accepted")
                if max(width, height) > MAX_RATIO * min(width, height):
                    raise ValueError(
                        f"it has {width}×{height} pixels, and sides of at most {MAX_RATIO} to 1 are accepted"
                    )
                return read(picture)
    except Exception as error:  # the libraries behind these formats raise nearly anything for a damaged file
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "it is no image that can be read" if unknown else one_line(error)
        raise PictureError("the image" if file is None else file.name, reason) from error


def to_rgb(picture: Image.Image) -> Image.Image:
    """An image in RGB, turned as its EXIF says and with 16 bits scaled to 8, which Pillow alone would cut off."""
    picture.load()
    with suppress(Exception):  # damaged EXIF, which raises nearly anything: the image is taken as it is
        picture = ImageOps.exif_transpose(picture)
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers; accepted: whole numbers of 8 or 16 bits")
    if picture.mode.startswith("I"):
        values = np.asarray(picture)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"its pixels go from {values.min()} to {values.max()}; accepted: 0 to 65535")
        picture = Image.fromarray(np.round(values / 257).astype(np.uint8))
    return picture.convert("RGB")
