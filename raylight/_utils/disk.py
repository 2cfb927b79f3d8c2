"""Errors of disks that are full, removed or read-only, recognized in the exceptions of all libraries."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from raylight.errors import DiskError, RaylightError

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENODEV})
"""Error numbers that are about a disk, whatever the path."""
PATH_ERRORS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM})
"""Error numbers that are about the disk of a run if the path is in the run's folder."""
DISK_TEXT = re.compile(
    r"no space left on device|disk quota exceeded|read-only file system|local disk is full", re.IGNORECASE
)
"""Texts of libraries that do not raise OSError: safetensors, and Ray's object store."""
RESUME = (
    "What was recorded before is kept: make room, or mount a read-only disk for writing, then continue the "
    "run with fit(resume='auto')"
)


@contextlib.contextmanager
def disk_errors(path: str | Path, remedy: str = RESUME) -> Iterator[None]:
    """Raise a DiskError for every exception of the block that is about the disk of a file or a folder.

    Args:
        remedy: last sentence of the message.

    Raises:
        DiskError: the disk is full, gone or read-only.
    """
    try:
        yield
    except RaylightError:
        raise
    except Exception as error:
        cause = find_disk_error(error, path)
        if cause is None:
            raise
        if type(cause).__name__ == "OutOfDiskError":  # of Ray's object store, which is elsewhere
            path = os.environ.get("RAY_TMPDIR", "/tmp/ray")
        raise disk_error(getattr(cause, "filename", None) or path, cause, remedy) from error


def disk_error(path: str | Path, cause: object, remedy: str = RESUME) -> DiskError:
    """Return the error for a path that cannot be written."""
    reason = getattr(cause, "strerror", None) or " ".join(str(cause).split())
    return DiskError(
        f"{path} cannot be written: {reason} (without unfinished files, {describe_space(path)}). {remedy}"
    )


def find_disk_error(error: BaseException, folder: str | Path) -> BaseException | None:
    """Return the exception that is about a disk, of an exception and its causes; None if there is none.

    Args:
        folder: folder of the run, whose removal or permissions count too.
    """
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        if isinstance(current, OSError):
            file = os.fsdecode(current.filename) if isinstance(current.filename, str | bytes) else ""
            is_inside = bool(file) and Path(file).absolute().is_relative_to(Path(folder).absolute())
            if current.errno in DISK_ERRORS or (current.errno in PATH_ERRORS and is_inside):
                return current
        elif DISK_TEXT.search(str(current)):
            return current
        current = current.__cause__ or current.__context__
    return None


def describe_space(path: str | Path) -> str:
    """Return the free space of the disk of a path, which need not exist."""
    existing = Path(path).absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        usage = shutil.disk_usage(existing)
    except OSError as error:
        return f"its disk cannot be read: {error.strerror}"
    return f"{usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB are free on its disk"
