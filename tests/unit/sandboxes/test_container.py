"""Sandboxes that are containers: real ones of podman where it runs, and the command lines of both tools."""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from podman_image import podman
from sandbox_helpers import served_model, starting
from unit_helpers import within

from raylight.errors import SandboxError, SandboxUnavailableError
from raylight.sandboxes.container import LABEL, PodmanSandbox
from raylight.sandboxes.registry import SandboxSpec
from raylight.sandboxes.sandbox import MAX_STDOUT, SandboxLimits

MACHINES_PROGRAMS = [
    f"--volume={path}:{path}:ro" for path in ("/usr", "/lib", "/lib64") if os.path.exists(path)
]


@pytest.fixture
async def make_sandbox(podman_image: str) -> AsyncIterator[Callable]:
    """Start sandboxes, and stop them at the end."""

    def make(arguments: tuple[str, ...] = (), **limits: object) -> PodmanSandbox:
        return PodmanSandbox(podman_image, SandboxLimits(**limits), arguments=arguments)  # type: ignore[arg-type]

    async with starting(make) as start:
        yield start


async def test_a_container_is_a_sandbox(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox(memory_mb=200)
    assert (sandbox.workspace, sandbox.root, sandbox.HAS_IMAGE) == ("/app", "", True)
    result = await sandbox.exec(["sh", "-c", "echo $A; cat; pwd; exit 3"], env={"A": "b c"}, stdin=b"in\n")
    assert (result.status, result.stdout) == (3, "b c\nin\n/app\n")
    content = b"abc\xff" * (MAX_STDOUT // 3)
    await sandbox.write("/app/deep/file", content)
    assert await sandbox.read("/app/deep/file") == content
    with pytest.raises(FileNotFoundError):
        await sandbox.read("missing")
    assert (await sandbox.exec(["no-such-program"])).status == 127
    name = sandbox._name
    await sandbox.stop()
    assert name not in (await asyncio.to_thread(podman, "ps", "--all")).stdout


@pytest.mark.slow("CI's step with sandboxes runs it each time")
async def test_a_program_ends_at_its_limit_and_a_server_stays(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    await sandbox.exec(["sh", "-c", "setsid sleep 1234 > /dev/null 2>&1 &"])
    result = await sandbox.exec(["sh", "-c", "sleep 4321 & sleep 4321"], timeout_s=0.5)
    assert (result.timed_out, result.status) == (True, -15)
    processes = (await sandbox.exec(["ps"])).stdout
    assert "sleep 4321" not in processes
    assert "sleep 1234" in processes


@pytest.mark.slow("CI's step with sandboxes runs it each time")
async def test_a_cancelled_program_ends(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    work = asyncio.create_task(sandbox.exec(["sh", "-c", "echo > started; exec sleep 4321"]))
    async with within(60):
        while (await sandbox.exec(["test", "-e", "started"])).status != 0:
            assert not work.done()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert "sleep 4321" not in (await sandbox.exec(["ps"])).stdout


@pytest.mark.slow("CI's step with sandboxes runs it each time")
async def test_the_number_of_processes_is_limited(make_sandbox: Callable) -> None:
    sandbox = await make_sandbox(processes=20)
    bomb = "n=0; while [ $n -lt 60 ]; do sleep 30 & n=$((n+1)); done; wait"
    assert "fork" in (await sandbox.exec(["sh", "-c", bomb], timeout_s=20)).stderr


@pytest.mark.slow("CI's step with sandboxes runs it each time")
@pytest.mark.parametrize("network", [True, False])
async def test_the_model_is_reached_with_and_without_a_network(make_sandbox: Callable, network: bool) -> None:
    # the relay of a sandbox without a network needs a Python, here that of the machine
    if not network and sys.platform == "linux" and shutil.which("python3", path="/usr/bin") is None:
        pytest.skip("needs /usr/bin/python3")
    sandbox = await make_sandbox(() if network else tuple(MACHINES_PROGRAMS), network=network)
    async with served_model() as port, within(60):
        url = await sandbox.forward(f"http://127.0.0.1:{port}/v1")
        result = await sandbox.exec(["/bin/busybox", "wget", "-q", "-O", "-", url])
        assert result.stdout == "model", result.stderr
        if not network:
            other = await sandbox.exec(["/bin/busybox", "wget", "-O", "-", f"http://127.0.0.1:{port}"])
            assert "refused" in other.stderr


async def test_an_image_that_is_not_there_is_an_error(podman_image: str) -> None:
    sandbox = PodmanSandbox("localhost/no-such-image:1", SandboxLimits(), arguments=["--pull=never"])
    with pytest.raises(SandboxError, match="has no image localhost/no-such-image:1"):
        await sandbox.start()


@pytest.mark.slow("CI's step with sandboxes runs it each time")
async def test_an_image_is_built_from_a_folder(podman_image: str, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("given")
    (tmp_path / "Dockerfile").write_text(f"FROM {podman_image}\nCOPY given /app/given\n")
    built = await PodmanSandbox.build(tmp_path)
    assert await PodmanSandbox.build(tmp_path) == built
    sandbox = PodmanSandbox(built, SandboxLimits())
    try:
        await sandbox.start()
        assert await sandbox.read("given") == b"given"
    finally:
        await sandbox.stop()
        podman("rmi", "--force", built)
    (tmp_path / "Dockerfile").write_text(f"FROM {podman_image}\nRUN exit 7\n")
    with pytest.raises(SandboxError, match="build of"):
        await PodmanSandbox.build(tmp_path)


@pytest.mark.slow("CI's step with sandboxes runs it each time")
async def test_a_container_without_its_runner_is_removed(
    make_sandbox: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await make_sandbox()
    monkeypatch.setattr("raylight.sandboxes.container.runner_id", lambda separator: "999999 1")
    orphan = await make_sandbox()
    await sandbox.remove_orphans()
    names = (
        await asyncio.to_thread(podman, "ps", "--filter", f"label={LABEL}", "--format", "{{.Names}}")
    ).stdout
    assert sandbox._name in names
    assert orphan._name not in names


# without a tool


@pytest.fixture
def fake_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a docker into PATH that records its arguments and answers as `answer` says."""
    tool = tmp_path / "docker"
    tool.write_text('#!/bin/sh\necho "$@" >> "$0.log"\n. "$0.answer"\n')
    tool.chmod(0o755)
    (tmp_path / "docker.answer").write_text("case $1 in inspect) echo /app;; esac")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tool


def calls_of(tool: Path) -> list[str]:
    log = tool.with_name("docker.log")
    return log.read_text().splitlines() if log.exists() else []


async def test_the_commands_of_docker(fake_tool: Path) -> None:
    limits = SandboxLimits(memory_mb=64, processes=9, network=False)
    sandbox = SandboxSpec("docker", "python:3.12", limits, {"arguments": ["--gpus=all"]}).create()
    await sandbox.start()
    await sandbox.exec(["python", "-c", "a b"], env={"KEY": "secret"}, cwd="sub")
    await sandbox.stop()
    run, where, execute, remove = [call for call in calls_of(fake_tool) if not call.startswith("ps ")]
    for part in ("--memory 64m", "--pids-limit 9", "--network none", "--gpus=all python:3.12 -c"):
        assert part in run
    assert where.startswith("inspect")
    assert "--workdir /app/sub --env KEY --env RAYLIGHT_REMOTE_PROGRAM" in execute
    assert "secret" not in execute
    assert remove.startswith("rm --force --volumes raylight-")


async def test_a_programs_variables_are_not_the_tools(fake_tool: Path) -> None:
    # podman without root has its containers in HOME and XDG_DATA_HOME, and docker its contexts in HOME
    given = 'case $1$2 in --env*=*) export "$2";; esac'
    execute = f'echo "$HOME" > "$0.home"; until [ "${{1#raylight-}}" != "$1" ]; do {given}; shift; done'
    fake_tool.with_name("docker.answer").write_text(
        f'case $1 in inspect) echo /app;; exec) {execute}; shift; exec "$@";; esac'
    )
    sandbox = SandboxSpec("docker", "x").create()
    await sandbox.start()
    variables = {"HOME": "/srv/home", "PATH": "/srv/bin", "KEY": "a\n'b' $HOME"}
    show = 'printf "%s\n" "$HOME" "$PATH" "$KEY"; export'
    result = await sandbox.exec(["/bin/sh", "-c", show], env=variables)
    await sandbox.stop()
    assert result.stdout.startswith("/srv/home\n/srv/bin\na\n'b' $HOME\n")
    assert fake_tool.with_name("docker.home").read_text().strip() == os.environ["HOME"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("Cannot connect to the Docker daemon", SandboxUnavailableError),
        ("pull access denied for x", SandboxError),
    ],
)
async def test_a_failed_start_is_transient_or_not(
    fake_tool: Path, message: str, error: type[Exception]
) -> None:
    fake_tool.with_name("docker.answer").write_text(f"echo '{message}' >&2; test $1 != run")
    sandbox = SandboxSpec("docker", "x").create()
    with pytest.raises(error, match=message) as raised:
        await sandbox.start()
    assert type(raised.value) is error
    assert any(call.startswith("rm ") for call in calls_of(fake_tool))


async def test_a_tool_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PodmanSandbox, "TOOL", "no-such-podman")
    with pytest.raises(SandboxError, match="no-such-podman cannot be started"):
        await PodmanSandbox("x", SandboxLimits()).start()
