"""Late and failing replicas are evicted, and a restarted coordinator continues from a snapshot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from coordinator_helpers import ADAPTER, PAYLOAD_REF, Life, join, obey, turns
from unit_helpers import until, within

from raylight.errors import NotSubscribedError, ReplicaEvictedError, WeightSyncError
from raylight.weight_sync import membership
from raylight.weight_sync.coordinator import ReplicaCoordinator
from raylight.weight_sync.orders import Snapshot, Versions


class Killer:
    """Collects the handles of killed replicas, and the names of replicas that are gone."""

    def __init__(self) -> None:
        self.killed: list[Any] = []
        self.gone: list[str] = []

    async def on_leave(self, replica: str) -> None:
        self.gone.append(replica)


async def coordinator_of(killer: Killer, *names: str, **settings: Any) -> ReplicaCoordinator:
    coordinator = ReplicaCoordinator(killer.on_leave, killer.killed.append, **settings)
    for name in names:
        state = await coordinator.subscribe(name, [Life()], f"handle of {name}")
        await coordinator.acknowledge(name, state.number)
    return coordinator


# evictions


async def test_a_replica_that_fails_what_another_one_executes_is_evicted() -> None:
    killer = Killer()
    coordinator = await coordinator_of(killer, "a", "b")
    async with within():
        publishing = asyncio.create_task(coordinator.publish(1, PAYLOAD_REF, 60.0))
        await obey(coordinator, "b", failure="no memory")
        await turns()
        assert not publishing.done()
        await obey(coordinator, "a")
        assert len(await publishing) == 1
        assert await coordinator.versions() == Versions(1)
        assert killer.killed == ["handle of b"]
        await until(lambda: killer.gone == ["b"])
        assert coordinator.snapshot().evicted == {"b": "no memory"}
        for call in (coordinator.next("b", 0, 60.0), coordinator.heartbeat("b"), coordinator.subscribe("b")):
            with pytest.raises(ReplicaEvictedError, match="b was evicted: no memory"):
                await call


async def test_a_silent_replica_is_evicted_and_the_order_completes_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raylight.weight_sync.quorum.MIN_SILENCE_S", 0.02)
    killer = Killer()
    coordinator = await coordinator_of(killer, "a", "frozen")
    async with within():
        obeying = asyncio.create_task(obey(coordinator, "a"))
        assert len(await coordinator.publish(1, PAYLOAD_REF, 0.1)) == 1
        assert await obeying == 1
        assert killer.killed == ["handle of frozen"]
        assert "it sent nothing for 0.025 s during version 1" in coordinator.snapshot().evicted["frozen"]


async def test_heartbeats_prove_that_a_replica_is_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylight.weight_sync.quorum.MIN_SILENCE_S", 0.2)
    killer = Killer()
    coordinator = await coordinator_of(killer, "a", "hangs")
    async with within():
        obeying = asyncio.create_task(obey(coordinator, "a"))
        publishing = asyncio.create_task(coordinator.publish(1, PAYLOAD_REF, 0.4, adapter="x"))
        while not publishing.done():
            await asyncio.wait([publishing], timeout=0.01)
            if not killer.killed:
                await coordinator.heartbeat("hangs")
        assert len(await publishing) == 1
        assert await obeying == 1
        assert coordinator.snapshot().evicted == {
            "hangs": "it had not executed version 1 of adapter 'x' after 0.3 s"
        }


async def test_an_order_without_replicas_waits_for_the_replacement() -> None:
    killer = Killer()
    coordinator = await coordinator_of(killer, "frozen", replacement_timeout_s=30.0)
    async with within():
        publishing = asyncio.create_task(coordinator.publish(1, PAYLOAD_REF, 0.2))
        await until(lambda: killer.killed == ["handle of frozen"])
        state = await coordinator.subscribe("replacement")
        assert [order.version for order in state.orders] == [1]
        await coordinator.acknowledge("replacement", 1)
        assert len(await publishing) == 1


async def test_an_order_whose_replacement_does_not_come_names_the_evicted_replica() -> None:
    coordinator = await coordinator_of(Killer(), "frozen", replacement_timeout_s=0.05)
    expected = r"did not reach a replacement for frozen \(it sent nothing for 0.015 s .*\) within 0.07 s"
    async with within():
        with pytest.raises(WeightSyncError, match=expected):
            await coordinator.publish(1, PAYLOAD_REF, 0.02)


async def test_a_replica_that_joins_when_all_others_have_answered_gets_the_probe_too() -> None:
    coordinator = await coordinator_of(Killer(), "a")
    async with within():
        probing = asyncio.create_task(coordinator.probe([1, 2], 60.0))
        await coordinator.next("a", 0, 60.0)
        await coordinator.acknowledge("a", 1, result=[-1.0])
        state = await coordinator.subscribe("b")  # before the caller's task runs
        await coordinator.acknowledge("b", state.number)
        (order,) = await coordinator.next("b", state.number, 60.0)
        await coordinator.acknowledge("b", order.number, result=[-2.0])
        assert await probing == {"a": [-1.0], "b": [-2.0]}


# restarts


async def restarted(old: ReplicaCoordinator, killer: Killer) -> ReplicaCoordinator:
    coordinator = ReplicaCoordinator(killer.on_leave, killer.killed.append, restored=False)
    await coordinator.restore(old.snapshot())
    return coordinator


async def test_a_restarted_coordinator_answers_no_subscription_until_it_is_restored() -> None:
    killer = Killer()
    old = await coordinator_of(killer, "a")
    async with within():
        obeying = asyncio.create_task(obey(old, "a"))
        await old.publish(3, PAYLOAD_REF, 60.0)
        await obeying
        coordinator = ReplicaCoordinator(restored=False)
        subscribing = asyncio.create_task(coordinator.subscribe("late"))
        publishing = asyncio.create_task(coordinator.issue("key", "publish", 4, PAYLOAD_REF, 60.0))
        await turns()
        assert not subscribing.done()
        assert await coordinator.next_snapshot(0, 60.0) is None
        with pytest.raises(NotSubscribedError):
            await coordinator.next("a", 1, 60.0)
        await coordinator.restore(old.snapshot())
        assert await coordinator.versions() == Versions(3)
        assert [order.version for order in (await subscribing).orders][:1] == [3]
        assert not publishing.done()  # it waits for "a" to return
        publishing.cancel()


async def test_replicas_of_the_snapshot_are_waited_for_until_they_return() -> None:
    killer = Killer()
    coordinator = await restarted(await coordinator_of(killer, "a", "b"), killer)
    async with within():
        waiting = asyncio.create_task(coordinator.wait_for_replicas(2))
        publishing = asyncio.create_task(coordinator.publish(1, PAYLOAD_REF, 60.0))
        for name in "ab":
            await turns()
            assert not any(task.done() for task in (waiting, publishing))
            with pytest.raises(NotSubscribedError, match="must subscribe again"):
                await coordinator.acknowledge(name, 1)
            state = await coordinator.subscribe(name, returns=True)
            await coordinator.acknowledge(name, state.number)
        await waiting
        assert len(await publishing) == 2


async def test_a_replica_that_does_not_return_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RETURN_TIMEOUT_S", 0.01)
    killer = Killer()
    await restarted(await coordinator_of(killer, "dead"), killer)
    async with within():
        await until(lambda: killer.gone == ["dead"])
    assert killer.killed == ["handle of dead"]


@pytest.mark.parametrize("order", ["publish", "wake"])
async def test_a_snapshot_leaves_out_the_pending_order(order: str) -> None:
    killer = Killer()
    old = await coordinator_of(killer, "a")
    async with within():
        obeying = asyncio.create_task(obey(old, "a"))
        await old.publish(1, ["old"], 60.0)
        await obeying
        pending = old.publish(2, ["new"], 60.0) if order == "publish" else old.wake(60.0)
        task = asyncio.create_task(pending)
        await old.next("a", 1, 60.0)
        snapshot = old.snapshot()
        assert (snapshot.version, snapshot.number) == (1, 2)
        assert [o.payload_ref for o in snapshot.current.values()] == [["old"]]
        coordinator = await restarted(old, killer)
        if order == "publish":  # its caller repeats it
            repeated = asyncio.create_task(coordinator.publish(2, ["new"], 60.0))
            state = await coordinator.subscribe("a", returns=True)
            await coordinator.acknowledge("a", state.number)
            await obey(coordinator, "a", state.number)
            await repeated
            assert await coordinator.versions() == Versions(2)
        task.cancel()


async def test_a_returning_replica_gets_transient_orders_too() -> None:
    killer = Killer()
    old = await coordinator_of(killer, "a", "b")
    coordinator = await restarted(old, killer)
    async with within():
        waking = asyncio.create_task(coordinator.wake(60.0))
        await turns()
        assert [o.kind for o in (await coordinator.subscribe("a", returns=True)).orders] == ["wake"]
        assert (await coordinator.subscribe("new")).orders == []
        waking.cancel()


async def test_restoring_twice_has_no_effect() -> None:
    coordinator = ReplicaCoordinator()
    await join(coordinator, "a")
    await coordinator.restore(Snapshot(number=7, version=9))
    assert coordinator.snapshot().version == -1


async def test_a_repeated_call_joins_the_first() -> None:
    coordinator = await coordinator_of(Killer(), "a")
    async with within():
        calls = [
            asyncio.create_task(coordinator.issue("key", "publish", 1, [ADAPTER], 60.0, "keep", "x"))
            for _ in range(2)
        ]
        await turns()
        await obey(coordinator, "a")
        for results, state in await asyncio.gather(*calls):
            assert (len(results), state.version) == (1, 1)
        assert (await coordinator.issue("key", "publish", 1, [ADAPTER], 60.0, "keep", "x"))[0] == {"a": None}
