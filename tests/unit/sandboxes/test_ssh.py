"""Sandboxes on another machine: a real sshd on the loopback, with its own keys."""

import asyncio
import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from sandbox_helpers import served_model
from unit_helpers import within

from raylight.errors import SandboxError, SandboxUnavailableError
from raylight.sandboxes.sandbox import MAX_STDOUT, SandboxLimits
from raylight.sandboxes.ssh import SshSandbox

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile {folder}/pid
StrictModes no
UsePAM no
PasswordAuthentication no
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Start an sshd; yields the arguments with which ssh reaches it."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("needs sshd and ssh")
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "config").write_text(CONFIG.format(folder=folder, port=port))
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # where it separates its privileges
    with subprocess.Popen([SSHD, "-D", "-f", folder / "config"], stderr=subprocess.DEVNULL) as process:
        try:
            yield [
                *("-p", str(port), "-i", str(folder / "user"), "-F", "none"),
                *(
                    "-o",
                    "StrictHostKeyChecking=no",
                    "-o",
                    "UserKnownHostsFile=/dev/null",
                    "-o",
                    "LogLevel=ERROR",
                ),
            ]
        finally:
            process.terminate()


@pytest.fixture
async def make_sandbox(server: list[str]) -> AsyncIterator[Callable]:
    """Start sandboxes, and stop them at the end."""
    started: list[SshSandbox] = []

    async def make(**limits: object) -> SshSandbox:
        sandbox = SshSandbox(f"{getpass.getuser()}@127.0.0.1", SandboxLimits(**limits), arguments=server)  # type: ignore[arg-type]
        started.append(sandbox)
        async with within(60):
            while True:  # until the server listens
                with contextlib.suppress(SandboxUnavailableError):
                    await sandbox.start()
                    return sandbox

    yield make
    for sandbox in started:
        await sandbox.stop()


async def test_programs_work_in_a_folder_there(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    variables = {"KEY": "it's $HOME; a\nsecret"}
    result = await sandbox.exec(["sh", "-c", 'echo "$KEY"; cat; pwd; exit 3'], env=variables, stdin=b"in\n")
    assert (result.status, result.stdout) == (3, f"it's $HOME; a\nsecret\nin\n{sandbox.workspace}\n")
    assert (await sandbox.exec(["ls", "-A"])).stdout == ""  # the file of the variables is removed
    content = bytes(range(256)) * (MAX_STDOUT // 200)
    await sandbox.write("deep/file", content)
    assert await sandbox.read("deep/file") == content
    with pytest.raises(FileNotFoundError):
        await sandbox.read("missing")
    assert (await sandbox.exec(["no-such-program"])).status == 127
    assert (await sandbox.exec(["sh", "-c", "exit 255"])).status == 255
    folder = Path(sandbox.workspace)
    await sandbox.stop()
    await sandbox.stop()
    assert not await asyncio.to_thread(folder.exists)


@pytest.mark.slow("CI's step with sandboxes runs it each time")
async def test_programs_end_with_what_they_started(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    mark = f"sleep 7{os.getpid()}"
    await sandbox.exec(["sh", "-c", f"setsid {mark} > /dev/null 2>&1 &"])
    result = await sandbox.exec(["sh", "-c", f"{mark} & {mark}"], timeout_s=0.3)
    assert result.timed_out
    work = asyncio.create_task(sandbox.exec(["sh", "-c", f"echo > started; exec {mark}"]))
    async with within(60):
        while (await sandbox.exec(["test", "-e", "started"])).status != 0:
            assert not work.done()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert (await sandbox.exec(["pgrep", "-f", f"^{mark}"])).stdout == ""


@pytest.mark.slow("CI's step with sandboxes runs it each time")
async def test_limits_hold(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox(file_mb=1, memory_mb=300)
    await sandbox.exec(["sh", "-c", "head -c 3000000 /dev/zero > big"])
    assert (await sandbox.exec(["wc", "-c", "big"])).stdout.split()[0] == str(2**20)


@pytest.mark.slow("CI's step with sandboxes runs it each time")
async def test_the_model_is_reached_through_the_connection(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    fetch = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())"
    async with served_model() as port, within(60):
        own = f"http://127.0.0.1:{port}/v1"
        url = await sandbox.forward(own)
        assert url == await sandbox.forward(own) != own
        assert (await sandbox.exec(["python3", "-c", fetch, url])).stdout == "model\n"


async def test_a_lost_connection_is_transient(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    await sandbox._ssh(["-O", "exit"], None)
    sandbox._arguments = ["-p", "1", "-F", "none"]
    with pytest.raises(SandboxUnavailableError):
        await sandbox.exec(["true"], env={"A": "1"})


async def test_a_machine_that_does_not_answer_is_transient(server: list[str]) -> None:
    sandbox = SshSandbox("127.0.0.1", SandboxLimits(), arguments=["-p", "1", "-F", "none"])
    with pytest.raises(SandboxUnavailableError, match=r"127\.0\.0\.1 by ssh: .*refused"):
        await sandbox.start()


async def test_a_missing_client_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="ssh cannot be started"):
        await SshSandbox("host", SandboxLimits()).start()


async def test_a_missing_client_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox = SshSandbox("user@host", SandboxLimits())
    with pytest.raises(SandboxError, match="ssh cannot be started"):
        await sandbox.start()
    with pytest.raises(SandboxError, match="ssh cannot be started"):
        await sandbox.stop()
    assert os.listdir(tmp_path) == []
