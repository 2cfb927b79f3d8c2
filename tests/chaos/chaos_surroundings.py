"""A small disk and a wall clock that can be set, for faults outside a run's processes."""

from __future__ import annotations

import contextlib
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

DISK_BYTES = 64 * 2**20
CLOCK_SOURCE = Path(__file__).with_name("chaos_clock.c")


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


class WallClock:
    """A wall clock of one run, Ray's own programs included; needs a C compiler.

    Args:
        folder: folder of the test, for the library that is preloaded and the file with the clock's error.
    """

    def __init__(self, folder: Path) -> None:
        library, self._error = folder / "clock.so", folder / "clock_error"
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(CLOCK_SOURCE), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        self._seconds = 0
        self._error.write_bytes(struct.pack("l", 0))
        self.environment = {"LD_PRELOAD": str(library), "RAYLIGHT_CHAOS_CLOCK": str(self._error)}

    def move(self, seconds: int) -> None:
        """Set the clock forward, or back."""
        self._seconds += seconds
        with self._error.open("r+b", buffering=0) as file:
            file.write(struct.pack("l", self._seconds))
