"""Process that kills the programs of agents when the process that started them is killed itself.

A program runs in a session of its own, so it survives a runner that is killed, for example for its memory.
The guard is one small process for each runner. It reads the ids of process groups from a pipe, and kills the
groups that are left when the pipe closes, which it does however the runner ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

SCRIPT = """
import os, signal, sys
if os.fork():
    os._exit(0)  # Ray kills the children of a worker that ends; a grandchild remains
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass  # it has ended
"""


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

    def add(self, group: int) -> None:
        """Have a process group killed when this process ends."""
        self._send(f"+{group}\n".encode())

    def remove(self, group: int) -> None:
        """Forget a process group that has ended."""
        self._send(f"-{group}\n".encode())

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
                [sys.executable, "-I", "-S", "-c", SCRIPT],
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
