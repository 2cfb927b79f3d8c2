"""Temporary folders of sandboxes on this machine, and the removal of those whose process was killed.

Next to each folder is a file that its process holds locked. The kernel releases the lock however the
process ends, so a folder with a free lock has been abandoned, even in a container that shares the files.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

PREFIX = "raylight-sandbox-"
_swept: set[str] = set()
"""Folders for temporary files from which this process has removed what killed processes left."""


class SandboxFolder:
    """A new temporary folder, which belongs to this process.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        os.stat(parent)  # a lock would make it
        if parent not in _swept:
            _swept.add(parent)
            for path in abandoned_folders():
                with _logged_errors():
                    remove_abandoned(path)
        self.path = os.path.join(parent, PREFIX + secrets.token_hex(4))
        self._lock = _lock_of(self.path)
        self._lock.acquire()  # before there is a folder, so that no folder is ever without a lock
        try:
            os.mkdir(self.path, 0o700)
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the folder. A warning is logged if a part of it cannot be removed."""
        with _logged_errors():
            _remove_locked(self.path, self._lock)


def abandoned_folders() -> Iterator[str]:
    """Yield the folders of this user whose process has ended."""
    for file in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*.lock")):
        path = str(file.with_suffix(""))
        with contextlib.suppress(OSError, Timeout):  # removed meanwhile, or in use
            if file.lstat().st_uid == os.getuid():
                with _lock_of(path).acquire(blocking=False):
                    pass
                yield path


def remove_abandoned(path: str) -> None:
    """Remove a folder of `abandoned_folders`, unless another process does it at this moment.

    Raises:
        OSError: a part of it cannot be removed.
    """
    lock = _lock_of(path)
    with contextlib.suppress(Timeout):
        lock.acquire(blocking=False)
        _remove_locked(path, lock)


def _remove_locked(folder: str, lock: FileLock) -> None:
    """Remove a folder, also the parts that were made read-only, then the file of its lock, and release it.

    Raises:
        OSError: a part cannot be removed, such as one of another user. The file of the lock remains, so that
            the folder is found again.
    """
    try:
        if os.path.lexists(folder):
            _remove_tree(folder)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(lock.lock_file)
    finally:
        lock.release()


def _remove_tree(folder: str) -> None:
    """Remove a folder, however deep its parts are nested: each is moved to the top before it is emptied, so
    that no path is longer than the system takes.

    Raises:
        OSError: a part cannot be removed.
    """
    places = (os.path.join(folder, f"{secrets.token_hex(8)}-{number}") for number in itertools.count())
    found, reasons = [folder], list[str | None]()
    while found:
        path = found.pop()
        try:
            with os.scandir(path) as scanned:
                entries = list(scanned)
        except OSError as error:
            reasons.append(error.strerror)
            continue
        for entry in entries:
            try:
                found += _remove_or_move(entry, next(places))
            except OSError as error:
                reasons.append(error.strerror)
        if path != folder:
            with contextlib.suppress(OSError):  # one of its entries stays, for a reason that is known
                os.rmdir(path)
    try:
        os.rmdir(folder)
    except OSError as error:
        reasons.append(error.strerror)
    if reasons:
        raise OSError(
            f"a part of {folder} cannot be removed ({reasons[0]}); ask its owner or root to remove it"
        )


def _remove_or_move(entry: os.DirEntry[str], place: str) -> list[str]:
    """Remove an entry of a folder, or move it to a place if it is a folder; return the places to empty."""
    if not entry.is_dir(follow_symlinks=False):
        os.unlink(entry.path)
        return []
    try:
        os.chmod(entry.path, 0o700)
        os.rename(entry.path, place)
        return [place]
    except PermissionError:  # a folder of another user can be removed if it is empty
        os.rmdir(entry.path)
        return []


def _lock_of(path: str) -> FileLock:
    return FileLock(f"{path}.lock", thread_local=False)


@contextlib.contextmanager
def _logged_errors() -> Iterator[None]:
    """Context that logs an OSError instead of raising it."""
    try:
        yield
    except OSError as error:
        logger.warning("the folder of a sandbox remains: %s", error)
