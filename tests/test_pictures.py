"""How an image is opened: turned as its EXIF says, 16 bits scaled, and what is refused."""

import io

import numpy as np
import pytest
from PIL import Image

from sot.data.pictures import open_picture
from sot.data.sources import Pictures


def stored(picture, kind="PNG", **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    file.seek(0)
    return file


def turned(orientation):
    exif = Image.Exif()
    exif[274] = orientation
    return exif


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_a_picture_is_turned_as_its_exif_says(kind):
    picture = Image.fromarray(np.linspace(0, 255, 20 * 30, dtype=np.uint8).reshape(20, 30)).convert("RGB")
    found = open_picture(stored(picture, kind, exif=turned(6)))
    assert found.mode == "RGB" and found.size == (20, 30)
    expected = np.asarray(picture.transpose(Image.Transpose.ROTATE_270), dtype=int)
    assert np.abs(np.asarray(found, dtype=int) - expected).max() < 20


def test_pictures_of_a_data_set_are_turned_once():
    opened = Image.open(stored(Image.new("RGB", (30, 20)), "JPEG", exif=turned(6)))
    for _ in range(2):
        assert Pictures([(opened, 1)])[0][0].size == (20, 30)


def test_damaged_exif_leaves_the_picture_as_it_is():
    for exif in (b"no such thing", b"MM\x00*\x00\x00"):
        assert open_picture(stored(Image.new("RGB", (30, 20)), exif=b"Exif\x00\x00" + exif)).size == (30, 20)


@pytest.mark.parametrize("kind, dtype", [("PNG", "<u2"), ("TIFF", "<u2"), ("TIFF", ">u2"), ("TIFF", "<i4")])
def test_sixteen_bits_become_eight(kind, dtype):
    values = np.array([[0, 257, 25700, 65535]], dtype)
    found = open_picture(stored(Image.fromarray(values), kind, exif=turned(3)))
    assert np.asarray(found)[0, :, 1].tolist() == [255, 100, 1, 0]  # turned, too


@pytest.mark.parametrize(
    "values, message",
    [
        (np.zeros((2, 2), np.float32), "its pixels are floating-point numbers; accepted: whole numbers of 8 or"),
        (np.full((2, 2), 70000, np.int32), "its pixels go from 70000 to 70000; accepted: 0 to 65535"),
    ],
)
def test_pixels_of_no_known_range_are_refused(values, message):
    with pytest.raises(ValueError, match=f"^cannot read the image: {message}"):
        open_picture(stored(Image.fromarray(values), "TIFF"))


def test_what_is_no_picture_is_refused_by_name(tmp_path):
    for name, content, message in (
        ("a.png", b"nothing", "^cannot read a.png: it is no image that can be read$"),
        ("b.png", stored(Image.new("RGB", (200, 200))).read()[:80], "^cannot read b.png: "),
    ):
        (tmp_path / name).write_bytes(content)
        for source in (tmp_path / name, str(tmp_path / name)):
            with pytest.raises(ValueError, match=message):
                open_picture(source)
    with pytest.raises(FileNotFoundError, match=r"no such image: .*c\.png"):
        open_picture(tmp_path / "c.png")
    with pytest.raises(ValueError, match="it has 30×20 pixels, and at most 500 are accepted"):
        open_picture(stored(Image.new("RGB", (30, 20))), max_pixels=500)
