"""Sandboxes on a node of a Ray cluster that has a label."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import ray
from ray_cluster import eventually

from raylight.errors import ConfigError, SandboxError, SandboxUnavailableError
from raylight.sandboxes.folders import abandoned_folders, remove_abandoned
from raylight.sandboxes.ray_node import RaySandbox
from raylight.sandboxes.registry import SandboxSpec
from raylight.sandboxes.sandbox import SandboxLimits

DEADLINE_S = 60


pytestmark = pytest.mark.usefixtures("connected")


@pytest.fixture
def label() -> str:
    """Return the label that Ray gives the cluster's only node."""
    return f"ray.io/node-id={ray.nodes()[0]['NodeID']}"


@pytest.fixture
async def sandbox(label: str) -> AsyncIterator[RaySandbox]:
    made = SandboxSpec.parse(f"ray:{label}").create()
    assert isinstance(made, RaySandbox)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await made.start()
        yield made
    finally:
        await made.stop()


async def test_a_sandbox_on_a_node(sandbox: RaySandbox) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await sandbox.write("sub/given", b"a\xff", executable=True)
        assert await sandbox.read("sub/given") == b"a\xff"
        ended = await sandbox.exec(
            ["sh", "-c", "echo $A $PPID; pwd; cat; exit 3"], env={"A": "b"}, stdin=b"in"
        )
        assert ended.status == 3
        line, folder, given = ended.stdout.splitlines()
        assert (line.split()[0], folder, given) == ("b", sandbox.workspace, "in")
        assert sandbox.root == sandbox.workspace
        assert int(line.split()[1]) != os.getpid()
        with pytest.raises(FileNotFoundError):
            await sandbox.read("missing")
        with pytest.raises(SandboxError, match="no-such-program cannot be started"):
            await sandbox.exec(["no-such-program"])
        assert (await sandbox.exec(["sleep", "60"], timeout_s=0.1)).timed_out
        assert await sandbox.forward("http://127.0.0.1:1/v1") == "http://127.0.0.1:1/v1"
        sandbox._address = "192.0.2.1"
        with pytest.raises(SandboxError, match=r"loopback.*engine\.host"):
            await sandbox.forward("http://127.0.0.1:1/v1")
        folder = sandbox.workspace
        await sandbox.stop()
        await sandbox.stop()
        assert not await asyncio.to_thread(os.path.exists, folder)


@pytest.mark.slow
async def test_a_cancelled_program_ends(sandbox: RaySandbox) -> None:
    async with asyncio.timeout(DEADLINE_S):
        os.mkfifo(f"{sandbox.workspace}/started")  # the cluster's node is this machine
        work = asyncio.create_task(sandbox.exec(["sh", "-c", "echo $$ > started; exec sleep 4321"]))
        pid = int(await sandbox.read("started"))
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert not psutil.pid_exists(pid)


async def test_a_dead_actor_is_a_transient_failure(sandbox: RaySandbox) -> None:
    folder = sandbox.workspace
    async with asyncio.timeout(DEADLINE_S):
        os.mkfifo(f"{folder}/started")
        work = asyncio.create_task(sandbox.exec(["sh", "-c", "echo $$ > started; exec sleep 4321"]))
        await asyncio.to_thread(Path(folder, "started").read_bytes)
        ray.kill(sandbox._actor)
        with pytest.raises(SandboxUnavailableError, match="is lost"):
            await work
        with pytest.raises(SandboxUnavailableError, match="is lost"):
            await sandbox.read("started")
    eventually(lambda: folder in abandoned_folders(), DEADLINE_S, "the end of the sandbox's actor")
    remove_abandoned(folder)
    assert not await asyncio.to_thread(os.path.exists, folder)


@pytest.mark.slow
async def test_a_node_that_does_not_exist_is_a_transient_failure() -> None:
    sandbox = SandboxSpec("ray", "zone=nowhere", options={"start_s": 1.0}).create()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(SandboxUnavailableError, match=r'ray start --labels="zone=nowhere"'):
            await sandbox.start()
        with pytest.raises(SandboxError, match="call start"):
            await sandbox.read("x")


@pytest.mark.slow
async def test_a_cancelled_start_leaves_no_actor() -> None:
    sandbox = SandboxSpec("ray", "zone=nowhere").create()
    work = asyncio.create_task(sandbox.start())
    await asyncio.wait([work], timeout=0.1)
    assert isinstance(sandbox, RaySandbox)
    actor = sandbox._actor
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await sandbox.stop()
    with pytest.raises(ray.exceptions.RayActorError):
        await asyncio.wait_for(actor.address.remote(), DEADLINE_S)


@pytest.mark.slow
def test_an_actor_ends_with_its_runner(label: str) -> None:
    @ray.remote(num_cpus=0)
    class Runner:
        async def hold(self, spec: SandboxSpec) -> tuple[str, int]:
            self.sandbox = spec.create()
            await self.sandbox.start()
            ended = await self.sandbox.exec(["sh", "-c", "echo $PPID"])
            return self.sandbox.workspace, int(ended.stdout)

    runner = Runner.remote()
    folder, pid = ray.get(runner.hold.remote(SandboxSpec.parse(f"ray:{label}")), timeout=DEADLINE_S)
    holder = psutil.Process(pid)
    ray.kill(runner)
    eventually(lambda: not holder.is_running(), DEADLINE_S, "the end of the sandbox's actor")
    assert folder in abandoned_folders()
    remove_abandoned(folder)


@pytest.mark.parametrize(
    ("image", "inner", "message"),
    [
        (None, "process", "needs a label"),
        ("zone", "process", "needs a label"),
        ("zone=a", "podman", "needs what it starts from"),
        ("zone=a", "nothing", "'nothing' is unknown"),
    ],
)
def test_a_wrong_description_is_an_error(image: str | None, inner: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SandboxSpec.parse(SandboxSpec("ray", image, options={"inner": inner}))
    with pytest.raises(ConfigError, match="cannot limit network"):
        SandboxSpec.parse(SandboxSpec("ray", "zone=a", SandboxLimits(network=False)))
