"""Sandboxes of cloud providers, against fakes of their packages that run programs on this machine."""

import asyncio
import importlib
import inspect
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cloud_fakes import FAKES, REJECTIONS, FakeCloud, compared_callables
from sandbox_helpers import alive
from unit_helpers import until, within

from raylight.errors import SandboxError, SandboxUnavailableError
from raylight.harnesses.reward_command import RewardCommand
from raylight.sandboxes import cloud as cloud_module
from raylight.sandboxes.registry import SandboxSpec
from raylight.sandboxes.sandbox import SandboxLimits

BACKENDS = sorted(FAKES)
GOOGLE = "http://8.8.8.8:8000/v1"


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cloud(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    fake = FakeCloud(tmp_path)
    modules = FAKES[backend](fake)
    monkeypatch.setattr(cloud_module, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    return fake


async def test_a_cloud_sandbox(backend: str, cloud: FakeCloud) -> None:
    sandbox = SandboxSpec.parse(SandboxSpec(backend, "name:1", options={"lifetime_s": 120})).create()
    async with within(60):
        await sandbox.start()
        assert (sandbox.workspace, sandbox.root) == (str(cloud.folder), "")
        script = "echo $A; cat; pwd; echo out >&2; exit 3"
        await sandbox.exec(["mkdir", "it's"])
        ended = await sandbox.exec(["sh", "-c", script], env={"A": "b 'c'"}, cwd="it's", stdin=b"in\n")
        assert (ended.status, ended.stderr) == (3, "out\n")
        assert ended.stdout == f"b 'c'\nin\n{cloud.folder}/it's\n"
        content = bytes(range(256)) * 600
        await sandbox.write("deep/file", content, executable=True)
        assert await sandbox.read("deep/file") == content
        assert (await sandbox.exec(["test", "-x", "deep/file"])).status == 0
        with pytest.raises(FileNotFoundError):
            await sandbox.read("missing")
        assert (await sandbox.exec(["no-such-program"])).status == 127
        await sandbox.stop()
        await sandbox.stop()
    assert cloud.names().count("create") == cloud.names().count("delete") == 1
    created = dict(cloud.calls)["create"]
    assert "name:1" in str(created)
    assert "120" in str(created) or "ttl_minutes=2" in str(created)


async def test_a_program_ends_at_its_limit(
    backend: str, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_module, "WAIT_S", 0.1)  # so that several calls wait
    sandbox = SandboxSpec(backend, "x").create()
    async with within(60):
        await sandbox.start()
        program = ["sh", "-c", "echo $$; exec sleep 4321"]
        ended = await sandbox.exec(program, timeout_s=0.3)
        assert (ended.status, ended.timed_out) == (-15, True)
        assert not alive(int(ended.stdout))
        await sandbox.exec(["sh", "-c", "sleep 4322 & echo $! > server"])
        server = (await sandbox.read("server")).decode()
        assert alive(int(server)), "a server that an agent started is there for its tests"
        os.kill(int(server), signal.SIGKILL)
        await sandbox.stop()


async def test_a_cancelled_program_ends(backend: str, cloud: FakeCloud) -> None:
    sandbox = SandboxSpec(backend, "x").create()
    async with within(60):
        await sandbox.start()
        work = asyncio.create_task(
            sandbox.exec(["sh", "-c", "echo $$ > pid; mv pid started; exec sleep 4321"])
        )
        started = cloud.folder / "started"
        await until(started.exists)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert not alive(int(await sandbox.read("started")))
        await sandbox.stop()


async def test_a_start_that_is_cancelled_is_removed(backend: str, cloud: FakeCloud) -> None:
    sandbox: Any = SandboxSpec(backend, "x").create()
    reached, goes_on = asyncio.Event(), asyncio.Event()
    create = sandbox.create

    async def wait_and_create() -> None:
        reached.set()
        await goes_on.wait()
        await create()

    sandbox.create = wait_and_create
    async with within(60):
        starting = asyncio.create_task(sandbox.start())
        await reached.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        goes_on.set()
        await sandbox.stop()
    assert "delete" in cloud.names()


async def test_a_failed_start_is_transient_or_not(backend: str, cloud: FakeCloud) -> None:
    for failure, kind in (
        (REJECTIONS[backend], SandboxError),
        (OSError("no route"), SandboxUnavailableError),
    ):
        cloud.failures["create"] = failure
        with pytest.raises(SandboxError, match=str(failure)) as raised:
            await SandboxSpec(backend, "x").create().start()
        assert type(raised.value) is kind


async def test_a_sandbox_that_fails_later_is_a_transient_failure(backend: str, cloud: FakeCloud) -> None:
    sandbox = SandboxSpec(backend, "x").create()
    await sandbox.start()
    with pytest.raises(SandboxUnavailableError, match="does not run the scripts"):
        await sandbox.run_script("exit 3")  # type: ignore[attr-defined]
    cloud.failures["run"] = ConnectionError("reset")
    with pytest.raises(SandboxUnavailableError, match="reset"):
        await sandbox.exec(["true"])
    await sandbox.stop()


async def test_the_model_needs_an_address_that_is_reached(backend: str, cloud: FakeCloud) -> None:
    sandbox = SandboxSpec(backend, "x").create()
    assert await sandbox.forward(GOOGLE) == GOOGLE
    with pytest.raises(SandboxError, match="gateway_url"):
        await sandbox.forward("http://127.0.0.1:8000/v1")
    if backend == "kubernetes":
        assert await sandbox.forward("http://10.0.0.7/v1") == "http://10.0.0.7/v1"
    else:
        with pytest.raises(SandboxError, match=r"10\.0\.0\.7"):
            await sandbox.forward("http://10.0.0.7/v1")
    public = SandboxSpec(backend, "x", options={"gateway_url": "https://model.example.com"}).create()
    url = await public.forward("http://127.0.0.1:8000/rollout/1/v1")
    assert url == "https://model.example.com/rollout/1/v1"


async def test_a_package_that_is_not_installed_is_an_error(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(name: str) -> None:
        raise ImportError(f"no module {name}")

    monkeypatch.setattr(cloud_module, "importlib", SimpleNamespace(import_module=not_installed))
    with pytest.raises(SandboxError, match="pip install"):
        await SandboxSpec(backend, "x").create().start()


async def test_limits_and_arguments_reach_the_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {
        "modal": ({"gpu": "T4"}, {"gpu": "T4", "memory": (1500, 1500)}),
        "daytona": ({"os_user": "u"}, {}),
    }
    for backend, (arguments, expected) in wanted.items():
        cloud = FakeCloud(tmp_path)
        modules = FAKES[backend](cloud)
        monkeypatch.setattr(cloud_module, "importlib", SimpleNamespace(import_module=modules.__getitem__))
        sandbox = SandboxSpec(backend, "x", SandboxLimits(memory_mb=1500), {"arguments": arguments}).create()
        await sandbox.start()
        await sandbox.stop()
        created = dict(cloud.calls)["create"]
        assert expected.items() <= created.items()
        if backend == "daytona":
            assert (created["params"].resources.memory, created["params"].os_user) == (2, "u")


@pytest.mark.slow
def test_the_fakes_have_the_signatures_of_the_packages(backend: str, tmp_path: Path) -> None:
    for name, fake in compared_callables(backend, FakeCloud(tmp_path)):
        compare(name, fake)


def compare(name: str, fake: Any) -> None:
    """Assert that the package has each parameter of a fake, in its kind, and needs no other."""
    parts = name.split(".")
    pytest.importorskip(parts[0], reason=f"needs {parts[0]}")
    real: Any = None
    for split in range(len(parts), 0, -1):
        try:
            real = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            real = getattr(real, part)
        break
    theirs, ours = inspect.signature(real).parameters, inspect.signature(fake).parameters
    model = getattr(real, "model_fields", None)
    for key, parameter in ours.items():
        if model is not None:
            assert key in model, f"{name} has no {key}"
            continue
        assert key in theirs, f"{name} has no {key}"
        kinds = (theirs[key].kind, parameter.kind)
        assert kinds[0] == kinds[1], f"{name}({key}) is {kinds[0]}"
    needed = {
        key
        for key, parameter in theirs.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    assert model is not None or needed <= ours.keys(), f"{name} needs {needed - ours.keys()}"


async def test_a_reward_command_has_a_sandbox_of_its_own(backend: str, cloud: FakeCloud) -> None:
    spec = SandboxSpec.parse(SandboxSpec(backend, "name:1"))
    sandbox = spec.create()
    judge = RewardCommand(["cat", "answer"], reads="stdout")
    async with within(60):
        await sandbox.start()
        await sandbox.write("work/answer", b"0.5")
        assert await judge.score(sandbox, f"{cloud.folder}/work", None, spec) == 0.5
    made = [name for name in cloud.names() if name in ("create", "delete")]
    assert made == ["create", "delete"] * 2
