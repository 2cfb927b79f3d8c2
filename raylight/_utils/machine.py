"""This machine's CPUs, memory and temporary folder, with the limits of its container."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from raylight.errors import ClusterStartError, ConfigError

SOCKET_PATH_LENGTH = 103 if sys.platform == "darwin" else 107
"""Most bytes of the path of a Unix socket."""
SESSION_SOCKET = f"/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store"
"""Form of the longest path of a socket in Ray's folder."""
DASHBOARD_SOCKET = "/pymp-12345678/listener-12345678"
"""Form of the sockets of `multiprocessing`, with which Ray's dashboard starts its processes."""
SHM = "/dev/shm"
MIN_SHM = 8 * 2**20
"""Bytes of shared memory below which HAProxy dies at its start, by SIGBUS. Ray itself moves to the disk."""


def available_cpus() -> int:
    """Return the CPUs that this process may use: the least of the machine, the container's quota, and the
    CPU affinity. At least 1, also of a quota below one CPU, of which Ray would make 0."""
    from ray._private.utils import get_num_cpus

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else sys.maxsize
    return max(1, min(int(get_num_cpus(override_docker_cpu_warning=True)), allowed))


def total_memory() -> int:
    """Return the bytes of memory of this machine, or of its container."""
    from ray._common.utils import get_system_memory

    return get_system_memory()


def check_start(ray_folder: str) -> None:
    """Raise if a local cluster cannot start with this process's temporary folders and shared memory.

    Args:
        ray_folder: the folder of Ray's sessions.

    Raises:
        ClusterStartError: a folder is too long for the paths of sockets or cannot be written, or /dev/shm is
            full.
    """
    variable = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    for name, folder, longest in (
        (variable, ray_folder, SESSION_SOCKET),
        ("TMPDIR", tempfile.gettempdir(), DASHBOARD_SOCKET),  # RAY_TMPDIR does not move it
    ):
        if (length := len(os.fsencode(folder + longest))) > SOCKET_PATH_LENGTH:
            raise ClusterStartError(
                f"Ray cannot start: the paths of its sockets in {folder} would have {length} bytes, and "
                f"{SOCKET_PATH_LENGTH} are possible; set {name} to a shorter folder, such as {name}=/tmp"
            )
    has_haproxy = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "0"
    if has_haproxy and os.path.isdir(SHM) and (free := shutil.disk_usage(SHM).free) < MIN_SHM:
        raise ClusterStartError(
            f"Ray cannot start: {SHM} has {free / 2**20:.1f} MiB free, and HAProxy needs {MIN_SHM // 2**20} "
            "MiB; remove files there that ended programs left, or make it larger (docker run --shm-size=4g)"
        )
    if problem := write_problem(Path(ray_folder)):
        raise ClusterStartError(
            f"Ray cannot start: its folder {ray_folder} cannot be written: {problem}; set {variable} to a "
            "folder that can"
        )


def check_writable(folder: Path, setting: str) -> None:
    """Raise if files cannot be written to a folder, which need not exist yet.

    Args:
        setting: name of the setting with the folder.

    Raises:
        ConfigError: they cannot.
    """
    if problem := write_problem(folder):
        raise ConfigError(f"{setting} {folder} cannot be written: {problem}; choose another folder")


def write_problem(folder: Path) -> str | None:
    """Return why files cannot be written to a folder, or to the one in which it would be made; None if they
    can."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return error.strerror or str(error)
