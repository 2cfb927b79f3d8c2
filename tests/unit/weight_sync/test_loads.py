"""Loads of the replicas are measured when the trainer asks for them, and only then."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from coordinator_helpers import Life, join
from ray.exceptions import ActorUnavailableError, RayActorError
from unit_helpers import until, within

from raylight._utils.aio import cancel_all
from raylight.engines.protocol import EngineLoad
from raylight.weight_sync import client as module
from raylight.weight_sync.client import CoordinatorClient, ReplicaClient
from raylight.weight_sync.coordinator import ReplicaCoordinator


def counted() -> tuple[Callable[[], EngineLoad], list[int]]:
    """Return a measurement whose loads are numbered, and the numbers of those made."""
    numbers, made = itertools.count(1), list[int]()

    def measure() -> EngineLoad:
        made.append(next(numbers))
        return EngineLoad(running=made[-1])

    return measure, made


@asynccontextmanager
async def reporting(
    coordinator: Any, *names: str, lives: dict[str, Life] | None = None
) -> AsyncIterator[dict[str, list[int]]]:
    measured, tasks = {}, []
    async with within():
        for name in names:
            await join(coordinator, name, (lives or {}).get(name))
            measure, measured[name] = counted()
            tasks.append(asyncio.create_task(ReplicaClient(name, coordinator).report_loads(measure)))
        await until(lambda: all(measured.values()))
        yield measured
    await cancel_all(tasks)


async def test_each_call_returns_new_measurements_of_all_replicas() -> None:
    coordinator = ReplicaCoordinator()
    client = CoordinatorClient(coordinator)
    async with reporting(coordinator, "a", "b") as measured:
        assert await client.loads() == {name: EngineLoad(running=2) for name in "ab"}
        assert await client.loads() == {name: EngineLoad(running=3) for name in "ab"}
        first, second = await asyncio.gather(client.loads(), client.loads())
        assert set(first) == set(second) == {"a", "b"}
    assert all(len(made) <= 5 for made in measured.values())


async def test_a_replica_that_does_not_report_is_left_out() -> None:
    coordinator = ReplicaCoordinator()
    async with reporting(coordinator, "a", "b"):
        await join(coordinator, "starting")
        await coordinator.report_load("frozen", 0, EngineLoad(), 0.0)
        await join(coordinator, "frozen")
        assert set(await CoordinatorClient(coordinator).loads(0.05)) == {"a", "b"}


async def test_a_replica_that_is_gone_is_forgotten() -> None:
    coordinator, life = ReplicaCoordinator(), Life()
    async with reporting(coordinator, "a", "b", lives={"b": life}):
        client = CoordinatorClient(coordinator)
        assert set(await client.loads()) == {"a", "b"}
        life.end()
        await until(lambda: "b" not in coordinator._quorum)
        assert set(await client.loads()) == {"a"}


async def test_no_replicas_have_no_loads() -> None:
    assert await CoordinatorClient(ReplicaCoordinator()).loads() == {}


class Failing:
    """A coordinator's handle whose calls fail with one error after the other."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def _fail(self, *args: Any) -> Any:
        raise self.errors.pop(0)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=self._fail)


async def test_a_coordinator_that_restarts_has_no_loads_and_is_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_DELAY_S", 0.0)
    assert await CoordinatorClient(Failing(ActorUnavailableError("restarts", None))).loads() == {}
    coordinator = Failing(ActorUnavailableError("restarts", None), RayActorError())
    async with within():
        await ReplicaClient("a", coordinator).report_loads(EngineLoad)
    assert coordinator.errors == []
