"""Process that kills the programs of agents when the process that started them is killed itself.

A program runs in a session of its own, so it survives a runner that is killed, for example for its memory.
The guard is one small process for each runner. It reads the process groups and marks of programs from a pipe,
and kills those that are left when the pipe closes, which it does however the runner ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from raylight.sandboxes import marked_processes


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
