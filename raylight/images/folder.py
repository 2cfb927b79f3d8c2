"""Folder of image files, each under its digest."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from raylight._utils.files import PARTIAL, read_bounded, write_atomic
from raylight.errors import ImageError

MAX_FILE = 2**30
"""Largest file that is read; a stranger may have made the folder."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ImageFolder:
    """Image files by their sha256 digests. One process at a time writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._writing = threading.Lock()

    def write(self, images: Mapping[str, bytes]) -> None:
        """Write files, which are on the disk afterwards. Those that are there stay.

        Raises:
            ImageError: a file has another digest than its name.
        """
        for sha256, data in images.items():
            path = self._path(sha256)
            if path.exists():
                continue
            if hashlib.sha256(data).hexdigest() != sha256:
                raise ImageError(f"the image {sha256} has another digest: it was damaged on its way")
            with self._writing:
                self.path.mkdir(parents=True, exist_ok=True)
                write_atomic(path, data)

    def read(self, digests: Iterable[str]) -> dict[str, bytes]:
        """Return files by their digests.

        Raises:
            ImageError: one is missing or damaged, or no digest.
        """
        return {sha256: self._read(sha256) for sha256 in digests}

    def clear(self) -> None:
        """Remove all images, and the folder if it has nothing else."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if _DIGEST.fullmatch(path.name.removesuffix(PARTIAL)):
                path.unlink()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _read(self, sha256: str) -> bytes:
        path = self._path(sha256)
        try:
            data = read_bounded(path, MAX_FILE)
        except FileNotFoundError:
            raise ImageError(
                f"{self.path} has no image {sha256}; copy the folder together with the store's file"
            ) from None
        except OSError as error:
            raise ImageError(f"{path} cannot be read: {error}; use a copy of the folder") from None
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ImageError(f"{path} is damaged: its digest is not its name; use a copy of the folder")
        return data

    def _path(self, sha256: str) -> Path:
        if not _DIGEST.fullmatch(sha256):
            raise ImageError(f"{sha256[:80]!r} is not a sha256 digest in lower-case hexadecimal digits")
        return self.path / sha256
