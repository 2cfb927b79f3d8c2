"""Files of a rollout, from its task, a folder or a function, written into a sandbox in one transfer."""

from __future__ import annotations

import asyncio
import io
import os
import posixpath
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from raylight.errors import CommandError
from raylight.sandboxes.sandbox import Sandbox

FileTree = str | os.PathLike[str] | Mapping[str, str | bytes]
"""A folder, whose content is copied, or contents by their relative paths."""
FileSource = FileTree | Callable[[Any], FileTree | None]
MAX_FILES_BYTES = 256 * 1024 * 1024
"""Largest content of a rollout's files, which passes through the runner's memory."""


class FileBundle:
    """Files for a sandbox, collected as an archive. Later ones replace earlier ones of the same path."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._archive = tarfile.TarFile(fileobj=self._buffer, mode="w", format=tarfile.PAX_FORMAT)

    def add_folder(self, folder: str) -> None:
        """Add an empty folder."""
        self._put(tarfile.TarInfo(folder.lstrip("/")), None)

    def add(self, tree: FileTree | None, folder: str) -> None:
        """Add a tree below a folder.

        Raises:
            CommandError: a file is not there, leaves the folder or is of a wrong type, or they are too large.
        """
        base = PurePosixPath(folder.lstrip("/"))
        if isinstance(tree, Mapping):
            for name, content in tree.items():
                self._put(tarfile.TarInfo(str(base / _relative(name))), _as_bytes(name, content))
        elif isinstance(tree, str | os.PathLike):
            self._add_tree(Path(tree).expanduser(), base)
        elif tree is not None:
            raise CommandError(
                f"files is {tree!r:.80}; give a folder, a dict of paths and their contents, or a function of "
                "the task that returns one"
            )

    async def extract(self, sandbox: Sandbox, target: str) -> None:
        """Write all files below a folder of the sandbox.

        Raises:
            CommandError: the sandbox cannot unpack them.
        """
        self._archive.close()
        command = ["tar", "-x", "-o", "-f", "-", "-C", target]
        ended = await sandbox.exec(command, stdin=self._buffer.getvalue())
        if ended.status != 0:
            raise CommandError(
                f"the files of a rollout cannot be written to {target} in its sandbox: "
                f"{ended.stderr.strip()[-300:] or f'tar ended with status {ended.status}'}; the sandbox "
                "needs the program tar, and space for the files"
            )

    def _add_tree(self, folder: Path, base: PurePosixPath) -> None:
        if not folder.is_dir():
            raise CommandError(
                f"the folder of files {folder} is not there; create it on every machine with runners, or "
                "correct CommandAgent(files=...)"
            )
        for path in sorted(folder.rglob("*")):
            name = str(base / path.relative_to(folder).as_posix())
            info = self._archive.gettarinfo(path, name)
            if info is None:  # a socket, which no archive holds
                continue
            if not info.isreg():
                self._put(info, None)
                continue
            self._check_size(info.size)
            self._put(info, path.read_bytes())

    def _put(self, info: tarfile.TarInfo, content: bytes | None) -> None:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        if content is None:
            if info.isreg():
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            self._archive.addfile(info)
            return
        self._check_size(len(content))
        info.size, info.type = len(content), tarfile.REGTYPE
        if content.startswith(b"#!"):
            info.mode |= 0o755
        self._archive.addfile(info, io.BytesIO(content))

    def _check_size(self, further: int) -> None:
        if self._buffer.tell() + further > MAX_FILES_BYTES:
            raise CommandError(
                f"the files of a rollout have more than {MAX_FILES_BYTES >> 20} MiB; put large ones into the "
                "sandbox's image"
            )


async def bundle_files(
    trees: Sequence[tuple[str, FileTree | None]], *, folders: Sequence[str] = ()
) -> FileBundle:
    """Collect trees, in a thread.

    Args:
        trees: the folder that each goes to, and the tree.
        folders: folders that are made also if nothing goes there.

    Raises:
        CommandError: as `FileBundle.add`.
    """

    def collect() -> FileBundle:
        bundle = FileBundle()
        for folder in folders:
            bundle.add_folder(folder)
        for folder, tree in trees:
            bundle.add(tree, folder)
        return bundle

    return await asyncio.to_thread(collect)


def resolve_files(source: FileSource | None, task: Any) -> FileTree | None:
    """Return the files for a task."""
    return source(task) if callable(source) else source


def _relative(name: str) -> PurePosixPath:
    if not isinstance(name, str) or not name or name.startswith("/"):
        raise CommandError(f"the file {name!r:.80} of a task needs a path relative to the workspace")
    normal = posixpath.normpath(name)
    if normal == ".." or normal.startswith("../"):
        raise CommandError(f"the file {name!r:.80} of a task leaves the workspace; give a path inside it")
    return PurePosixPath(normal)


def _as_bytes(name: str, content: Any) -> bytes:
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, bytes):
        return content
    raise CommandError(f"the file {name!r} of a task is of type {type(content).__name__}; give text or bytes")
