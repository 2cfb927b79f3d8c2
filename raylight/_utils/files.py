"""Atomic writes: after a crash a file or a folder has its old content or its new content, never a part of
either.

Content goes to a temporary name in the same folder and is flushed to the disk before it is renamed. The
temporary name is fixed (`NAME.partial`), so that the next write removes what a killed one left. One process
at a time writes to a path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

PARTIAL = ".partial"
"""Suffix of a file or a folder that is being written."""
OLD = ".old"
"""Suffix of a folder that is being replaced."""


def read_table(file: Path) -> Any:
    """Return the content of a YAML file of the package."""
    import yaml

    return yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_bounded(path: str | Path, max_bytes: int) -> bytes:
    """Return the content of a file that a stranger may have made.

    Raises:
        OSError: it is not there, no regular file (a pipe would wait for its writer), or larger.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"{path} is larger than {max_bytes} bytes")
    return content


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a binary file that replaces `path` when the block ends, and is removed if the block raises."""
    partial = Path(f"{path}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(partial.parent)


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Replace the content of a file; text is encoded as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """Yield a new, empty folder that replaces `folder` when the block ends, and is removed if the block
    raises."""
    with _partial_folder(Path(folder)) as partial:
        yield partial
        _sync_tree(partial)
        replace_folder(partial, Path(folder))


@contextlib.contextmanager
def atomic_files(folder: str | Path) -> Iterator[Path]:
    """Yield a new, empty folder whose files move to `folder` when the block ends.

    Each file replaces its namesake; other files stay. If the block raises, `folder` is unchanged.
    """
    folder = Path(folder)
    with _partial_folder(folder) as partial:
        yield partial
        _sync_tree(partial)
        folder.mkdir(parents=True, exist_ok=True)
        for file in partial.iterdir():
            os.replace(file, folder / file.name)
        sync_folder(folder)


def replace_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`, whose content is removed.

    No system call exchanges two folders portably, so this takes two renames. A crash between them leaves the
    old content in `NAME.old`; `restore_folder` renames it back.
    """
    restore_folder(folder)
    old = Path(f"{folder}{OLD}")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_folder(folder: Path) -> None:
    """Undo a `replace_folder` that was interrupted between its two renames."""
    old = Path(f"{folder}{OLD}")
    if old.exists() and not folder.exists():
        os.replace(old, folder)


def sync_folder(folder: str | Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _partial_folder(folder: Path) -> Iterator[Path]:
    """Yield a new, empty folder next to `folder`, and remove it at the end."""
    partial = Path(f"{folder}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync_tree(root: Path) -> None:
    """Flush every file below a folder, and their names, to the disk."""
    for folder, _, names in os.walk(root):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(folder)
