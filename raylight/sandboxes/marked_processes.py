"""Processes of a program, found by a mark that they inherit; and the guard's own program.

A mark is a random number, the value of an environment variable and, on Linux, of the soft limit RLIMIT_LOCKS.
All processes of a program inherit both, also those that left its process group; one that empties its
environment still has the limit. The guard runs this file by itself, so it imports nothing but the standard
library.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys

MARK_VARIABLE = "RAYLIGHT_PROGRAM"
RLIMIT_LOCKS = 10
"""Number of a limit of the kernel that has limited nothing since Linux 2.4. Python has no name for it."""
MAX_SCANS, MAX_UNCLEAR_SCANS = 20, 3
"""Limits of the scans for one mark; programs with an empty environment make every scan unclear."""


def new_mark() -> str:
    return str(int.from_bytes(os.urandom(7), "big"))


def limit_can_mark() -> bool:
    """Return True if this system lets a program set and read the limit that marks."""
    if not hasattr(resource, "prlimit"):
        return False
    try:
        soft, hard = resource.getrlimit(RLIMIT_LOCKS)
        resource.prlimit(0, RLIMIT_LOCKS, (soft, hard))
    except (OSError, ValueError):
        return False  # an emulated kernel, such as gVisor, may refuse it
    return hard == resource.RLIM_INFINITY


def kill_marked(mark: str) -> None:
    """Kill all processes with a mark. A system without /proc has none that can be found."""
    killed: set[int] = set()
    unclear = 0
    for _ in range(MAX_SCANS):  # a process may have started another one meanwhile
        found, is_clear = _marked(mark)
        unclear += not is_clear
        fresh = {pid for pid in found if _kill(pid)} - killed
        if not fresh and (is_clear or unclear >= MAX_UNCLEAR_SCANS):
            return
        killed |= fresh


def _marked(mark: str) -> tuple[list[int], bool]:
    """Return the processes with a mark, and False if one of them may be hidden by its exec at this moment."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found, is_clear = [], True
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit() and int(name) != os.getpid():
            if _has_limit(int(name), mark):
                found.append(int(name))
                continue
            # a process may have ended, or belong to another user
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                environment = file.read()
                if wanted in environment.split(b"\0"):
                    found.append(int(name))
                elif not environment:
                    os.readlink(f"/proc/{name}/exe")  # fails for kernel threads and for zombies
                    is_clear = False
    return found, is_clear


def _has_limit(pid: int, mark: str) -> bool:
    try:
        return str(resource.prlimit(pid, RLIMIT_LOCKS)[0]) == mark
    except (AttributeError, OSError, ValueError):  # no Linux, ended, or of another user
        return False


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False  # it has ended
    return True


def guard() -> None:
    """Read process groups and marks until the pipe closes, then kill those that are left."""
    if os.fork():
        os._exit(0)  # Ray kills the children of a worker that ends; a grandchild remains
    programs: set[tuple[str, str]] = set()
    for line in sys.stdin:
        group, mark = line[1:].split()
        (programs.add if line[0] == "+" else programs.discard)((group, mark))
    for group, mark in programs:
        with contextlib.suppress(OSError):  # it has ended
            os.killpg(int(group), signal.SIGKILL)
        kill_marked(mark)


if __name__ == "__main__":
    guard()
