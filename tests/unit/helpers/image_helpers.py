"""Small images for tests."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

from PIL import Image as pillow

from raylight.images.image import Image, read_image


def image_file(color: Any = "red", size: tuple[int, int] = (32, 32), form: str = "PNG", **save: Any) -> bytes:
    """Return the file of an image in one color."""
    buffer = BytesIO()
    mode = "RGBA" if isinstance(color, tuple) and len(color) == 4 else "RGB"
    pillow.new(mode, size, color).save(buffer, form, **save)
    return buffer.getvalue()


def make_image(color: Any = "red", size: tuple[int, int] = (32, 32), form: str = "PNG") -> Image:
    return read_image(image_file(color, size, form))


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
