"""Stages of an engine's start: each process of a replica notes its own, and the replica's actor reads them.

They are lines of an anonymous file, so that nothing is left behind by a process that is killed.
"""

from __future__ import annotations

import contextlib
import os
import sys

import psutil

VARIABLE = "RAYLIGHT_START_STAGES"
"""Environment variable with the path of the file, for the processes on the replica's node."""


FILE = "raylight-start-stages"
"""Name of the file, which has no folder."""


def note_stage(stage: str) -> None:
    """Note what this process does now, if it is part of a start."""
    if path := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):  # the replica is gone, or on another node
            if os.readlink(path).startswith(f"/memfd:{FILE}"):
                with open(path, "a") as file:
                    file.write(f"{os.getpid()} {stage}\n")


class StartStages:
    """The stages of this replica's start. The file stays open: its path must never lead to another one."""

    def __init__(self) -> None:
        self._file: int | None = None
        if sys.platform == "linux":
            self._file = os.memfd_create(FILE, os.MFD_CLOEXEC)
            os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{self._file}"

    def read(self) -> tuple[str, int]:
        """Return the last stage, empty at first, and the bytes that the replica's processes have read."""
        lines: list[str] = []
        if self._file is not None:
            lines = (
                os.pread(self._file, os.fstat(self._file).st_size, 0).decode(errors="replace").splitlines()
            )
        noted = [line.split(" ", 1) for line in lines if " " in line]
        pids = {os.getpid(), *(int(pid) for pid, _ in noted)}
        return noted[-1][1] if noted else "", sum(map(_bytes_read, pids))


def _bytes_read(pid: int) -> int:
    """Return the bytes that a process has read, memory maps included; 0 where the system does not count."""
    try:
        counters = psutil.Process(pid).io_counters()
    except (AttributeError, psutil.Error, OSError):
        return 0
    return counters.read_chars + counters.read_bytes
