"""A program on this machine, run to its end with everything that it started.

It runs in a separate session, so it survives a runner that is killed, for example for its memory. A guard,
one small process for each runner, reads the process groups and marks of programs from a pipe, and kills those
that are left when the pipe closes, which it does however the runner ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import cast

from raylight.sandboxes import marked_processes
from raylight.sandboxes.marked_processes import MARK_VARIABLE, kill_marked, new_mark
from raylight.sandboxes.sandbox import MAX_STDERR, MAX_STDOUT, ExecResult


def marked_command(
    command: Sequence[str], mark: str, env: Mapping[str, str], cwd: str | None = None
) -> list[str]:
    """Return a command whose processes carry a mark that they keep with an empty environment, too.

    Args:
        command: program and arguments.
        mark: mark that the program has in its environment already.
        env: environment of the program, by which it is found.
        cwd: working directory of the program; None: this process's.

    Raises:
        FileNotFoundError: the program does not exist. PermissionError: it cannot be executed.
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


TERMINATE_GRACE_S = 3.0
"""Time between SIGTERM and SIGKILL when a program is ended. The runner waits 5 s for an agent."""
DRAIN_S = 1.0
"""Time in which the pipes of an ended program must close; a process outside its group may hold them."""

GUARD = ProcessGuard()


async def run_program(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    stdin: bytes = b"",
    timeout_s: float | None = None,
    ends_children: bool = True,
    limit_mark: bool = False,
) -> ExecResult:
    """Run a program to its end, then kill the processes that it left behind.

    They are found by their process group and, on Linux, by a mark in their environment, which a process that
    made itself a daemon still has. A cancellation ends the program: SIGTERM to its group, SIGKILL after 3 s.
    So does the end of this process, however it comes.

    Args:
        command: program and arguments.
        env: the whole environment.
        cwd: working directory; None: this process's.
        stdin: its standard input, closed afterwards.
        timeout_s: seconds after which it is ended; the result says so.
        ends_children: False for a program that leaves a service behind on purpose, such as `podman run`. It
            is itself ended in any case.
        limit_mark: also find processes that emptied their environment, by a limit that they inherit. False
            for a program that starts others in a place that outlives it, such as `podman exec`.

    Raises:
        OSError: the program cannot be started. ValueError: an argument contains a null byte.
    """
    return await _Program(command, env, cwd, ends_children, limit_mark).run(stdin, timeout_s)


class _Program(asyncio.SubprocessProtocol):
    """A running program: its input, the ends of its outputs, and the end of all its processes.

    `asyncio.Process.wait` may wait for processes that the program left behind, as they hold its pipes; this
    waits for the program itself.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None,
        ends_children: bool,
        limit_mark: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._ends_children = ends_children
        self._limit_mark = limit_mark
        self._mark = new_mark()
        self._command, self._env, self._cwd = command, {**env, MARK_VARIABLE: self._mark}, cwd
        self._exited: asyncio.Future[None] = loop.create_future()
        self._closed: asyncio.Future[None] = loop.create_future()
        self._tails = {1: bytearray(), 2: bytearray()}
        self._limits = {1: MAX_STDOUT, 2: MAX_STDERR}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        tail, limit = self._tails[fd], self._limits[fd]
        tail += data
        if len(tail) > 2 * limit:  # rarely, so that each byte is moved once on average
            del tail[:-limit]

    def process_exited(self) -> None:
        if not self._exited.done():
            self._exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)

    async def run(self, stdin: bytes, timeout_s: float | None) -> ExecResult:
        # `asyncio.wait` does not cancel what it waits for: a cancelled start would leave processes behind
        # and a cancelled future would look like an exit
        started_at = time.monotonic()
        starting = asyncio.create_task(self._start())
        try:
            await asyncio.wait([starting])
            transport = starting.result()
            GUARD.add(transport.get_pid(), self._mark)
            pipe = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
            if not pipe.is_closing():  # the program may have ended
                pipe.write(stdin)
                pipe.close()  # after what was written
            timed_out = not (await asyncio.wait([self._exited], timeout=timeout_s))[0]
            if timed_out:
                await self._terminate(transport)
            status = transport.get_returncode()
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            if starting.exception() is None:
                await self._terminate(starting.result())
            raise
        finally:
            if starting.done() and starting.exception() is None:
                await self._close(starting.result())
        stdout, stderr = (self._tails[fd].decode(errors="replace") for fd in (1, 2))
        status = -signal.SIGKILL if status is None else status
        return ExecResult(status, stdout, stderr, timed_out, time.monotonic() - started_at)

    async def _terminate(self, transport: asyncio.SubprocessTransport) -> None:
        _signal_group(transport, signal.SIGTERM)
        await asyncio.wait([self._exited], timeout=TERMINATE_GRACE_S)

    async def _close(self, transport: asyncio.SubprocessTransport) -> None:
        """Kill what remains of the program's processes, and read the rest of the outputs."""
        if self._ends_children or not self._exited.done():
            _signal_group(transport, signal.SIGKILL)
            kill_marked(self._mark)
        GUARD.remove(transport.get_pid(), self._mark)
        try:
            await asyncio.wait([self._closed], timeout=DRAIN_S)
        finally:
            transport.close()
            for fd, tail in self._tails.items():
                del tail[: -self._limits[fd]]

    async def _start(self) -> asyncio.SubprocessTransport:
        GUARD.start()
        command = self._command
        if self._limit_mark:
            command = marked_command(command, self._mark, self._env, self._cwd)
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: self, *command, env=self._env, cwd=self._cwd, start_new_session=True
        )
        return transport


def _signal_group(transport: asyncio.SubprocessTransport, number: int) -> None:
    """Send a signal to the program and all processes that it started and that are still in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(transport.get_pid(), number)
