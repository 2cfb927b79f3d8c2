"""The limit on sandboxes at once."""

import asyncio
import pickle
from typing import Any

import pytest
from unit_helpers import within

from raylight.errors import ConfigError, SandboxUnavailableError
from raylight.sandboxes.process import ProcessSandbox
from raylight.sandboxes.registry import SandboxPool, SandboxSpec


class RecordedSandbox(ProcessSandbox):
    """Sandbox that records its life in LOG, and whose start and stop wait for an event."""

    log: list[str] = []  # noqa: RUF012
    starts: asyncio.Event
    stops: asyncio.Event

    def __init__(self, image: str | None, limits: Any, *, name: str = "a", fails: bool = False) -> None:
        super().__init__(image, limits)
        self._name, self._fails = name, fails

    async def start(self) -> None:
        self.log.append(f"start {self._name}")
        await self.starts.wait()
        if self._fails:
            raise SandboxUnavailableError("no room")
        await super().start()

    async def stop(self) -> None:
        self.log.append(f"stop {self._name}")
        await self.stops.wait()
        await super().stop()
        self.log.append(f"stopped {self._name}")


def recorded(**options: Any) -> SandboxSpec:
    return SandboxSpec(f"{__name__}.RecordedSandbox", options=options)


@pytest.fixture(autouse=True)
async def log() -> list[str]:
    RecordedSandbox.log = []
    RecordedSandbox.starts, RecordedSandbox.stops = asyncio.Event(), asyncio.Event()
    RecordedSandbox.starts.set()
    RecordedSandbox.stops.set()
    return RecordedSandbox.log


async def turns() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_sandboxes_wait_in_their_order(log: list[str]) -> None:
    pool, released = SandboxPool(2), asyncio.Event()

    async def use(name: str) -> None:
        async with pool.started(recorded(name=name)) as sandbox:
            await sandbox.write("file", b"")
            await released.wait()

    async with within(10), asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(use(name))
        await turns()
        assert log == ["start a", "start b"]
        released.set()
    assert [line for line in log if line.startswith("start ")] == [f"start {name}" for name in "abcd"]
    assert sorted(line for line in log if "stopped" in line) == [f"stopped {name}" for name in "abcd"]


async def test_a_start_that_is_cancelled_is_stopped(log: list[str]) -> None:
    pool = SandboxPool(1)
    RecordedSandbox.starts.clear()
    RecordedSandbox.stops.clear()

    async def use() -> None:
        async with pool.started(recorded()):
            raise AssertionError("not started")

    async with within(10):
        work = asyncio.create_task(use())
        await turns()
        for _ in range(2):  # the second cancellation does not cut the stop short
            work.cancel()
            await turns()
        assert log == ["start a", "stop a"]
        other = asyncio.create_task(use())
        await turns()
        assert log == ["start a", "stop a"], "the place is taken until the sandbox has stopped"
        RecordedSandbox.stops.set()
        with pytest.raises(asyncio.CancelledError):
            await work
        await turns()
        assert log == ["start a", "stop a", "stopped a", "start a"]
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other


async def test_a_failed_start_frees_its_place(log: list[str]) -> None:
    pool = SandboxPool(1)
    for _ in range(2):
        with pytest.raises(SandboxUnavailableError, match="no room"):
            async with within(10), pool.started(recorded(fails=True)):
                raise AssertionError("not started")
    async with within(10), pool.started(recorded(name="b")):
        pass
    assert log[-3:] == ["start b", "stop b", "stopped b"]


def test_a_pool_travels_and_serves_several_loops() -> None:
    pool = pickle.loads(pickle.dumps(SandboxPool(1)))

    async def use_twice() -> None:
        async def use() -> None:
            async with pool.started(SandboxSpec()):
                await asyncio.sleep(0)

        await asyncio.gather(use(), use())

    for _ in range(2):
        asyncio.run(use_twice())


@pytest.mark.parametrize("limit", [0, -1, True])
def test_a_wrong_limit_is_an_error(limit: int) -> None:
    with pytest.raises(ConfigError, match="max_sandboxes"):
        SandboxPool(limit)
