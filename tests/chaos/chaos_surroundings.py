"""A small disk, for faults outside a run's processes."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

DISK_BYTES = 64 * 2**20


class SmallDisk:
    """A disk of its own for a run directory; needs root.

    Args:
        folder: empty folder at which the disk is mounted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._filler = folder / "filler"

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """Mount the disk until the block ends; the run directory then remains as a copy."""
        self._folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self._folder)]
        subprocess.run(command, check=True, capture_output=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(self._folder)], check=True, capture_output=True)

    def fill(self) -> None:
        """Write until no byte is left."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\0" * 65536):
                pass

    def free(self) -> None:
        """Make room again."""
        self._filler.unlink()
