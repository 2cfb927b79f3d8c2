"""Images of requests, checked before anything keeps or decodes them."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import threading
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import TYPE_CHECKING

from cachetools import LRUCache

from raylight._utils.bounds import MAX_IMAGE_PIXELS
from raylight.errors import ImageError

if TYPE_CHECKING:
    import PIL.Image

MEDIA_TYPES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "MPO": "image/jpeg",  # a JPEG with further pictures, as phones write it; models get the first one
    "WEBP": "image/webp",
    "GIF": "image/gif",
}
"""Media type by Pillow's name of the format."""
MAX_ASPECT = 200
"""Largest ratio of width and height; Qwen's processors raise beyond it."""
SIGNATURES = {
    b"\x89PNG\r\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"RIFF": "image/webp",
    b"GIF8": "image/gif",
}
FORMATS = [form for form in MEDIA_TYPES if form != "MPO"]  # Pillow opens MPO as JPEG
CACHE_BYTES = 256 * 2**20
"""Size of the images that are kept by their URL, which is a third larger than the file, because an agent
sends images of earlier turns again."""


@dataclass(frozen=True)
class ImageLimits:
    """Limits of an image.

    Attributes:
        max_bytes: of its file.
        max_pixels: of width times height. A small file may have very many.
    """

    max_bytes: int = 20 * 2**20
    max_pixels: int = 8000 * 8000


LIMITS = ImageLimits()
CHECKED = ImageLimits(2**31, MAX_IMAGE_PIXELS)
"""Limits of an image that a run's gateway has accepted."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image that can be decoded, or that was left to an upstream model (see `unread_image`).

    Attributes:
        sha256: digest of the file, in hexadecimal digits.
        data: the file as sent.
        width: in pixels; 0 if the file was not read, as is `height`.
        sent_url: the URL in which it was sent, if it is a `data:` URL with the file's media type.
    """

    sha256: str
    data: bytes
    media_type: str
    width: int
    height: int
    sent_url: str | None = field(default=None, repr=False, compare=False)

    def open(self) -> PIL.Image.Image:
        """Return the decoded image in RGB: turned as its EXIF data says, on white where it is transparent.

        vLLM decodes images in the same way: the transparent color of a file in RGB stays this color.
        """
        from PIL import Image as pillow
        from PIL import ImageOps

        with pillow.open(BytesIO(self.data), formats=FORMATS) as opened:
            image: PIL.Image.Image = opened
            with contextlib.suppress(Exception):  # EXIF data that cannot be read turns nothing
                image = ImageOps.exif_transpose(opened)
            if image.mode == "RGB" or not image.has_transparency_data:
                return image.convert("RGB")
            layers = image.convert("RGBA")
        white = pillow.new("RGB", layers.size, "white")
        white.paste(layers, mask=layers.getchannel("A"))
        return white

    @property
    def data_url(self) -> str:
        """The file in a URL."""
        return self.sent_url or to_data_url(self.data, self.media_type)


def media_type_of(data: bytes) -> str | None:
    """Return the media type of a file by its first bytes; None if it is not an image."""
    return next((kind for start, kind in SIGNATURES.items() if data.startswith(start)), None)


def to_data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def read_image(data: bytes, limits: ImageLimits = CHECKED) -> Image:
    """Return the image of a file that a stranger may have made.

    Args:
        limits: by default, for an image that the gateway has checked.

    Raises:
        ImageError: it is not a single image of a known format within the limits, or not whole.
    """
    from PIL import Image as pillow

    if len(data) > limits.max_bytes:
        raise ImageError(f"the image has {len(data)} bytes, and at most {limits.max_bytes} are allowed")
    try:
        with pillow.open(BytesIO(data), formats=FORMATS) as image:
            _check_form(image, limits)
            image.load()
            media_type, (width, height) = MEDIA_TYPES[str(image.format)], image.size
    except ImageError:
        raise
    except pillow.UnidentifiedImageError:
        raise ImageError("the image is not a PNG, JPEG, WebP or GIF file; send one of these") from None
    except pillow.DecompressionBombError:
        raise ImageError(
            f"the image has more than {MAX_IMAGE_PIXELS} pixels, Pillow's limit; send a smaller one"
        ) from None
    except Exception as error:  # decoders raise errors of many types
        raise ImageError(f"the image cannot be decoded: {str(error)[:200]}") from None
    return Image(hashlib.sha256(data).hexdigest(), data, media_type, width, height)


def _check_form(image: PIL.Image.Image, limits: ImageLimits) -> None:
    """Check what the header of an image says.

    Raises:
        ImageError: it is too large or too narrow, it has several frames, or 16 bits a pixel.
    """
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageError(
            f"the image has {width} x {height} pixels, and at most {limits.max_pixels} are allowed; "
            "send a smaller one"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(
            f"the image has {width} x {height} pixels, and a side may be at most {MAX_ASPECT} times the other"
        )
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise ImageError("the image is animated; send a single frame")
    if image.mode.startswith(("I", "F")):  # Pillow's conversion to RGB makes values above 255 white
        raise ImageError("the image is gray and has 16 bits a pixel; send 8")


_cached: LRUCache[str, Image] = LRUCache(CACHE_BYTES, getsizeof=lambda image: len(image.data) * 7 // 3)
_lock = threading.Lock()


def kept_image(url: str, limits: ImageLimits = CHECKED) -> Image | None:
    """Return the image of a `data:` URL if it is among the latest ones that were read; None if not."""
    with _lock:
        image = _cached.get(url)
    if image is None or len(image.data) > limits.max_bytes or image.width * image.height > limits.max_pixels:
        return None
    return image


def read_data_url(url: str, limits: ImageLimits = CHECKED) -> Image:
    """Return the image of a `data:` URL. The latest ones are kept.

    Args:
        limits: by default, for an image that the gateway has checked.

    Raises:
        ImageError: it is not the URL of an image, or `read_image` raises it.
    """
    if (kept := kept_image(url, limits)) is not None:
        return kept
    image = read_image(_decode(url, limits), limits)
    if url.startswith(f"data:{image.media_type};base64,"):
        image = replace(image, sent_url=url)
    with _lock, contextlib.suppress(ValueError):  # larger than the cache
        _cached[url] = image
    return image


def unread_image(url: str) -> Image:
    """Return the image of a `data:` URL whose file is not read, because only an upstream model reads it.

    Raises:
        ImageError: it is not the URL of an image.
    """
    data = _decode(url, CHECKED)
    media_type = url.partition(";base64,")[0].removeprefix("data:")
    return Image(hashlib.sha256(data).hexdigest(), data, media_type, 0, 0)


def _decode(url: str, limits: ImageLimits) -> bytes:
    head, comma, encoded = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise ImageError(
            f"{url[:40]!r} is not a data URL of an image; send data:image/png;base64, and the file in base64"
        )
    if len(encoded) // 4 * 3 > limits.max_bytes + 3:
        raise ImageError(f"the image has more than {limits.max_bytes} bytes; send a smaller one")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the image is not valid base64: {error}") from None
