"""Images in the content of chat messages.

A recorded message has an image's digest in place of its URL: the bytes are kept once, under the digest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from raylight.types import JsonObject

_RECORDED = re.compile(r"raylight-image:([0-9a-f]{64})")


def recorded_url(sha256: str) -> str:
    return f"raylight-image:{sha256}"


def recorded_digest(url: object) -> str | None:
    """Return the digest of an image from its URL in a recorded message; None for another URL."""
    match = _RECORDED.fullmatch(url) if isinstance(url, str) else None
    return match[1] if match else None


def image_url_of(part: object) -> str | None:
    """Return the URL of a part of a message's content; None if it is not an image."""
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return None
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    return url if isinstance(url, str) else None


def image_urls(messages: object) -> Iterator[tuple[str, str]]:
    """Yield the path of each image, such as `messages[1].content[0]`, and its URL, in their order."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if (url := image_url_of(part)) is not None:
                yield f"messages[{index}].content[{place}]", url


def recorded_images(value: object) -> Iterator[str]:
    """Yield the digests of the images anywhere in recorded messages."""
    if isinstance(value, dict):
        if (sha256 := recorded_digest(image_url_of(value))) is not None:
            yield sha256
        else:
            for entry in value.values():
                yield from recorded_images(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from recorded_images(entry)


def inline_images(value: object, urls: Mapping[str, str]) -> object:
    """Return recorded messages, wherever they are in a JSON value, with other URLs of their images.

    Args:
        urls: URL of each image, by digest.
    """
    if isinstance(value, list):
        return [inline_images(entry, urls) for entry in value]
    if not isinstance(value, dict):
        return value
    if (sha256 := recorded_digest(image_url_of(value))) is not None:
        return value | {"image_url": _with_url(value, urls[sha256])}
    return {name: inline_images(entry, urls) for name, entry in value.items()}


def replace_urls(messages: Sequence[object], replace: Callable[[str], str]) -> list[object]:
    """Return messages with other URLs of their images; those with text content are the same objects."""
    return [_replace(message, replace) for message in messages]


def _replace(message: Any, replace: Callable[[str], str]) -> object:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    parts = [
        part if (url := image_url_of(part)) is None else part | {"image_url": _with_url(part, replace(url))}
        for part in content
    ]
    return message | {"content": parts}


def _with_url(part: JsonObject, url: str) -> JsonObject:
    image = part["image_url"]
    return (image if isinstance(image, dict) else {}) | {"url": url}
