"""Files of a rollout, from its task, a folder, a function or another sandbox, written in one transfer."""

from __future__ import annotations

import asyncio
import io
import os
import posixpath
import signal
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
MAX_MEMBERS = 100_000
"""Most files of an archive that a program in a sandbox has made."""
MAX_ARCHIVE_BYTES = MAX_FILES_BYTES + MAX_MEMBERS * 1024
"""Largest archive: the files, and for each a header and the padding."""
PACK_TIMEOUT_S = 300.0
"""Seconds after which the packing of a sandbox's files is ended."""
WAY_OUT = (
    "put large ones into the sandbox's image, or let RewardCommand(sandbox=\"agent\") judge an agent's where "
    "they are"
)
TOO_LARGE = f"the files of a rollout have more than {MAX_FILES_BYTES >> 20} MiB; {WAY_OUT}"
ARCHIVE = ".raylight-files.tar"
PACK = """
rm -rf -- "$2"
(ulimit -f "$1") 2>/dev/null && ulimit -f "$1"
ulimit -c 0
tar -C "$3" -cf "$2" "$4"
exit $?
"""
"""Shell script that packs files. The limit, in blocks of 512 bytes, is on the archive, because a sparse file
is larger than its blocks. An agent may have put a link in the archive's place."""
REPLACE = 'mkdir -p -- "$1" && cd -- "$1" && rm -rf -- ./* ./.[!.]* ./..?* && cd / && shift && exec "$@"'
"""Shell script that makes a folder, or empties it, and runs a command."""


