"""The client mirrors a coordinator, restores it after a restart, and restarts one that hangs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from coordinator_helpers import PAYLOAD_REF, Versions, join, versions_of
from ray.exceptions import ActorDiedError, ActorUnavailableError
from unit_helpers import until, within

from raylight._utils.aio import cancel_all
from raylight.weights import client
from raylight.weights.client import CoordinatorClient
from raylight.weights.coordinator import ReplicaCoordinator


class Actor:
    """A stand-in for the actor's handle."""

    def __init__(self) -> None:
        self.coordinator: ReplicaCoordinator | None = ReplicaCoordinator()
        self.hangs = False
        self.dead = False
        self.kills = 0

    def __getattr__(self, name: str) -> Any:
        async def remote(*args: Any) -> Any:
            if self.dead:
                raise ActorDiedError()
            if self.hangs:
                await asyncio.Event().wait()
            if self.coordinator is None:
                raise ActorUnavailableError("restarting", None)
            return await getattr(self.coordinator, name)(*args)

        return type("Method", (), {"remote": staticmethod(remote)})

    def restart(self, handle: Any) -> None:
        self.kills += 1
        self.hangs = False
        self.coordinator = ReplicaCoordinator(restored=False)


@asynccontextmanager
async def kept(actor: Actor) -> AsyncIterator[tuple[CoordinatorClient, list[str]]]:
    reports: list[str] = []
    keeping = CoordinatorClient(actor, 0.0, reports.append, actor.restart)
    task = asyncio.create_task(keeping.keep())
    async with within():
        yield keeping, reports
    await cancel_all([task])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (client, "GRACE_S", 0.05),
        (client, "RETRY_DELAY_S", 0.01),
        (client, "WATCH_TIMEOUT_S", 0.05),
        (client, "PATIENCE_S", 0.2),
    ):
        monkeypatch.setattr(module, name, seconds)


async def test_a_restarted_coordinator_has_the_orders_and_the_replicas_of_the_earlier_one() -> None:
    actor = Actor()
    async with kept(actor) as (keeping, reports):
        assert actor.coordinator
        replica = await join(actor.coordinator, "a")
        obeying = asyncio.create_task(replica.do())
        assert len(await keeping.publish(5, PAYLOAD_REF, 5.0, adapter="x")) == 1
        await obeying
        actor.restart(None)
        await until(lambda: keeping.restarts == 1)
        assert versions_of(actor.coordinator) == Versions(0, {"x": 5})
        assert keeping.live_replicas == 1
        assert reports == ["the replica coordinator was restarted and restored"]


async def test_an_eviction_is_reported_once() -> None:
    actor = Actor()
    async with kept(actor) as (keeping, reports):
        assert actor.coordinator
        await join(actor.coordinator, "a")
        actor.coordinator._quorum.evict("a", "it was late")
        await until(lambda: bool(reports))
        await join(actor.coordinator, "b")
        await until(lambda: "b" in keeping._state.replicas)
        assert reports == ["engine replica a was evicted and is replaced: it was late"]
        assert keeping.evictions == 1


async def test_a_coordinator_that_hangs_is_restarted() -> None:
    actor = Actor()
    async with kept(actor) as (keeping, reports):
        assert actor.coordinator
        await join(actor.coordinator, "a")
        await until(lambda: "a" in keeping._state.replicas)
        actor.hangs = True
        await until(lambda: keeping.restarts == 1)
        assert actor.kills == 1
        assert "did not respond for" in reports[0]
        assert keeping.live_replicas == 1


async def test_a_coordinator_that_is_away_for_a_moment_is_not_restarted() -> None:
    actor = Actor()
    async with kept(actor) as (keeping, _):
        coordinator, actor.coordinator = actor.coordinator, None
        await until(lambda: keeping._misses > 1)
        actor.coordinator = coordinator
        await until(lambda: keeping._misses == 0)
        assert (actor.kills, keeping.restarts) == (0, 0)


async def test_the_end_of_the_actor_ends_the_keeping() -> None:
    actor = Actor()
    actor.dead = True
    async with within():
        await CoordinatorClient(actor, 0.0, print, actor.restart).keep()
