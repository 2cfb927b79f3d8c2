"""Loads of the replicas are measured when the trainer asks for them, and only then."""

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from coordinator_helpers import Life, Replica, SpyEngine, join
from ray.exceptions import ActorUnavailableError
from unit_helpers import until, within

from raylight._utils.aio import cancel_all
from raylight.engines.protocol import EngineLoad
from raylight.weights.client import CoordinatorClient
from raylight.weights.coordinator import ReplicaCoordinator
from raylight.weights.executor import OrderExecutor
from raylight.weights.orders import ReplicaReport


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
    """Replicas that report their loads, which are numbered."""
    measured, tasks = {}, []
    async with within():
        for name in names:
            measure, measured[name] = counted()
            life = (lives or {}).get(name)
            executor = OrderExecutor(
                name,
                SpyEngine(),
                coordinator,
                never,
                measure=measure,
                call_forever=functools.partial(list, [life]) if life else None,
            )
            await executor.catch_up()
            tasks.append(asyncio.create_task(executor.run()))
        await until(lambda: all(measured.values()))
        yield measured
    await cancel_all(tasks)


async def never() -> None:
    raise AssertionError("the coordinator was taken for lost")


async def test_each_call_returns_new_measurements_of_all_replicas() -> None:
    coordinator = ReplicaCoordinator()
    client = CoordinatorClient(coordinator)
    async with reporting(coordinator, "a", "b") as measured:
        before = await client.loads()
        after = await client.loads()
        assert all(after[name].running > before[name].running > 0 for name in "ab")
        first, second = await asyncio.gather(client.loads(), client.loads())
        assert set(first) == set(second) == {"a", "b"}
    assert all(len(made) <= 6 for made in measured.values())


async def test_a_replica_that_does_not_report_is_left_out() -> None:
    coordinator = ReplicaCoordinator()
    async with reporting(coordinator, "a", "b"):
        await Replica(coordinator, "starting").subscribe()
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


class Restarting:
    """A coordinator's handle whose calls fail."""

    def __getattr__(self, name: str) -> Any:
        async def fail(*args: Any) -> Any:
            raise ActorUnavailableError("restarts", None)

        return SimpleNamespace(remote=fail)


async def test_a_coordinator_that_restarts_has_no_loads() -> None:
    assert await CoordinatorClient(Restarting()).loads() == {}


async def test_a_busy_replica_reports_too() -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        busy = await join(coordinator, "a")
        sleeping = asyncio.create_task(CoordinatorClient(coordinator).sleep(60.0))
        task = await busy.next()
        loading = asyncio.create_task(CoordinatorClient(coordinator).loads())
        await asyncio.sleep(0)
        await coordinator.poll("a", ReplicaReport(busy.state, load=EngineLoad(running=3), waits=False))
        assert await loading == {"a": EngineLoad(running=3)}
        await busy.finish(task)
        await sleeping
