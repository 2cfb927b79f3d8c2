"""The command lines of Apptainer, recorded by a program of that name."""

import asyncio
import json
import os
import tempfile
from pathlib import Path

import psutil
import pytest

from raylight.errors import SandboxError, SandboxUnavailableError
from raylight.sandboxes.container import ApptainerSandbox, runner_id
from raylight.sandboxes.registry import SandboxSpec
from raylight.sandboxes.sandbox import SandboxLimits

TOOL = """#!/bin/sh
echo "$@" >> "$0.log"
. "$0.answer"
case $1 in exec)
  while [ "${1#instance://}" = "$1" ]; do shift; done
  shift
  TOKEN=$APPTAINERENV_TOKEN exec "$@";;
esac
"""
"""Apptainer that runs programs on this machine."""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool = tmp_path / "apptainer"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    tool.with_name("apptainer.answer").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(ApptainerSandbox, "orphans_removed", {"apptainer"})
    return tool


def calls_of(tool: Path) -> list[str]:
    return tool.with_name("apptainer.log").read_text().splitlines()


async def test_the_commands_of_apptainer(tool: Path, tmp_path: Path) -> None:
    limits = SandboxLimits(memory_mb=64, processes=9)
    sandbox = SandboxSpec("apptainer", "python:3.12", limits, {"arguments": ["--nv"]}).create()
    await sandbox.start()
    assert (sandbox.workspace, sandbox.root) == ("/workspace", "")
    ended = await sandbox.exec(
        ["sh", "-c", "echo $TOKEN $HOME; exit 3"],
        env={"TOKEN": "secret", "HOME": "/workspace/home"},
        cwd="sub",
    )
    assert (ended.status, ended.stdout) == (3, "secret /workspace/home\n")
    path = f"{tmp_path}/deep/given"  # an absolute path, which the machine has
    await sandbox.write(path, b"a\xff")
    assert await sandbox.read(path) == b"a\xff"
    with pytest.raises(FileNotFoundError):
        await sandbox.read(f"{tmp_path}/missing")
    assert await sandbox.forward("http://127.0.0.1:1/v1") == "http://127.0.0.1:1/v1"
    await sandbox.stop()
    await sandbox.stop()
    start, execute, *_, stop = calls_of(tool)
    folder, name = start.split()[5].removesuffix(":/workspace"), start.split()[-1]
    assert start == (
        f"instance start --containall --writable-tmpfs --bind {folder}:/workspace "
        f"--memory 64M --pids-limit 9 --nv docker://python:3.12 {name}"
    )
    assert execute.startswith(f"exec --cleanenv --pwd /workspace/sub instance://{name} env HOME=")
    assert "secret" not in execute
    assert stop == f"instance stop --force {name}"
    assert not await asyncio.to_thread(os.path.exists, folder)


@pytest.mark.parametrize(
    ("image", "started"),
    [
        ("/images/python.sif", "/images/python.sif"),
        ("oras://registry/python:3", "oras://registry/python:3"),
        ("/usr", "/usr"),
    ],
)
async def test_an_image_may_be_a_file_a_uri_or_a_folder(tool: Path, image: str, started: str) -> None:
    sandbox = SandboxSpec.parse(f"apptainer:{image}").create()
    await sandbox.start()
    await sandbox.stop()
    assert calls_of(tool)[0].split()[-2] == started


async def test_a_program_ends_at_its_limit(tool: Path) -> None:
    sandbox = SandboxSpec("apptainer", "x").create()
    await sandbox.start()
    ended = await sandbox.exec(["sleep", "4321"], cwd="/", timeout_s=0.2)
    assert (ended.timed_out, ended.status) == (True, -15)
    await sandbox.stop()


@pytest.mark.parametrize("clock_moved", [0, 86_400, -900])
async def test_an_instance_without_its_runner_is_stopped(
    tool: Path, clock_moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [
        f"raylight-{runner_id('-')}-aa",
        "raylight-999999-1-bb",
        "web",
        "raylight-x-y-cc",
    ]
    if not clock_moved:  # the form of version 0.3.0
        names.append(f"raylight-{os.getpid()}-{psutil.Process().create_time():.0f}-dd")
    created, booted = psutil.Process.create_time, psutil.boot_time()
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: created(process) + clock_moved)
    monkeypatch.setattr(psutil, "boot_time", lambda: booted + clock_moved)
    listed = json.dumps({"instances": [{"instance": name, "pid": 1} for name in names]})
    tool.with_name("apptainer.answer").write_text(f"case $2 in list) echo '{listed}';; esac")
    sandbox = SandboxSpec("apptainer", "x").create()
    assert isinstance(sandbox, ApptainerSandbox)
    await sandbox.remove_orphans()
    stopped = [call.split()[-1] for call in calls_of(tool) if " stop " in call]
    assert stopped == ["raylight-999999-1-bb", "raylight-x-y-cc"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("FATAL: while setting up cgroups", SandboxUnavailableError),
        ("FATAL: could not open image /x: no such file or directory", SandboxError),
    ],
)
async def test_a_failed_start_is_transient_or_not(tool: Path, message: str, error: type[Exception]) -> None:
    tool.with_name("apptainer.answer").write_text(f"echo '{message}' >&2; test $2 != start || exit 255")
    with pytest.raises(error, match=message[:30]) as raised:
        await SandboxSpec("apptainer", "/x").create().start()
    assert type(raised.value) is error
    assert calls_of(tool)[-1].startswith("instance stop")


async def test_a_tool_that_is_not_installed_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ApptainerSandbox, "orphans_removed", {"apptainer"})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox = SandboxSpec("apptainer", "x").create()
    for call in (sandbox.start, sandbox.stop):
        with pytest.raises(SandboxError, match="apptainer cannot be started"):
            await call()
    assert await asyncio.to_thread(os.listdir, tmp_path) == []
