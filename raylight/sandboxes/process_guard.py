"""Process that kills the programs of agents when the process that started them is killed itself.

A program runs in a session of its own, so it survives a runner that is killed, for example for its memory.
The guard is one small process for each runner. It reads the process groups and marks of programs from a pipe,
and kills those that are left when the pipe closes, which it does however the runner ends.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from raylight.sandboxes import marked_processes


def marked_command(
    command: Sequence[str], mark: str, env: Mapping[str, str], cwd: str | None = None
) -> list[str]:
    """Return a command whose processes carry a mark that they keep with an empty environment, too.

    Args:
        command: program and arguments.
        mark: mark that the program has in its environment already.
        env: environment of the program, by which it is found.
        cwd: working directory of the program; None: that of this process.

    Raises:
        FileNotFoundError: there is no such program. PermissionError: it cannot be executed.
    """
    prlimit = _prlimit()
    if prlimit is None:
        return list(command)
    place = os.path.join(cwd or "", command[0]) if os.path.dirname(command[0]) else command[0]
    if shutil.which(place, path=env.get("PATH", os.defpath)) is None:
        code = errno.EACCES if os.path.exists(place) else errno.ENOENT
        raise OSError(code, os.strerror(code), command[0])
    return [prlimit, f"--locks={mark}:", "--", *command]


@functools.cache
def _prlimit() -> str | None:
    """Return the program of util-linux that sets limits, or None if the limit of a mark cannot be set."""
    return shutil.which("prlimit") if marked_processes.limit_can_mark() else None


class ProcessGuard:
    """The guard of this process, which ends with it. Thread-safe."""

    def __init__(self) -> None:
        self._pipe: int | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the guard, if it does not run yet."""
        with self._lock:
            if self._pipe is None:
                self._start()

    def add(self, group: int, mark: str) -> None:
        """Have a program killed when this process ends.

        Args:
            group: id of its process group.
            mark: mark of its processes.
        """
        self._send(f"+{group} {mark}\n".encode())

    def remove(self, group: int, mark: str) -> None:
        """Forget a program that has ended."""
        self._send(f"-{group} {mark}\n".encode())

    def _send(self, line: bytes) -> None:
        with self._lock:
            try:
                os.write(self._pipe if self._pipe is not None else self._start(), line)
            except BrokenPipeError:  # the guard was killed
                os.write(self._start(), line)

    def _start(self) -> int:
        """Start a guard, and return the pipe to it, which no other program inherits."""
        reading, writing = os.pipe()
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", marked_processes.__file__],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                check=True,
            )
        finally:
            os.close(reading)
        if self._pipe is not None:
            os.close(self._pipe)
        self._pipe = writing
        return writing
