"""Images among the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PlacedImage(NamedTuple):
    """An image, and the tokens that stand for it in a prompt."""

    sha256: str
    """Digest of the image's file, in hexadecimal digits. The run keeps the file under this name."""
    start: int
    """Index of its first token."""
    stop: int
    """Index after its last token."""


def compared_ids(ids: NDArray[np.int32], images: Iterable[PlacedImage]) -> NDArray[np.int32]:
    """Return token ids by which two prompts are compared: equal only where the images are equal too.

    The tokens that stand for an image are the same for every image. They become a negative number that
    depends on its digest, and its first token another one: an image of two tokens is not twice an image.

    Args:
        ids: int32 of shape (tokens,).
        images: images among these tokens; of one that is cut off at the end, what is left.
    """
    places = list(images)
    if not places:
        return ids
    compared = ids.copy()
    for image in places:
        number = 2 * (int(image.sha256[:8], 16) % 2**30)
        compared[image.start : image.stop] = -2 - number
        compared[image.start : image.start + 1] = -1 - number
    return compared
