"""The board without Ray: an order is done when everyone has done it, and whoever has not is named."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from coordinator_helpers import BOX, Life, board_with, join, obey, turns
from unit_helpers import until, within

from raylight.errors import EngineStartError, WeightSyncError
from raylight.weight_sync.coordinator import ReplicaCoordinator
from raylight.weight_sync.orders import Order, Versions


async def test_a_version_is_published_and_visible_only_when_all_have_acknowledged_it() -> None:
    board = await board_with("a", "b")
    async with within():
        publishing = asyncio.create_task(board.publish(1, BOX, 60.0, "abort"))
        assert await board.next("a", 0, 60.0) == [Order(1, "weights", 60.0, version=1, box=BOX, mode="abort")]
        await board.acknowledge("a", 1)
        await turns()
        assert not publishing.done()
        assert await board.versions() == Versions()
        await board.acknowledge("b", 1)
        assert await publishing == 2
        assert await board.versions() == Versions(1)


async def test_a_waiting_replica_hears_of_a_version_at_once() -> None:
    board = await board_with("a", "b")
    async with within():
        following = [asyncio.create_task(obey(board, name)) for name in ("a", "b")]
        await turns()
        assert await board.publish(1, BOX, 60.0) == 2
        assert await asyncio.gather(*following) == [1, 1]


async def test_waiting_for_an_order_ends_with_nothing() -> None:
    board = await board_with("a")
    async with within():
        assert await board.next("a", 0, 0.01) == []


async def test_a_failure_is_an_error_that_names_the_replica_and_the_reason() -> None:
    board = await board_with("a", "b")
    async with within():
        publishing = asyncio.create_task(board.publish(1, BOX, 60.0))
        await obey(board, "b", failure="wrong shape")
        with pytest.raises(WeightSyncError, match="b: wrong shape"):
            await publishing
        assert await board.versions() == Versions()


async def test_a_failure_does_not_stay_for_the_next_version() -> None:
    board = await board_with("a")
    async with within():
        publishing = asyncio.create_task(board.publish(1, BOX, 60.0))
        await obey(board, "a", failure="no")
        with pytest.raises(WeightSyncError):
            await publishing
        following = asyncio.create_task(obey(board, "a", 1))
        assert await board.publish(2, BOX, 60.0) == 1
        assert await following == 2


async def test_what_failed_is_given_to_nobody_any_more() -> None:
    board = await board_with("a", "b")
    async with within():
        obeying = [asyncio.create_task(obey(board, name)) for name in "ab"]
        await board.publish(1, ["good"], 60.0)
        await asyncio.gather(*obeying)
        publishing = asyncio.create_task(board.publish(2, ["bad"], 60.0))
        await obey(board, "a", 1, failure="wrong shape")
        with pytest.raises(WeightSyncError):
            await publishing
        assert await board.next("b", 1, 0.01) == []
        assert [order.box for order in (await board.subscribe("late")).orders] == [["good"]]
        assert await board.versions() == Versions(1)


async def test_a_late_word_about_an_older_version_does_not_fail_the_newer_one() -> None:
    board = await board_with("a")
    async with within():
        with pytest.raises(WeightSyncError):
            await board.publish(1, BOX, 0.01)
        publishing = asyncio.create_task(board.publish(2, BOX, 60.0))
        await board.next("a", 1, 60.0)
        await board.acknowledge("a", 1, "OutOfMemoryError: version 1 did not fit")
        await board.acknowledge("a", 2)
        assert await publishing == 1


async def test_who_is_late_is_named() -> None:
    board = await board_with("quick", "slow", "slower")
    async with within():
        following = asyncio.create_task(obey(board, "quick"))
        with pytest.raises(WeightSyncError, match=r"version 1 did not reach slow, slower within 0\.02 s"):
            await board.publish(1, BOX, 0.02)
        assert await following == 1


async def test_what_ran_out_of_time_becomes_visible_when_the_late_ones_have_it() -> None:
    board = await board_with("a")
    async with within():
        with pytest.raises(WeightSyncError):
            await board.publish(1, BOX, 0.01)
        assert await board.versions() == Versions()
        await obey(board, "a")
        assert await board.versions() == Versions(1)


async def test_a_version_is_never_used_again_even_after_a_failure() -> None:
    board = await board_with("a")
    async with within():
        with pytest.raises(WeightSyncError, match="did not reach a"):
            await board.publish(3, BOX, 0.01)
        for version in (3, 2, 0, -1):
            for adapter in (None, "new"):
                with pytest.raises(WeightSyncError, match="never reused"):
                    await board.publish(version, BOX, 60.0, adapter=adapter)


ORDERS: dict[str, Any] = {
    "publish": lambda board, timeout=60.0: board.publish(1, BOX, timeout),
    "adapter": lambda board, timeout=60.0: board.publish(1, BOX, timeout, adapter="x"),
    "drop": lambda board, timeout=60.0: board.drop_adapter("x", timeout),
    "sleep": lambda board, timeout=60.0: board.sleep(timeout),
    "wake": lambda board, timeout=60.0: board.wake(timeout),
    "probe": lambda board, timeout=60.0: board.probe([1, 2], timeout),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
async def test_an_order_to_nobody_is_an_error_and_uses_up_no_version(order: Any) -> None:
    board = ReplicaCoordinator()
    async with within():
        with pytest.raises(WeightSyncError, match="no engine replica"):
            await order(board)
        await join(board, "a")
        following = asyncio.create_task(obey(board, "a"))
        assert await board.publish(1, BOX, 60.0) == 1
        await following


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
async def test_every_order_fails_with_the_replica_that_fails(order: Any) -> None:
    board = await board_with("a", "b")
    async with within():
        giving = asyncio.create_task(order(board))
        obeying = [
            asyncio.create_task(obey(board, "a")),
            asyncio.create_task(obey(board, "b", failure="no memory")),
        ]
        with pytest.raises(WeightSyncError, match="b: no memory"):
            await giving
        await asyncio.gather(*obeying)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
async def test_every_order_ends_with_its_time(order: Any) -> None:
    board = await board_with("a")
    async with within():
        with pytest.raises(WeightSyncError, match=r"did not reach a within 0\.01 s"):
            await order(board, 0.01)


async def test_who_subscribes_late_gets_the_current_version() -> None:
    board = await board_with("a")
    async with within():
        following = asyncio.create_task(obey(board, "a"))
        await board.publish(4, BOX, 60.0)
        await following
        state = await board.subscribe("late")
        assert [(order.version, order.box) for order in state.orders] == [(4, BOX)]
        await board.acknowledge("late", state.number)
        obeying = [asyncio.create_task(obey(board, name, 1)) for name in ("a", "late")]
        assert await board.publish(5, BOX, 60.0) == 2
        await asyncio.gather(*obeying)


async def test_a_version_waits_for_a_replica_that_is_catching_up() -> None:
    board = await board_with("a")
    async with within():
        state = await board.subscribe("late")
        publishing = asyncio.create_task(board.publish(1, BOX, 60.0))
        await obey(board, "a")
        await board.acknowledge("late", state.number)
        await turns()
        assert not publishing.done()
        await obey(board, "late", state.number)
        assert await publishing == 2


async def test_a_replica_that_missed_a_version_gets_the_newest() -> None:
    board = await board_with("a")
    async with within():
        for version in (1, 2):
            with pytest.raises(WeightSyncError):
                await board.publish(version, [version], 0.01)
        assert [order.box for order in await board.next("a", 0, 60.0)] == [[2]]


async def give(board: ReplicaCoordinator, order: Any) -> Any:
    """An order that the only replica, "a", carries out."""
    obeying = asyncio.create_task(obey(board, "a", board._number))
    result = await order
    await obeying
    return result


async def test_weights_adapters_and_sleep_stand_beside_one_another() -> None:
    board = await board_with("a")
    async with within():
        await give(board, board.publish(1, ["x1"], 60.0, adapter="x"))
        await give(board, board.publish(2, ["w2"], 60.0))
        await give(board, board.publish(3, ["y3"], 60.0, adapter="y"))
        await give(board, board.publish(4, ["x4"], 60.0, adapter="x"))
        await give(board, board.sleep(60.0))
        assert await board.versions() == Versions(2, {"y": 3, "x": 4}, asleep=1)
        state = await board.subscribe("late")
        assert [(order.kind, order.box) for order in state.orders] == [
            ("weights", ["w2"]),
            ("adapter", ["y3"]),
            ("adapter", ["x4"]),
            ("sleep", None),
        ]
        await board.leave("late")
        await give(board, board.wake(60.0))
        await give(board, board.drop_adapter("x", 60.0))
        assert await board.versions() == Versions(2, {"y": 3})
        assert [order.box for order in (await board.subscribe("later")).orders] == [["w2"], ["y3"]]


async def test_what_is_being_dropped_is_visible_no_more_even_if_that_fails() -> None:
    board = await board_with("a", "b")
    async with within():
        obeying = [asyncio.create_task(obey(board, name)) for name in "ab"]
        await board.publish(1, BOX, 60.0, adapter="x")
        await asyncio.gather(*obeying)
        dropping = asyncio.create_task(board.drop_adapter("x", 60.0))
        await obey(board, "a", 1)
        assert await board.versions() == Versions()
        await obey(board, "b", 1, failure="no")
        with pytest.raises(WeightSyncError, match="b: no"):
            await dropping
        assert await board.versions() == Versions()
        assert (await board.subscribe("late")).orders == []


async def test_sleep_tells_why_nothing_was_freed() -> None:
    board = await board_with("a", "b")
    async with within():
        sleeping = asyncio.create_task(board.sleep(60.0))
        await board.next("a", 0, 60.0)
        await board.acknowledge("a", 1, result="a CPU has no device memory")
        await board.acknowledge("b", 1)
        assert await sleeping == {"a": "a CPU has no device memory", "b": None}


@pytest.mark.parametrize("name", ["publish", "adapter", "drop", "probe"])
async def test_sleeping_engines_take_nothing(name: str) -> None:
    board = await board_with("a")
    async with within():
        await give(board, board.sleep(60.0))
        with pytest.raises(WeightSyncError, match="the engines sleep; wake them before"):
            await ORDERS[name](board)
        await give(board, board.wake(60.0))
        if name != "probe":
            await give(board, ORDERS[name](board))


async def test_there_is_no_deeper_sleep() -> None:
    board = await board_with("a")
    with pytest.raises(WeightSyncError, match="level 2 forgets the weights"):
        await board.sleep(60.0, level=2)


async def test_a_probe_returns_every_replicas_answer_and_leaves_nothing() -> None:
    board = await board_with("a", "b")
    async with within():
        probing = asyncio.create_task(board.probe([7, 8, 9], 60.0, "x"))
        (order,) = await board.next("a", 0, 60.0)
        assert (order.ids, order.adapter) == ((7, 8, 9), "x")
        await board.acknowledge("a", 1, result=[-1.0, -2.0])
        state = await board.subscribe("joins meanwhile")
        await board.acknowledge("joins meanwhile", state.number)
        await board.acknowledge("b", 1, result=[-1.5, -2.5])
        assert await probing == {"a": [-1.0, -2.0], "b": [-1.5, -2.5]}
        assert state.orders == []
        with pytest.raises(WeightSyncError, match="the probe did not reach a, b, joins meanwhile"):
            await board.probe([1, 2], 0.01)
        assert await board.next("a", 1, 0.01) == []


async def test_orders_wait_for_one_another_but_not_for_ever() -> None:
    board = await board_with("a")
    async with within():
        first = asyncio.create_task(board.publish(1, BOX, 60.0))
        second = asyncio.create_task(board.publish(2, BOX, 60.0))
        await turns()
        with pytest.raises(WeightSyncError, match=r"could not begin within .*version 1 is still under way"):
            await board.wake(0.02)
        assert await board.versions() == Versions()
        assert await obey(board, "a") == 1
        assert await first == 1
        assert await obey(board, "a", 1) == 2
        assert await second == 1


async def test_an_order_whose_publisher_is_cancelled_makes_room() -> None:
    board = await board_with("a")
    async with within():
        first = asyncio.create_task(board.publish(1, BOX, 60.0))
        await turns()
        first.cancel()
        second = asyncio.create_task(board.publish(2, BOX, 60.0))
        await turns()
        assert await obey(board, "a") == 2
        assert await second == 1


# the dead, the stuck and the leaving


async def test_a_dead_replica_is_not_waited_for_but_the_one_in_its_place_is() -> None:
    board = await board_with("living")
    await board.subscribe("dead", [Life(dead=True)])
    async with within():
        living = asyncio.ensure_future(obey(board, "living"))
        assert await board.publish(1, BOX, 5.0) == 1
        assert await living == 1


async def test_a_replica_that_dies_while_it_is_waited_for_is_waited_for_no_longer() -> None:
    board = await board_with("living")
    life = Life()
    await join(board, "doomed", life)
    async with within():
        living = asyncio.ensure_future(obey(board, "living"))
        publishing = asyncio.ensure_future(board.publish(1, BOX, 5.0))
        await living
        await turns()
        assert not publishing.done()
        life.end()
        assert await publishing == 1


async def test_a_replica_that_joins_and_dies_during_an_order_is_noticed() -> None:
    board = await board_with("living")
    async with within():
        publishing = asyncio.ensure_future(board.publish(1, BOX, 5.0))
        await turns()
        await board.subscribe("short-lived", [Life(dead=True)])
        await obey(board, "living")
        assert await publishing == 1


async def test_whoever_leaves_or_dies_is_told_of_once() -> None:
    told: list[str] = []

    async def tell(replica: str) -> None:
        told.append(replica)

    board, lives = ReplicaCoordinator(tell), {name: Life() for name in ("a", "b")}
    for name, life in lives.items():
        await join(board, name, life)
    async with within():
        await board.leave("a")
        lives["a"].end()
        lives["b"].end()
        await until(lambda: len(told) == 2)
        await turns()
    assert told == ["a", "b"]


async def test_the_death_of_one_of_the_same_name_is_not_that_of_its_successor() -> None:
    board, first = ReplicaCoordinator(), Life()
    await join(board, "a", first)
    await join(board, "a", Life())
    first.end()
    await turns()
    async with within():
        publishing = asyncio.ensure_future(board.publish(1, BOX, 5.0))
        assert await obey(board, "a") == 1
        assert await publishing == 1


async def test_when_all_died_a_version_waits_for_a_replacement() -> None:
    board = ReplicaCoordinator()
    await board.subscribe("dead", [Life(dead=True)])
    async with within():
        publishing = asyncio.ensure_future(board.publish(1, BOX, 5.0))
        await turns()
        assert not publishing.done()
        state = await board.subscribe("new")
        assert [(order.version, order.box) for order in state.orders] == [(1, BOX)]
        await board.acknowledge("new", 1)
        assert await publishing == 1


async def test_when_all_died_and_none_came_that_is_said() -> None:
    board = ReplicaCoordinator()
    await board.subscribe("dead", [Life(dead=True)])
    async with within():
        with pytest.raises(WeightSyncError, match="did not reach a replica in place of the dead"):
            await board.publish(1, BOX, 0.02)


async def test_a_replica_that_hangs_does_not_outwait_the_deadline() -> None:
    board = ReplicaCoordinator()
    await board.subscribe("stuck", [Life()])
    async with within():
        with pytest.raises(WeightSyncError, match="stuck within"):
            await board.publish(1, BOX, 0.05)


async def test_who_leaves_is_not_waited_for_and_is_told_when_it_comes_back() -> None:
    board = await board_with("a", "leaving")
    async with within():
        polling = asyncio.create_task(board.next("leaving", 0, 60.0))
        publishing = asyncio.create_task(board.publish(1, BOX, 5.0))
        await obey(board, "a")
        await polling
        await board.leave("leaving")
        assert await publishing == 1
        for call in (board.next("leaving", 0, 60.0), board.acknowledge("leaving", 1)):
            with pytest.raises(WeightSyncError, match="leaving is not subscribed"):
                await call
        await board.leave("leaving")


async def test_a_replica_is_up_when_it_has_caught_up() -> None:
    board = await board_with("a")
    async with within():
        waiting = asyncio.create_task(board.wait_for_subscribers(2))
        await board.subscribe("b")
        await turns()
        assert not waiting.done()
        await board.acknowledge("b", 0)
        await waiting


async def test_a_replica_that_cannot_start_ends_the_waiting_for_it() -> None:
    board = ReplicaCoordinator()
    async with within():
        waiting = asyncio.ensure_future(board.wait_for_subscribers(1))
        await turns()
        await board.cannot_start("OSError: no model")
        with pytest.raises(EngineStartError, match="OSError: no model"):
            await waiting


async def test_a_replica_that_fails_to_catch_up_does_not_take_from_the_others_what_they_have() -> None:
    board = await board_with("a")
    async with within():
        await give(board, board.publish(1, BOX, 60.0))
        await board.subscribe("late")
        await board.acknowledge("late", 1, "ObjectLostError")
        assert await board.versions() == Versions(1)
        assert len((await board.subscribe("later")).orders) == 1


class Arrays:
    """Can be watched."""


async def test_of_superseded_versions_nothing_is_kept() -> None:
    board = await board_with("a")
    alive: list[weakref.ref[Arrays]] = []

    def box() -> list[Any]:
        arrays = Arrays()
        alive.append(weakref.ref(arrays))
        return [arrays]

    async with within():
        for version in (1, 2, 3):
            await give(board, board.publish(version, box(), 60.0))
        await give(board, board.publish(4, box(), 60.0, adapter="x"))
        for version in (5, 6):  # nobody listens
            with pytest.raises(WeightSyncError):
                await board.publish(version, box(), 0.01)
        await obey(board, "a", board._number - 1)
        await give(board, board.drop_adapter("x", 60.0))
        await give(board, board.publish(7, box(), 60.0))
        failing = asyncio.create_task(board.publish(8, box(), 60.0))
        await obey(board, "a", board._number, failure="no")
        await asyncio.wait([failing])
        assert failing.exception()
        del failing
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, False, False, False, False, False, True, False]
