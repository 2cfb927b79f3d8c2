"""Sandboxes by bubblewrap: what programs inside see, what they cannot do, and how they reach the model."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from sandbox_helpers import served_model, starting
from unit_helpers import until, within

from raylight.errors import SandboxError
from raylight.sandboxes.bubblewrap import BubblewrapSandbox
from raylight.sandboxes.exec_sandbox import CHUNK
from raylight.sandboxes.sandbox import SandboxLimits


def can_run() -> bool:
    """Return True if this machine has bubblewrap and user namespaces."""
    if shutil.which("bwrap") is None:
        return False
    trial = ["bwrap", "--unshare-user", "--ro-bind", "/", "/", "true"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_run(), reason="needs bubblewrap and user namespaces")


@pytest.fixture
async def make_sandbox() -> AsyncIterator[Callable]:
    """Start sandboxes, and stop them at the end."""

    def make(readable: tuple[str, ...] = (), **limits: object) -> BubblewrapSandbox:
        return BubblewrapSandbox(None, SandboxLimits(**limits), readable=readable)  # type: ignore[arg-type]

    async with starting(make) as start:
        yield start


async def run(sandbox: BubblewrapSandbox, script: str, **more: object) -> str:
    ended = await sandbox.exec(["sh", "-c", script], **more)  # type: ignore[arg-type]
    return ended.stdout + ended.stderr


async def test_programs_see_the_system_and_nothing_else(
    make_sandbox: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "of the runner")
    (tmp_path / "file").write_text("private")
    sandbox = await make_sandbox()
    assert await run(sandbox, "pwd; echo $A $SECRET", env={"A": "1"}) == "/workspace\n1\n"
    assert "No such file" in await run(sandbox, f"cat {tmp_path}/file")
    assert "Read-only file system" in await run(sandbox, "touch /usr/x")
    assert "root:" not in await run(sandbox, "cat /etc/shadow")
    assert (await run(sandbox, "ls /proc | grep -c '^[0-9]'")).strip() in ("2", "3", "4", "5")
    assert os.geteuid() != 0 or (await run(sandbox, "id -u")).strip() != "0"


async def test_a_readable_folder_is_read_only(make_sandbox: Callable) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        await asyncio.to_thread(Path(folder, "file").write_text, "given")
        sandbox = await make_sandbox(readable=(folder,))
        assert await run(sandbox, f"cat {folder}/file") == "given"
        assert "Read-only" in await run(sandbox, f"touch {folder}/x")


async def test_absolute_folders_last_from_program_to_program(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    assert await run(sandbox, "mkdir -p /tests && echo 1 > /tests/a") == ""
    assert await sandbox.read("/tests/a") == b"1\n"
    await sandbox.write("/app/deep/b", b"#!/bin/sh\necho b", executable=True)
    assert await run(sandbox, "/app/deep/b") == "b\n"
    with pytest.raises(FileNotFoundError):
        await sandbox.read("/missing")


async def test_files_of_any_content_and_size(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    for content in (b"", bytes(range(256)), b"\xff" * (CHUNK + 7), b"x" * CHUNK):
        await sandbox.write("file with 'quotes' and spaces", content)
        assert await sandbox.read("file with 'quotes' and spaces") == content


async def test_a_link_leads_nowhere_outside(make_sandbox: Callable, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("private")
    sandbox = await make_sandbox()
    await run(sandbox, f"ln -s {tmp_path}/secret reward.json; ln -s {tmp_path} folder")
    with pytest.raises(FileNotFoundError):
        await sandbox.read("reward.json")
    with pytest.raises(SandboxError):
        await sandbox.write("folder/file", b"")
    assert os.listdir(tmp_path) == ["secret"]


async def test_everything_ends_with_the_program(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    mark = f"sleep 6{os.getpid()}"
    await run(sandbox, f"setsid env -i {mark} > /dev/null 2>&1 & sleep 0.05")
    await until(lambda: not any(mark.split() == p.info["cmdline"] for p in psutil.process_iter(["cmdline"])))
    result = await sandbox.exec(["sh", "-c", f"trap '' TERM; while :; do {mark}; done"], timeout_s=0.2)
    assert result.timed_out
    await until(lambda: not any(mark.split() == p.info["cmdline"] for p in psutil.process_iter(["cmdline"])))


async def test_limits_hold(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox(memory_mb=300, file_mb=1, processes=20)
    assert "MemoryError" in await run(sandbox, "python3 -c 'x = bytearray(500_000_000)'")
    await run(sandbox, "head -c 3000000 /dev/zero > big")
    assert (await run(sandbox, "wc -c < big")).strip() == str(2**20)
    bomb = "for i in $(seq 60); do sleep 5 & done; wait"
    assert "fork" in (await sandbox.exec(["sh", "-c", bomb], timeout_s=10)).stderr.lower()
    with pytest.raises(SandboxError, match="take 2 MiB, and its limit file_mb is 1"):
        await run(sandbox, "cp big /tmp/other")


async def test_without_a_network_only_the_model_is_reached(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox(network=False)
    fetch = (
        "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=9).read().decode())"
    )
    async with served_model() as model, served_model() as other, within(30):
        url = await sandbox.forward(f"http://127.0.0.1:{model}/v1/models")
        for _ in range(2):
            ended = await sandbox.exec(["python3", "-c", fetch, url])
            assert (ended.stdout, ended.status) == ("model\n", 0), ended.stderr
        elsewhere = f"http://127.0.0.1:{other}/"
        assert "refused" in (await sandbox.exec(["python3", "-c", fetch, elsewhere])).stderr
    with pytest.raises(SandboxError, match="http://"):
        await (await make_sandbox(network=False)).forward("https://host/v1")


async def test_it_can_be_stopped_at_any_time() -> None:
    sandbox = BubblewrapSandbox(None, SandboxLimits())
    await sandbox.stop()
    with pytest.raises(SandboxError, match="not started"):
        await sandbox.exec(["true"])
    await sandbox.start()
    folder = Path(sandbox._folder_path())
    await sandbox.stop()
    await sandbox.stop()
    await until(lambda: not folder.exists())


async def test_a_machine_without_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = BubblewrapSandbox(None, SandboxLimits())
    monkeypatch.setattr(sandbox, "_wrapper", lambda: ["no-such-bwrap"])
    with pytest.raises(SandboxError, match="install bubblewrap"):
        await sandbox.start()
    await sandbox.stop()
