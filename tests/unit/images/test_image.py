"""Images that can be decoded, and files that cannot, are animated, too large or no image."""

import contextlib
import hashlib
import struct
import zlib
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_helpers import data_url, image_file, make_image
from PIL import Image as pillow

from raylight.config import EngineConfig
from raylight.errors import ImageError
from raylight.images.image import LIMITS, ImageLimits, read_data_url, read_image


def several_frames(form: str, **save: Any) -> bytes:
    buffer = BytesIO()
    frames = [pillow.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(buffer, form, save_all=True, append_images=frames[1:], **save)
    return buffer.getvalue()


def png_file(width: int, height: int, data: bytes = b"x", bits: int = 8) -> bytes:
    """Return a file in colors. One without its own data is small, and promises many pixels."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)),
        (b"IDAT", data),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_format_is_read(form: str) -> None:
    data = image_file("red", (20, 10), form)
    image = read_image(data)
    assert (image.width, image.height) == (20, 10)
    assert image.media_type == f"image/{form.lower()}"
    assert image.sha256 == hashlib.sha256(data).hexdigest()
    assert image.open().mode == "RGB"
    assert read_data_url(image.data_url) == image


def test_gray_of_16_bits_is_refused() -> None:
    """Others of 16 bits, and gray of 8, keep their colors."""
    buffer = BytesIO()
    pillow.new("I;16", (8, 8), 20_000).save(buffer, "PNG")
    with pytest.raises(ImageError, match="16 bits a pixel; send 8"):
        read_image(buffer.getvalue())
    buffer = BytesIO()
    pillow.new("L", (8, 8), 78).save(buffer, "PNG")
    assert read_image(buffer.getvalue()).open().getpixel((0, 0)) == (78, 78, 78)
    rows = b"".join(b"\0" + struct.pack(">HHH", 20_000, 0, 65_535) * 8 for _ in range(8))
    image = read_image(png_file(8, 8, zlib.compress(rows), bits=16))
    assert image.open().getpixel((0, 0)) == (78, 0, 255)


def test_a_jpeg_with_further_pictures_is_its_first_one() -> None:
    data = several_frames("MPO")
    assert read_image(data).media_type == "image/jpeg"
    assert read_image(data).open().getpixel((0, 0))[0] > 200


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animated_image_is_refused(form: str) -> None:
    with pytest.raises(ImageError, match="animated"):
        read_image(several_frames(form))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_truncated_file_is_refused(form: str) -> None:
    noise = pillow.effect_noise((64, 64), 90).convert("RGB")
    buffer = BytesIO()
    noise.save(buffer, form)
    with pytest.raises(ImageError, match=r"cannot be decoded|not a PNG"):
        read_image(buffer.getvalue()[: len(buffer.getvalue()) // 2])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a PNG"),
        (b"%PDF-1.7", "not a PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a PNG"),
        (image_file(form="BMP"), "not a PNG"),
        (image_file(form="TIFF"), "not a PNG"),
        (png_file(60_000, 60_000), "pixels"),
        (png_file(9000, 9000), "pixels"),
        (png_file(100, 100), "cannot be decoded"),
        (image_file(size=(1, 201)), "times the other"),
    ],
)
def test_a_bad_file_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        read_image(data, LIMITS)


def test_limits_hold() -> None:
    data = image_file(size=(30, 30))
    with pytest.raises(ImageError, match="bytes"):
        read_image(data, ImageLimits(max_bytes=len(data) - 1))
    with pytest.raises(ImageError, match="30 x 30"):
        read_image(data, ImageLimits(max_pixels=899))
    url = data_url(data)
    assert read_data_url(url).width == 30
    with pytest.raises(ImageError, match="30 x 30"):
        read_data_url(url, ImageLimits(max_pixels=899))


def test_the_largest_limit_is_pillows() -> None:
    assert pillow.MAX_IMAGE_PIXELS is not None
    largest = 2 * pillow.MAX_IMAGE_PIXELS
    assert EngineConfig(max_image_pixels=largest).max_image_pixels == largest
    with pytest.raises(ValueError, match="max_image_pixels"):
        EngineConfig(max_image_pixels=largest + 1)
    with pytest.raises(ImageError, match=f"more than {largest} pixels, Pillow"):
        read_image(png_file(largest + 1, 1), ImageLimits(max_pixels=1))


def test_transparent_places_are_white() -> None:
    assert make_image((255, 0, 0, 0)).open().getpixel((0, 0)) == (255, 255, 255)
    assert make_image((255, 0, 0, 255)).open().getpixel((0, 0)) == (255, 0, 0)


def test_the_transparent_color_of_a_file_in_rgb_is_this_color() -> None:
    """As in vLLM, whose engines would see another image than the learner."""
    buffer = BytesIO()
    pillow.new("RGB", (8, 8), (10, 20, 30)).save(buffer, "PNG", transparency=(10, 20, 30))
    assert read_image(buffer.getvalue()).open().getpixel((0, 0)) == (10, 20, 30)


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_exif_data_that_cannot_be_read_turn_nothing(form: str) -> None:
    data = image_file("red", (20, 10), form, exif=b"Exif\0\0no header of TIFF", lossless=True)
    assert read_image(data).open().tobytes() == make_image("red", (20, 10)).open().tobytes()


def test_the_orientation_of_a_photo_counts() -> None:
    exif = pillow.Exif()
    exif[0x0112] = 6
    image = read_image(image_file("red", (20, 10), "JPEG", exif=exif))
    assert image.open().size == (10, 20)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "data:image/png;base64",
        "data:image/png,abc",
        "data:text/plain;base64,aGFsbG8=",
        "data:image/png;base64,a b c",
        "data:image/png;base64,\ud800",
        "https://example.com/a.png",
        "raylight-image:" + "0" * 64,
    ],
)
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ImageError):
        read_data_url(url)


@given(st.binary(max_size=200), st.integers(0, 80))
def test_damaged_bytes_raise_nothing_else(noise: bytes, place: int) -> None:
    data = image_file()
    damaged = data[:place] + noise + data[place + len(noise) :]
    with contextlib.suppress(ImageError):
        read_image(damaged)
