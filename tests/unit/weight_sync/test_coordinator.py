"""The coordinator without Ray: an order completes when all replicas have executed it; late ones are named."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from coordinator_helpers import PAYLOAD_REF, Life, coordinator_with, join, obey, turns
from unit_helpers import until, within

from raylight.errors import EngineStartError, WeightSyncError
from raylight.weight_sync.coordinator import ReplicaCoordinator
from raylight.weight_sync.orders import Order, Versions


async def test_a_version_is_published_and_visible_only_when_all_have_acknowledged_it() -> None:
    coordinator = await coordinator_with("a", "b")
    async with within():
        publishing = asyncio.create_task(coordinator.publish(1, PAYLOAD_REF, 60.0, "abort"))
        assert await coordinator.next("a", 0, 60.0) == [
            Order(1, "weights", 60.0, version=1, payload_ref=PAYLOAD_REF, mode="abort")
        ]
        await coordinator.acknowledge("a", 1)
        await turns()
        assert not publishing.done()
        assert await coordinator.versions() == Versions()
        await coordinator.acknowledge("b", 1)
        assert len(await publishing) == 2
        assert await coordinator.versions() == Versions(1)


async def test_a_waiting_replica_hears_of_a_version_at_once() -> None:
    coordinator = await coordinator_with("a", "b")
    async with within():
        following = [asyncio.create_task(obey(coordinator, name)) for name in ("a", "b")]
        await turns()
        assert len(await coordinator.publish(1, PAYLOAD_REF, 60.0)) == 2
        assert await asyncio.gather(*following) == [1, 1]


async def test_waiting_for_an_order_ends_with_nothing() -> None:
    coordinator = await coordinator_with("a")
    async with within():
        assert await coordinator.next("a", 0, 0.01) == []


async def test_a_failure_of_all_is_an_error_that_names_the_replicas_and_the_reasons() -> None:
    coordinator = await coordinator_with("a", "b")
    async with within():
        publishing = asyncio.create_task(coordinator.publish(1, PAYLOAD_REF, 60.0))
        await obey(coordinator, "b", failure="wrong shape")
        await turns()
        assert not publishing.done()
        await obey(coordinator, "a", failure="no memory")
        with pytest.raises(WeightSyncError, match="a: no memory; b: wrong shape"):
            await publishing
        assert await coordinator.versions() == Versions()
        assert not coordinator.snapshot().evicted


async def test_a_failure_does_not_stay_for_the_next_version() -> None:
    coordinator = await coordinator_with("a")
    async with within():
        publishing = asyncio.create_task(coordinator.publish(1, PAYLOAD_REF, 60.0))
        await obey(coordinator, "a", failure="no")
        with pytest.raises(WeightSyncError):
            await publishing
        following = asyncio.create_task(obey(coordinator, "a", 1))
        assert len(await coordinator.publish(2, PAYLOAD_REF, 60.0)) == 1
        assert await following == 2


async def test_what_failed_is_given_to_nobody_any_more() -> None:
    coordinator = await coordinator_with("a", "b")
    async with within():
        obeying = [asyncio.create_task(obey(coordinator, name)) for name in "ab"]
        await coordinator.publish(1, ["good"], 60.0)
        await asyncio.gather(*obeying)
        publishing = asyncio.create_task(coordinator.publish(2, ["bad"], 60.0))
        for name in "ab":
            await obey(coordinator, name, 1, failure="wrong shape")
        with pytest.raises(WeightSyncError):
            await publishing
        assert await coordinator.next("b", 1, 0.01) == []
        assert [order.payload_ref for order in (await coordinator.subscribe("late")).orders] == [["good"]]
        assert await coordinator.versions() == Versions(1)


async def test_a_version_of_an_adapter_is_never_used_again_even_after_a_failure() -> None:
    coordinator = await coordinator_with("a")
    async with within():
        with pytest.raises(WeightSyncError, match="did not reach a"):
            await coordinator.publish(3, PAYLOAD_REF, 0.01, adapter="x")
        for version in (3, 2, 0, -1):
            for adapter in (None, "new"):
                with pytest.raises(WeightSyncError, match="never reused"):
                    await coordinator.publish(version, PAYLOAD_REF, 60.0, adapter=adapter)


ORDERS: dict[str, Any] = {
    "publish": lambda coordinator, timeout=60.0: coordinator.publish(1, PAYLOAD_REF, timeout),
    "adapter": lambda coordinator, timeout=60.0: coordinator.publish(1, PAYLOAD_REF, timeout, adapter="x"),
    "pin": lambda coordinator, timeout=60.0: coordinator.pin("x", 0, PAYLOAD_REF, timeout),
    "release": lambda coordinator, timeout=60.0: coordinator.release("x", timeout),
    "sleep": lambda coordinator, timeout=60.0: coordinator.sleep(timeout),
    "wake": lambda coordinator, timeout=60.0: coordinator.wake(timeout),
    "probe": lambda coordinator, timeout=60.0: coordinator.probe([1, 2], timeout),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
async def test_an_order_to_nobody_is_an_error_and_uses_up_no_version(order: Any) -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        with pytest.raises(WeightSyncError, match="no engine replica"):
            await order(coordinator)
        await join(coordinator, "a")
        following = asyncio.create_task(obey(coordinator, "a"))
        assert len(await coordinator.publish(1, PAYLOAD_REF, 60.0)) == 1
        await following


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
async def test_every_order_fails_with_the_replica_that_fails(order: Any) -> None:
    coordinator = await coordinator_with("a", "b")
    async with within():
        giving = asyncio.create_task(order(coordinator))
        obeying = [asyncio.create_task(obey(coordinator, name, failure="no memory")) for name in "ab"]
        with pytest.raises(WeightSyncError, match="a: no memory; b: no memory"):
            await giving
        await asyncio.gather(*obeying)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
async def test_every_order_ends_with_its_time(order: Any) -> None:
    coordinator = await coordinator_with("a")
    async with within():
        late = r"did not reach a replacement for a \(it sent nothing for 0\.0075 s .*\) within 0\.01 s"
        with pytest.raises(WeightSyncError, match=late):
            await order(coordinator, 0.01)


async def test_who_subscribes_late_gets_the_current_version() -> None:
    coordinator = await coordinator_with("a")
    async with within():
        following = asyncio.create_task(obey(coordinator, "a"))
        await coordinator.publish(4, PAYLOAD_REF, 60.0)
        await following
        state = await coordinator.subscribe("late")
        assert [(order.version, order.payload_ref) for order in state.orders] == [(4, PAYLOAD_REF)]
        await coordinator.acknowledge("late", state.number)
        obeying = [asyncio.create_task(obey(coordinator, name, 1)) for name in ("a", "late")]
        assert len(await coordinator.publish(5, PAYLOAD_REF, 60.0)) == 2
        await asyncio.gather(*obeying)


async def test_a_version_waits_for_a_replica_that_is_catching_up() -> None:
    coordinator = await coordinator_with("a")
    async with within():
        state = await coordinator.subscribe("late")
        publishing = asyncio.create_task(coordinator.publish(1, PAYLOAD_REF, 60.0))
        await obey(coordinator, "a")
        await coordinator.acknowledge("late", state.number)
        await turns()
        assert not publishing.done()
        await obey(coordinator, "late", state.number)
        assert len(await publishing) == 2


async def give(coordinator: ReplicaCoordinator, order: Any) -> Any:
    """Issue an order that the only replica, "a", executes."""
    obeying = asyncio.create_task(obey(coordinator, "a", coordinator._last_number))
    result = await order
    await obeying
    return result


async def test_weights_adapters_and_sleep_stand_beside_one_another() -> None:
    coordinator = await coordinator_with("a")
    async with within():
        await give(coordinator, coordinator.publish(1, ["x1"], 60.0, adapter="x"))
        await give(coordinator, coordinator.publish(2, ["w2"], 60.0))
        await give(coordinator, coordinator.publish(3, ["y3"], 60.0, adapter="y"))
        await give(coordinator, coordinator.publish(4, ["x4"], 60.0, adapter="x"))
        await give(coordinator, coordinator.sleep(60.0))
        assert await coordinator.versions() == Versions(2, {"y": 3, "x": 4}, asleep=1)
        state = await coordinator.subscribe("late")
        assert [(order.kind, order.payload_ref) for order in state.orders] == [
            ("weights", ["w2"]),
            ("adapter", ["y3"]),
            ("adapter", ["x4"]),
            ("sleep", None),
        ]
        await coordinator.leave("late")
        await give(coordinator, coordinator.wake(60.0))
        assert await coordinator.versions() == Versions(2, {"y": 3, "x": 4})
        assert [order.payload_ref for order in (await coordinator.subscribe("later")).orders] == [
            ["w2"],
            ["y3"],
            ["x4"],
        ]


async def test_a_pinned_version_stays_until_its_release_also_for_a_replica_that_joins() -> None:
    coordinator = await coordinator_with("a")
    async with within():
        await give(coordinator, coordinator.publish(1, ["x1"], 60.0, adapter="x"))
        await give(coordinator, coordinator.pin("x@1", 1, ["x1"], 60.0))
        await give(coordinator, coordinator.publish(2, ["x2"], 60.0, adapter="x"))
        assert await coordinator.versions() == Versions(0, {"x": 2, "x@1": 1})
        orders = (await coordinator.subscribe("late")).orders
        assert [(order.adapter, order.payload_ref) for order in orders] == [("x@1", ["x1"]), ("x", ["x2"])]
        await coordinator.leave("late")
        restarted = ReplicaCoordinator(restored=False)
        await restarted.restore(coordinator.snapshot())
        assert (await restarted.versions()).adapters == {"x": 2, "x@1": 1}
        await give(coordinator, coordinator.release("x@1", 60.0))
        assert await coordinator.versions() == Versions(0, {"x": 2})
        orders = (await coordinator.subscribe("later")).orders
        assert [order.payload_ref for order in orders] == [["x2"]]


async def test_a_replica_that_joins_during_a_release_keeps_no_pin() -> None:
    coordinator = await coordinator_with("a")
    async with within():
        await give(coordinator, coordinator.pin("x@1", 1, ["x1"], 60.0))
        state = await coordinator.subscribe("late")
        assert [order.kind for order in state.orders] == ["adapter"]
        releasing = asyncio.create_task(coordinator.release("x@1", 60.0))
        await obey(coordinator, "a", 1)
        await turns()
        assert not releasing.done()
        await coordinator.acknowledge("late", state.number)
        (order,) = await coordinator.next("late", state.number, 60.0)
        assert (order.kind, order.adapter) == ("release", "x@1")
        await coordinator.acknowledge("late", order.number)
        await releasing
        assert (await coordinator.subscribe("later")).orders == []


async def test_sleep_tells_why_nothing_was_freed() -> None:
    coordinator = await coordinator_with("a", "b")
    async with within():
        sleeping = asyncio.create_task(coordinator.sleep(60.0))
        await coordinator.next("a", 0, 60.0)
        await coordinator.acknowledge("a", 1, result="a CPU has no device memory")
        await coordinator.acknowledge("b", 1)
        assert await sleeping == {"a": "a CPU has no device memory", "b": None}


@pytest.mark.parametrize("name", ["publish", "adapter", "pin", "probe"])
async def test_sleeping_engines_take_nothing(name: str) -> None:
    coordinator = await coordinator_with("a")
    async with within():
        await give(coordinator, coordinator.sleep(60.0))
        with pytest.raises(WeightSyncError, match="the engines are asleep; wake them before"):
            await ORDERS[name](coordinator)
        await give(coordinator, coordinator.wake(60.0))
        if name != "probe":
            await give(coordinator, ORDERS[name](coordinator))


async def test_there_is_no_deeper_sleep() -> None:
    coordinator = await coordinator_with("a")
    with pytest.raises(WeightSyncError, match="level 2 forgets the weights"):
        await coordinator.sleep(60.0, level=2)


async def test_a_probe_returns_every_replicas_answer_and_leaves_nothing() -> None:
    coordinator = await coordinator_with("a", "b")
    async with within():
        probing = asyncio.create_task(coordinator.probe([7, 8, 9], 60.0, "x"))
        (order,) = await coordinator.next("a", 0, 60.0)
        assert (order.ids, order.adapter) == ((7, 8, 9), "x")
        await coordinator.acknowledge("a", 1, result=[-1.0, -2.0])
        state = await coordinator.subscribe("joins meanwhile")
        assert state.orders == []
        await coordinator.acknowledge("joins meanwhile", state.number)
        await coordinator.acknowledge("b", 1, result=[-1.5, -2.5])
        await turns()
        assert not probing.done()
        assert await coordinator.next("joins meanwhile", state.number, 0.0) == [order]
        await coordinator.acknowledge("joins meanwhile", 1, result=[-1.0, -2.0])
        assert await probing == {name: [-1.0, -2.0] for name in ("a", "joins meanwhile")} | {
            "b": [-1.5, -2.5]
        }
        assert await coordinator.next("a", 1, 0.01) == []


async def test_orders_wait_for_one_another_but_not_for_ever() -> None:
    coordinator = await coordinator_with("a")
    async with within():
        first = asyncio.create_task(coordinator.publish(1, PAYLOAD_REF, 60.0))
        second = asyncio.create_task(coordinator.publish(2, PAYLOAD_REF, 60.0))
        await turns()
        with pytest.raises(WeightSyncError, match=r"could not begin within .*version 1 is still under way"):
            await coordinator.wake(0.02)
        assert await coordinator.versions() == Versions()
        assert await obey(coordinator, "a") == 1
        assert len(await first) == 1
        assert await obey(coordinator, "a", 1) == 2
        assert len(await second) == 1


async def test_an_order_whose_publisher_is_cancelled_makes_room() -> None:
    coordinator = await coordinator_with("a")
    async with within():
        first = asyncio.create_task(coordinator.publish(1, PAYLOAD_REF, 60.0))
        await turns()
        first.cancel()
        second = asyncio.create_task(coordinator.publish(2, PAYLOAD_REF, 60.0))
        await turns()
        assert await obey(coordinator, "a") == 2
        assert len(await second) == 1


# the dead, the stuck and the leaving


async def test_a_dead_replica_is_not_waited_for_but_the_one_in_its_place_is() -> None:
    coordinator = await coordinator_with("living")
    await coordinator.subscribe("dead", [Life(dead=True)])
    async with within():
        living = asyncio.ensure_future(obey(coordinator, "living"))
        assert len(await coordinator.publish(1, PAYLOAD_REF, 5.0)) == 1
        assert await living == 1


async def test_a_replica_that_dies_while_it_is_waited_for_is_waited_for_no_longer() -> None:
    coordinator = await coordinator_with("living")
    life = Life()
    await join(coordinator, "doomed", life)
    async with within():
        living = asyncio.ensure_future(obey(coordinator, "living"))
        publishing = asyncio.ensure_future(coordinator.publish(1, PAYLOAD_REF, 5.0))
        await living
        await turns()
        assert not publishing.done()
        life.end()
        assert len(await publishing) == 1


async def test_a_replica_that_joins_and_dies_during_an_order_is_noticed() -> None:
    coordinator = await coordinator_with("living")
    async with within():
        publishing = asyncio.ensure_future(coordinator.publish(1, PAYLOAD_REF, 5.0))
        await turns()
        await coordinator.subscribe("short-lived", [Life(dead=True)])
        await obey(coordinator, "living")
        assert len(await publishing) == 1


async def test_whoever_leaves_or_dies_is_told_of_once() -> None:
    told: list[str] = []

    async def tell(replica: str) -> None:
        told.append(replica)

    coordinator, lives = ReplicaCoordinator(tell), {name: Life() for name in ("a", "b")}
    for name, life in lives.items():
        await join(coordinator, name, life)
    async with within():
        await coordinator.leave("a")
        lives["a"].end()
        lives["b"].end()
        await until(lambda: len(told) == 2)
        await turns()
    assert told == ["a", "b"]


async def test_the_death_of_one_of_the_same_name_is_not_that_of_its_successor() -> None:
    coordinator, first = ReplicaCoordinator(), Life()
    await join(coordinator, "a", first)
    await join(coordinator, "a", Life())
    first.end()
    await turns()
    async with within():
        publishing = asyncio.ensure_future(coordinator.publish(1, PAYLOAD_REF, 5.0))
        assert await obey(coordinator, "a") == 1
        assert len(await publishing) == 1


async def test_when_all_died_a_version_waits_for_a_replacement() -> None:
    coordinator = ReplicaCoordinator()
    await coordinator.subscribe("dead", [Life(dead=True)])
    async with within():
        publishing = asyncio.ensure_future(coordinator.publish(1, PAYLOAD_REF, 5.0))
        await turns()
        assert not publishing.done()
        state = await coordinator.subscribe("new")
        assert [(order.version, order.payload_ref) for order in state.orders] == [(1, PAYLOAD_REF)]
        await coordinator.acknowledge("new", 1)
        assert len(await publishing) == 1


async def test_when_all_died_and_none_came_that_is_said() -> None:
    coordinator = ReplicaCoordinator()
    await coordinator.subscribe("dead", [Life(dead=True)])
    async with within():
        with pytest.raises(WeightSyncError, match="did not reach a replacement for a dead replica"):
            await coordinator.publish(1, PAYLOAD_REF, 0.02)


async def test_who_leaves_is_not_waited_for_and_is_told_when_it_comes_back() -> None:
    coordinator = await coordinator_with("a", "leaving")
    async with within():
        polling = asyncio.create_task(coordinator.next("leaving", 0, 60.0))
        publishing = asyncio.create_task(coordinator.publish(1, PAYLOAD_REF, 5.0))
        await obey(coordinator, "a")
        await polling
        await coordinator.leave("leaving")
        assert len(await publishing) == 1
        for call in (coordinator.next("leaving", 0, 60.0), coordinator.acknowledge("leaving", 1)):
            with pytest.raises(WeightSyncError, match="leaving is not subscribed"):
                await call
        await coordinator.leave("leaving")


async def test_a_replica_is_up_when_it_has_caught_up() -> None:
    coordinator = await coordinator_with("a")
    async with within():
        waiting = asyncio.create_task(coordinator.wait_for_replicas(2))
        await coordinator.subscribe("b")
        await turns()
        assert not waiting.done()
        await coordinator.acknowledge("b", 0)
        await waiting


async def test_a_replica_that_cannot_start_ends_the_waiting_for_it() -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        waiting = asyncio.ensure_future(coordinator.wait_for_start(1, 0, 60.0))
        await turns()
        await coordinator.report_start_failure("OSError: no model")
        with pytest.raises(EngineStartError, match="OSError: no model"):
            await waiting


async def test_a_replica_that_fails_to_catch_up_does_not_take_from_the_others_what_they_have() -> None:
    coordinator = await coordinator_with("a")
    async with within():
        await give(coordinator, coordinator.publish(1, PAYLOAD_REF, 60.0))
        await coordinator.subscribe("late")
        await coordinator.acknowledge("late", 1, "ObjectLostError")
        assert await coordinator.versions() == Versions(1)
        assert len((await coordinator.subscribe("later")).orders) == 1


class Arrays:
    """A payload that supports weak references."""


async def test_of_superseded_versions_nothing_is_kept() -> None:
    coordinator = await coordinator_with("a")
    alive: list[weakref.ref[Arrays]] = []

    def payload_ref() -> list[Any]:
        arrays = Arrays()
        alive.append(weakref.ref(arrays))
        return [arrays]

    async with within():
        for version in (1, 2, 3):
            await give(coordinator, coordinator.publish(version, payload_ref(), 60.0))
        await give(coordinator, coordinator.publish(4, payload_ref(), 60.0, adapter="x"))
        for version in (5, 6):
            await give(coordinator, coordinator.publish(version, payload_ref(), 60.0))
        await give(coordinator, coordinator.publish(7, payload_ref(), 60.0))
        failing = asyncio.create_task(coordinator.publish(8, payload_ref(), 60.0))
        await obey(coordinator, "a", coordinator._last_number, failure="no")
        await asyncio.wait([failing])
        assert failing.exception()
        del failing
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, False, False, True, False, False, True, False]
