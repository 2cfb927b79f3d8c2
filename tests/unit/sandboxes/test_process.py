"""The sandbox of plain processes: its folder, its limits, and the end of what ran in it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from sandbox_helpers import alive, starting
from unit_helpers import until, within

from raylight.errors import SandboxError
from raylight.sandboxes.process import ProcessSandbox
from raylight.sandboxes.sandbox import MAX_STDOUT, Sandbox, SandboxLimits


def read_pid(path: Path) -> int | None:
    return int(path.read_text() or 0) if path.exists() else None


def size_of(path: str) -> int | None:
    return os.path.getsize(path) if os.path.exists(path) else None


@pytest.fixture
async def make_sandbox() -> AsyncIterator[Callable]:
    """Start sandboxes, and stop them at the end."""

    def make(**limits: int) -> Sandbox:
        return ProcessSandbox(None, SandboxLimits(**limits))

    async with starting(make) as start:
        yield start


async def test_a_program_works_in_the_workspace(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    await sandbox.write("bin/hello", b"#!/bin/sh\ncat; echo $NAME; echo bad >&2; exit 3\n", executable=True)
    result = await sandbox.exec(["bin/hello"], env={"NAME": "you"}, stdin=b"hi ")
    assert (result.status, result.stdout, result.stderr) == (3, "hi you\n", "bad\n")
    assert await sandbox.read("bin/hello") == await sandbox.read(f"{sandbox.workspace}/bin/hello")
    assert (await sandbox.exec(["pwd"], cwd="bin")).stdout.strip() == f"{sandbox.workspace}/bin"
    with pytest.raises(FileNotFoundError):
        await sandbox.read("missing")
    with pytest.raises(SandboxError, match="no-such-program cannot be started"):
        await sandbox.exec(["no-such-program"])


async def test_the_workspace_ends_with_the_sandbox(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    folder = Path(sandbox.workspace)
    await sandbox.write("read_only/file", b"")
    (folder / "read_only").chmod(0o500)
    await sandbox.stop()
    await sandbox.stop()
    assert size_of(str(folder)) is None
    with pytest.raises(SandboxError, match="not started"):
        _ = sandbox.workspace


async def test_a_program_that_takes_too_long_is_ended(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    result = await sandbox.exec(["/bin/sh", "-c", "echo before; sleep 600"], timeout_s=0.2)
    assert (result.timed_out, result.status, result.stdout) == (True, -signal.SIGTERM, "before\n")


@pytest.mark.parametrize(
    "start",
    ["setsid {} &", "(setsid {} &)", "env -i setsid {} &", "(env -i setsid sh -c '{} &' &)"],
    ids=["daemon", "forked twice", "empty environment", "forked twice, empty environment"],
)
async def test_a_daemon_ends_with_the_program_that_started_it(make_sandbox: Callable, start: str) -> None:
    sandbox = await make_sandbox()
    await sandbox.write("daemon", b"#!/bin/sh\necho $$ > pid\nexec sleep 600\n", executable=True)
    script = f"{start.format('./daemon')}\nwhile [ ! -s pid ]; do :; done; exit 3"
    assert (await sandbox.exec(["/bin/sh", "-c", script])).status == 3
    pid = int(await sandbox.read("pid"))
    await until(lambda: not alive(pid))


async def test_a_cancelled_program_is_ended(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    work = asyncio.create_task(sandbox.exec(["/bin/sh", "-c", "echo $$ > pid; exec sleep 600"]))
    path = Path(sandbox.workspace, "pid")
    await until(lambda: bool(read_pid(path)))
    pid = read_pid(path)
    assert pid is not None
    work.cancel()
    async with within(30):
        with pytest.raises(asyncio.CancelledError):
            await work
    assert not psutil.pid_exists(pid)


async def test_limits_hold_for_memory_and_files(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox(memory_mb=200, file_mb=1)
    greedy = await sandbox.exec(["python3", "-c", "x = bytearray(400_000_000)"])
    assert "MemoryError" in greedy.stderr
    filling = await sandbox.exec(["/bin/sh", "-c", "head -c 3000000 /dev/zero > big"])
    assert filling.status != 0
    assert size_of(f"{sandbox.workspace}/big") == 2**20


async def test_the_files_of_a_sandbox_are_limited_together(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox(file_mb=2)
    write = "head -c 1000000 /dev/zero > $0"
    for name in "ab":
        assert (await sandbox.exec(["/bin/sh", "-c", write, name])).status == 0
    with pytest.raises(SandboxError, match=r"take 3 MiB, and its limit file_mb is 2; raise it"):
        await sandbox.exec(["/bin/sh", "-c", f"{write}; mkdir -p x/y; cp $0 x/y", "c"])


async def test_what_is_no_file_is_neither_read_nor_written(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    await sandbox.exec(["/bin/sh", "-c", "mkfifo pipe; ln -s /dev/zero endless; mkdir folder"])
    for name in ("pipe", "endless", "folder", "pipe/below"):
        with pytest.raises(FileNotFoundError):
            await sandbox.read(name)
    for name in ("pipe", "folder", "pipe/below"):
        with pytest.raises(SandboxError, match="cannot be written"):
            await sandbox.write(name, b"")


async def test_of_a_large_output_the_end_is_kept(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    result = await sandbox.exec(["/bin/sh", "-c", f"head -c {3 * MAX_STDOUT} /dev/zero; echo end"])
    assert len(result.stdout) == MAX_STDOUT
    assert result.stdout.endswith("\0end\n")
