"""Remains of runs on this machine that ended without cleaning up, and their removal.

A killed run may leave HAProxy's folder, the folder of its Ray session, folders of sandboxes and, without the
launcher of `haproxy_launcher`, HAProxy itself. Only what belongs to this user and was made by raylight is
considered, and nothing whose run is alive: its processes are visible, its sockets accept connections (those
of a container that shares the file system), or its lock is held.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from raylight._utils.machine import SOCKET_PATH_LENGTH
from raylight.sandboxes.folders import abandoned_folders, remove_abandoned

logger = logging.getLogger(__name__)

SESSION_MARK = "started-by-raylight"
"""File in the folder of a Ray session that raylight started."""
NODE_ID = re.compile(r"[0-9a-f]{56}")
KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Leftover:
    """A process or a folder of a run that has ended."""

    kind: Literal["process", "folder", "session", "sandbox"]
    """`folder` is one of HAProxy; `session` is one of Ray, with logs and spilled objects; `sandbox` is the
    temporary folder of one whose runner was killed."""
    name: str
    """Process ID or path."""
    size: int = 0
    """Bytes on the disk."""
    started: float = 0.0
    """Start time of a process, in seconds since the epoch, against reuse of its ID."""

    def __str__(self) -> str:
        if self.kind == "process":
            return f"HAProxy, process {self.name}, whose Ray Serve has ended"
        of = {"folder": "HAProxy", "session": "Ray session", "sandbox": "sandbox"}[self.kind]
        return f"folder of an ended {of}: {self.name} ({self.size / 2**20:.1f} MiB)"


def user_folder() -> Path:
    """Return the folder of this user's ingresses, made if absent; only the user can enter it.

    It is in /tmp because the paths of Unix sockets are limited to SOCKET_PATH_LENGTH.

    Raises:
        PermissionError: the path belongs to another user.
    """
    path = _folder_path()
    path.mkdir(mode=0o700, exist_ok=True)
    state = path.lstat()
    if path.is_symlink() or state.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to user {state.st_uid}; ask its owner or root to remove it")
    path.chmod(0o700)
    return path


def _folder_path() -> Path:
    return Path(f"/tmp/raylight-{os.getuid()}")


def ray_folder() -> Path:
    from ray._common.utils import get_default_ray_temp_dir

    return Path(get_default_ray_temp_dir())


def mark_session(name: str) -> None:
    """Mark a Ray session of this machine as raylight's: its folder counts as a leftover once it has ended."""
    (ray_folder() / name / SESSION_MARK).touch()


def find_leftovers(sessions: bool = True) -> list[Leftover]:
    """Return what ended runs left.

    Args:
        sessions: include the folders of Ray's sessions, which have the logs of the runs.
    """
    found = list(_processes())
    if _is_own(_folder_path()):
        folders = [path for path in _folder_path().iterdir() if NODE_ID.fullmatch(path.name)]
        found += [Leftover("folder", str(path), _size(path)) for path in _ended(folders)]
    found += [Leftover("sandbox", path, _size(Path(path))) for path in abandoned_folders()]
    if sessions:
        marks = filter(_is_own, ray_folder().glob(f"session_*/{SESSION_MARK}"))
        found += [Leftover("session", str(path), _size(path)) for path in _ended_sessions(marks)]
    return found


def remove(leftover: Leftover) -> bool:
    """Remove a leftover; returns False if it could not be removed, with a warning."""
    try:
        if leftover.kind == "process":
            process = psutil.Process(int(leftover.name))
            if process.create_time() == leftover.started:
                process.kill()
                process.wait(KILL_TIMEOUT_S)
        elif leftover.kind == "sandbox":
            remove_abandoned(leftover.name)
        else:
            shutil.rmtree(leftover.name)
    except (psutil.NoSuchProcess, FileNotFoundError):
        return True  # another run removed it
    except (psutil.Error, OSError) as error:
        logger.warning("cannot remove the %s: %s", leftover, error)
        return False
    return True


def sweep() -> None:
    """Remove what ended runs left, except for their logs, and log it."""
    for leftover in find_leftovers(sessions=False):
        if remove(leftover):
            logger.info("removed the %s", leftover)


def _processes() -> Iterator[Leftover]:
    """Yield this user's HAProxies that raylight started and whose manager is gone."""
    for process in psutil.process_iter(["name", "uids", "cmdline", "create_time"]):
        facts = process.info
        if facts["name"] != "haproxy" or not facts["uids"] or facts["uids"].real != os.getuid():
            continue
        folder = f"{_folder_path()}/"
        if any(argument.startswith(folder) for argument in facts["cmdline"] or ()) and _is_orphan(process):
            yield Leftover("process", str(process.pid), started=facts["create_time"])


def _is_orphan(process: psutil.Process) -> bool:
    """Return True if a process's parent is not the Ray worker that started it."""
    try:
        parent = process.parent()  # None if the parent is younger: its ID was reused
        return parent is None or not any("ray::" in part for part in parent.cmdline())
    except psutil.NoSuchProcess:
        return False  # it ends just now
    except psutil.AccessDenied:
        return True  # a process of another user, such as init


def _ended(folders: list[Path]) -> list[Path]:
    """Return the folders of HAProxy whose node is not alive."""
    alive = {part.partition("=")[2] for part in _raylet_arguments() if part.startswith("--node_id=")}
    return [
        path
        for path in folders
        if path.name not in alive and not any(map(_accepts, (path / "admin.sock", path / "metrics.sock")))
    ]


def _ended_sessions(marks: Iterable[Path]) -> list[Path]:
    """Return the folders of Ray's marked sessions that are not alive."""
    alive = {part.partition("=")[2] for part in _raylet_arguments() if part.startswith("--session_dir=")}
    folders = [mark.parent for mark in marks]
    return [path for path in folders if str(path) not in alive and not _accepts(path / "sockets" / "raylet")]


def _raylet_arguments() -> set[str]:
    return {
        argument
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "raylet"
        for argument in process.info["cmdline"] or ()
    }


def _accepts(path: Path) -> bool:
    """Return False if no process listens at a Unix socket; True if one does, or if that is unknown."""
    if len(os.fsencode(path)) > SOCKET_PATH_LENGTH:
        return False
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)
            error = probe.connect_ex(str(path))
        if error not in (errno.ECONNREFUSED, errno.ENOENT, errno.EPROTOTYPE):
            return True
    return False


def _is_own(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.lstat().st_uid == os.getuid()
    return False


def _size(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    total = 0
    for path, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total
