"""A small disk and a wall clock that can be set, for faults outside a run's processes."""

import contextlib
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ray_cluster import eventually

DISK_BYTES = 64 * 2**20
REPAIR_S = 75.0
"""Longest wait until no process of the run uses its disk, in seconds."""
CLOCK_SOURCE = Path(__file__).with_name("chaos_clock.c")


class SmallDisk:
    """A separate disk for a run directory; needs root.

    Args:
        folder: empty folder at which the disk is mounted.
        image: file for the disk, which can fail then; also needs loop devices. None: a disk in memory.
    """

    def __init__(self, folder: Path, image: Path | None = None) -> None:
        self._folder, self._image = folder, image
        self._filler = folder / "filler"

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """Mount the disk until the block ends."""
        self._folder.mkdir(exist_ok=True)
        if self._image is not None:
            with self._image.open("wb") as file:
                file.truncate(DISK_BYTES)
            _run("mkfs.ext4", "-q", "-m", "0", "-E", "root_owner=0:0", str(self._image))
        self._mount()
        try:
            yield
        finally:
            _run("umount", "-l", str(self._folder))

    def _mount(self) -> None:
        if self._image is None:
            _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self._folder))
        else:
            _run("mount", "-o", "loop,sync", str(self._image), str(self._folder))

    def fill(self) -> None:
        """Write until no byte is left."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\0" * 65536):
                pass

    def fail(self) -> None:
        """Make the disk read-only, as its driver does when a write fails."""
        _run("mount", "-o", "remount,abort", str(self._folder))

    def repair(self) -> None:
        """Make room again; mount a disk that failed again once nobody uses it."""
        if self._image is None:
            self._filler.unlink()
            return
        command = ["umount", str(self._folder)]
        eventually(lambda: subprocess.run(command).returncode == 0, REPAIR_S, "the end of its use")
        self._mount()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class WallClock:
    """A wall clock of one run, Ray's own programs included; needs a C compiler.

    Args:
        folder: folder of the test, for the library that is preloaded and the file with the clock's error.
    """

    def __init__(self, folder: Path) -> None:
        library, self._error = folder / "clock.so", folder / "clock_error"
        _run("cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(CLOCK_SOURCE), "-ldl")
        self._seconds = 0
        self._error.write_bytes(struct.pack("l", 0))
        self.environment = {"LD_PRELOAD": str(library), "RAYLIGHT_CHAOS_CLOCK": str(self._error)}

    def move(self, seconds: int) -> None:
        """Set the clock forward, or back."""
        self._seconds += seconds
        with self._error.open("r+b", buffering=0) as file:
            file.write(struct.pack("l", self._seconds))
