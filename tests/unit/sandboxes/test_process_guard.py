"""The guard of a process kills the programs that the process started, however it ends."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from sandbox_helpers import alive
from unit_helpers import until

from raylight.sandboxes import marked_processes
from raylight.sandboxes.local_program import ProcessGuard

RUNNER = """
import asyncio, sys
from raylight.sandboxes.local_program import GUARD, run_program
add = GUARD.add
GUARD.add = lambda group, mark: (add(group, mark), print("guarded", flush=True))

async def main():
    await run_program(["/bin/sh", "-c", sys.argv[1]], env={"PATH": "/bin:/usr/bin"}, limit_mark=True)

asyncio.run(main())
"""


def guards(mark: str) -> list[int]:
    """Return the guards whose environment has a mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if marked_processes.__file__ in process.cmdline() and process.environ().get("MARK") == mark:
                found.append(process.pid)
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    asyncio.run(until(holds))


def test_a_killed_runner_takes_its_programs_along(tmp_path: Path) -> None:
    file, hidden = tmp_path / "pids", tmp_path / "hidden"
    script = f"""
    env -i setsid sh -c 'echo $$ > {hidden}; exec sleep 600' &
    sleep 600 & setsid sleep 600 & while [ ! -s {hidden} ]; do :; done
    echo $$ $! `cat {hidden}` >> {file}; wait"""
    command = [sys.executable, "-c", RUNNER, script]

    def pids() -> list[int]:
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    with subprocess.Popen(command, stdout=subprocess.PIPE) as runner:
        try:
            assert runner.stdout.readline() == b"guarded\n"
            wait_until(lambda: len(pids()) == 3)
            runner.kill()
            wait_until(lambda: not any(map(alive, pids())))
        finally:
            for pid in filter(alive, [runner.pid, *pids()]):
                os.kill(pid, signal.SIGKILL)


def test_a_killed_guard_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MARK", mark)
    guard = ProcessGuard()
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as program:
        guard.add(program.pid, mark)
        (first,) = guards(mark)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not alive(first))
        guard.add(program.pid, mark)
        (second,) = guards(mark)
        assert guard._pipe is not None
        os.close(guard._pipe)  # as at the end of this process
        guard._pipe = None
        assert program.wait(10) == -signal.SIGKILL
        wait_until(lambda: not alive(second))


def test_a_program_that_has_ended_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MARK", mark)
    guard = ProcessGuard()
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as program:
        try:
            guard.add(program.pid, mark)
            guard.remove(program.pid, mark)
            (only,) = guards(mark)
            assert guard._pipe is not None
            os.close(guard._pipe)
            guard._pipe = None
            wait_until(lambda: not alive(only))
            assert program.poll() is None
        finally:
            program.kill()