class FileBundle:
    """Files for a sandbox by their paths. A later one replaces earlier ones at and above its path."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
        self._size = 0

    def add_folder(self, folder: str) -> None:
        self._put(folder, tarfile.DIRTYPE, 0o755)

    def add(self, tree: FileTree | None, folder: str) -> None:
        """Add a tree below a folder.

        Raises:
            CommandError: a file is not there, leaves the folder or has the wrong type, or they are too large.
        """
        if isinstance(tree, Mapping):
            for name, content in tree.items():
                path = posixpath.join(folder, _relative(name))
                self._put(path, tarfile.REGTYPE, 0o644, content=_as_bytes(name, content))
        elif isinstance(tree, str | os.PathLike):
            self._add_tree(Path(tree).expanduser(), folder)
        elif tree is not None:
            raise CommandError(
                f"files is {tree!r:.80}; give a folder, a dict of paths and their contents, or a function of "
                "the task that returns one"
            )

    def add_archive(self, archive: bytes, folder: str, within: str = "") -> None:
        """Add the folders, files and links of a tar archive that a program in a sandbox has made.

        Nothing in it can leave its folder or pass through a link: what would is left out, and so are devices,
        pipes, owners and set-user bits.

        Args:
            archive: the archive, not compressed.
            folder: folder below which its paths are put.
            within: path in the archive; others are left out.

        Raises:
            CommandError: it is damaged, or has too many or too large files.
        """
        try:
            with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
                for count, info in enumerate(opened):
                    if count >= MAX_MEMBERS:
                        raise CommandError(f"{folder} of the agent has more than {MAX_MEMBERS:,} files")
                    self._take(opened, info, folder, within)
        except (tarfile.TarError, ValueError, OverflowError, RecursionError, OSError) as error:
            raise CommandError(f"the files of the agent in {folder} cannot be read: {error}") from None

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it, and the files and links above its path."""
        name = _name(path)
        within = [one for one in self._members if one == name or one.startswith(f"{name}/")]
        for found in (*within, *self._in_the_way(path)):
            self._remove_one(found)

    async def extract(self, sandbox: Sandbox, target: str, *, replaces: str | None = None) -> None:
        """Write all files below a folder of the sandbox.

        Args:
            replaces: folder that is made, or emptied if it exists.

        Raises:
            CommandError: the sandbox cannot unpack them.
        """
        command = ["tar", "-x", "-o", "-f", "-", "-C", target]
        if replaces is not None:
            command = ["sh", "-c", REPLACE, "sh", replaces, *command]
        ended = await sandbox.exec(command, cwd="/", stdin=await asyncio.to_thread(self._archive))
        if ended.status != 0:
            raise CommandError(
                f"the files of a rollout cannot be written to {target} in its sandbox: "
                f"{ended.stderr.strip()[-300:] or f'tar ended with status {ended.status}'}; the sandbox "
                "needs the program tar, and space for the files"
            )

    def _archive(self) -> bytes:
        buffer = io.BytesIO()
        with tarfile.TarFile(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for info, content in self._members.values():
                archive.addfile(info, io.BytesIO(content))
        return buffer.getvalue()

    def _add_tree(self, folder: Path, base: str) -> None:
        if not folder.is_dir():
            raise CommandError(
                f"the folder of files {folder} is not there; create it on every machine with runners, or "
                "correct CommandAgent(files=...)"
            )
        for path in sorted(folder.rglob("*")):
            stat, name = path.lstat(), posixpath.join(base, path.relative_to(folder).as_posix())
            if path.is_symlink():
                self._put(name, tarfile.SYMTYPE, stat.st_mode, stat.st_mtime, link=os.readlink(path))
            elif path.is_dir():
                self._put(name, tarfile.DIRTYPE, stat.st_mode, stat.st_mtime)
            elif path.is_file():  # no archive holds a socket
                self._check_size(stat.st_size)
                self._put(name, tarfile.REGTYPE, stat.st_mode, stat.st_mtime, path.read_bytes())

    def _take(self, opened: tarfile.TarFile, info: tarfile.TarInfo, folder: str, within: str) -> None:
        """Take a folder, file or link of an archive that is below `within`."""
        inner = posixpath.normpath(info.name)
        is_within = within == "" or f"{inner}/".startswith(f"{within}/")
        if not is_within or inner == ".." or inner.startswith(("/", "../")):
            return
        path = posixpath.join(folder, inner)
        if self._in_the_way(path) or (not info.isdir() and self._is_folder(_name(path))):
            return
        if info.issym():
            self._put(path, tarfile.SYMTYPE, info.mode, info.mtime, link=info.linkname)
        elif info.isdir():
            self._put(path, tarfile.DIRTYPE, info.mode, info.mtime)
        elif info.islnk():  # a second name of a file before it
            target = posixpath.join(folder, posixpath.normpath(info.linkname))
            first, content = self._members.get(_name(target), (None, b""))
            if first is not None and first.isreg():
                self._put(path, tarfile.REGTYPE, info.mode, info.mtime, content)
        elif info.isreg():
            self._check_size(info.size)
            file = opened.extractfile(info)
            self._put(path, tarfile.REGTYPE, info.mode, info.mtime, b"" if file is None else file.read())

    def _put(
        self, path: str, kind: bytes, mode: int, mtime: float = 0, content: bytes = b"", *, link: str = ""
    ) -> None:
        name = _name(path)
        if name in ("", "."):
            return
        self._check_size(len(content))
        for above in self._in_the_way(path):
            self._remove_one(above)
        if self._is_folder(name) and kind != tarfile.DIRTYPE:
            self.remove(name)
        elif name in self._members:
            self._remove_one(name)
        info = tarfile.TarInfo(name)  # a new one: an archive's may have a second path in its headers
        info.type, info.linkname, info.size = kind, link, len(content)
        info.mtime = min(max(int(mtime), 0), 2**33)
        # a program may have closed it to its owner, who has to change and remove it
        info.mode = mode & 0o777 | (0o700 if kind == tarfile.DIRTYPE else 0o600)
        if content[:2] == b"#!":
            info.mode |= 0o755
        self._members[name] = (info, content)
        self._size += len(content)

    def _in_the_way(self, path: str) -> list[str]:
        parents = map(str, PurePosixPath(_name(path)).parents)
        return [above for above in parents if above in self._members and not self._is_folder(above)]

    def _is_folder(self, name: str) -> bool:
        return name in self._members and self._members[name][0].isdir()

    def _remove_one(self, name: str) -> None:
        self._size -= len(self._members.pop(name)[1])

    def _check_size(self, further: int) -> None:
        if self._size + further > MAX_FILES_BYTES:
            raise CommandError(TOO_LARGE)


async def pack(sandbox: Sandbox, folder: str, path: str = ".") -> bytes:
    """Return a folder of a sandbox as a tar archive, made by programs inside.

    Args:
        folder: folder to which the names in the archive are relative.
        path: what of it is packed.

    Raises:
        CommandError: the sandbox cannot pack it, it is too large, or takes longer than `PACK_TIMEOUT_S`.
    """
    archive = posixpath.join(sandbox.workspace, ARCHIVE)
    command = ["sh", "-c", PACK, "sh", str(MAX_ARCHIVE_BYTES // 512), archive, folder, path]
    ended = await sandbox.exec(command, cwd="/", timeout_s=PACK_TIMEOUT_S)
    if ended.timed_out:
        raise CommandError(f"packing the files of a rollout took more than {PACK_TIMEOUT_S:g} s; {WAY_OUT}")
    if ended.status == 128 + signal.SIGXFSZ or "File too large" in ended.stderr:
        raise CommandError(TOO_LARGE)
    if ended.status not in (0, 1):  # 1: a file changed meanwhile, such as this archive
        raise CommandError(
            f"the files of the agent in {folder} cannot be read from its sandbox: "
            f"{ended.stderr.strip()[-300:] or f'tar ended with status {ended.status}'}"
        )
    return await sandbox.read(archive)


async def bundle_files(
    trees: Sequence[tuple[str, FileTree | None]], *, folders: Sequence[str] = ()
) -> FileBundle:
    """Collect trees, in a thread.

    Args:
        trees: the folder that each goes to, and the tree.
        folders: folders that are made even if nothing goes there.

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


def resolve_files(source: FileSource | None, task: object) -> FileTree | None:
    return source(task) if callable(source) else source


def _name(path: str) -> str:
    """Return a path as the name of an archive's member, relative to the root."""
    return posixpath.normpath(path).lstrip("/")


def _relative(name: str) -> str:
    if not isinstance(name, str) or not name or name.startswith("/"):
        raise CommandError(f"the file {name!r:.80} of a task needs a path relative to the workspace")
    normal = posixpath.normpath(name)
    if normal == ".." or normal.startswith("../"):
        raise CommandError(f"the file {name!r:.80} of a task leaves the workspace; give a path inside it")
    return normal


def _as_bytes(name: str, content: object) -> bytes:
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, bytes):
        return content
    raise CommandError(f"the file {name!r} of a task is of type {type(content).__name__}; give text or bytes")
