"""Files of a task on their way into a sandbox, and paths of a sandbox without a file system of its own."""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

from raylight.errors import SandboxError
from raylight.sandboxes.sandbox import Sandbox

TEST_FOLDERS = ("/tests", "/logs", "/solution")
"""Folders that the format puts at the root of the file system."""


class PathMap:
    """Absolute paths of a task in a sandbox.

    A sandbox of plain processes shares the machine's file system, so `/tests` of a task is the folder `tests`
    of its workspace, and texts that name `/tests` have to name that one.

    Args:
        root: `Sandbox.root`.
        folders: absolute paths that the texts may name.
    """

    def __init__(self, root: str, folders: Iterable[str]) -> None:
        self._root = root.rstrip("/")
        tops = {posixpath.join("/", path.lstrip("/").split("/")[0]) for path in folders} - {"/"}
        names = "|".join(re.escape(top) for top in sorted(tops, reverse=True))
        # a path begins after a space, a quotation mark or an operator, and not within another path
        self._pattern = re.compile(rf"(?<![\w./~$}}-])({names})(?![\w.-])") if names else None

    def path(self, absolute: str) -> str:
        """Return the place of an absolute path."""
        return f"{self._root}{absolute}" if self._root else absolute

    def text(self, text: str) -> str:
        """Return a text in which the paths are those of the sandbox."""
        if not self._root or self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._root + match[1], text)

    def content(self, content: bytes) -> bytes:
        """Return the content of a file in which the paths are those of the sandbox; a binary one as it is."""
        try:
            return self.text(content.decode()).encode()
        except UnicodeDecodeError:
            return content


def files_in(folder: Path) -> list[Path]:
    """Return all files of a folder.

    Raises:
        SandboxError: a link leads out of the folder.
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for file in files:
        if not file.resolve().is_relative_to(folder.resolve()):
            raise SandboxError(f"{file} leads out of {folder}; replace the link by the file")
    return files


async def copy_folder(sandbox: Sandbox, folder: Path, target: str, paths: PathMap) -> None:
    """Copy a folder's files into a sandbox; those that can be executed stay so.

    Raises:
        SandboxError: a file cannot be read, or a link leads out of the folder.
    """
    for file in files_in(folder):
        place = posixpath.join(target, file.relative_to(folder).as_posix())
        await copy_file(sandbox, file, place, paths)


async def copy_file(sandbox: Sandbox, file: Path, place: str, paths: PathMap) -> None:
    """Copy one file to an absolute path of the task."""
    try:
        content = await asyncio.to_thread(file.read_bytes)
    except OSError as error:
        raise SandboxError(f"a file of the task cannot be read: {error}") from None
    executable = os.access(file, os.X_OK) or file.suffix == ".sh"
    await sandbox.write(paths.path(place), paths.content(content), executable=executable)
