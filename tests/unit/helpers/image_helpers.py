"""Small images for tests."""

import base64
import random
from io import BytesIO
from typing import Any

from PIL import Image as pillow
from PIL import ImageOps

from raylight.images.image import Image, read_image


def image_file(color: Any = "red", size: tuple[int, int] = (32, 32), form: str = "PNG", **save: Any) -> bytes:
    """Return the file of an image: noise, so that other pixels, or the same in another order, show.

    Args:
        color: the noise's seed; with four channels, the only color.
    """
    if isinstance(color, tuple) and len(color) == 4:
        return _save(pillow.new("RGBA", size, color), form, **save)
    noise = random.Random(repr(color)).randbytes(3 * size[0] * size[1])
    return _save(pillow.frombytes("RGB", size, noise), form, **save)


def make_image(color: Any = "red", size: tuple[int, int] = (32, 32), form: str = "PNG") -> Image:
    return read_image(image_file(color, size, form))


def mirror(image: Image) -> Image:
    """Return the image with left and right swapped."""
    return read_image(_save(ImageOps.mirror(image.open()), "PNG"))


def _save(image: pillow.Image, form: str, **save: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, form, **save)
    return buffer.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
