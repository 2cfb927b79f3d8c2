"""The coordinator without Ray: an order completes when all replicas have reached it; late ones are named."""

import asyncio
import gc
import weakref
from typing import Any

import pytest
from coordinator_helpers import (
    ADAPTER,
    PAYLOAD_REF,
    Coordinator,
    Life,
    Replica,
    Versions,
    join,
    publish_weights,
    replicas_of,
    send,
    turns,
)
from unit_helpers import until, within

from raylight.errors import EngineStartError, NotSubscribedError, ReplicaEvictedError, WeightSyncError
from raylight.weights import coordinator as module
from raylight.weights.orders import Order, ReplicaState, Snapshot, Task


def publish(coordinator: Coordinator, version: int, timeout: float = 60.0, **settings: Any) -> Any:
    """Publish a version of the adapter "x"."""
    return coordinator.client.publish(version, PAYLOAD_REF, timeout, **{"adapter": "x", **settings})


async def test_a_version_is_published_and_visible_only_when_all_have_reached_it() -> None:
    coordinator = Coordinator()
    async with within():
        a, b = await replicas_of(coordinator, "a", "b")
        publishing = asyncio.create_task(publish(coordinator, 1, mode="abort"))
        task = await a.next()
        order = Order("adapter", 60.0, 1, "x", PAYLOAD_REF, "abort", number=task.number)
        assert task == Task(order.number, "adapter", order)
        await a.finish(task)
        await turns()
        assert not publishing.done()
        assert coordinator.versions() == Versions()
        await b.do()
        assert len(await publishing) == 2
        assert coordinator.versions() == Versions(0, {"x": 1})


async def test_a_waiting_replica_receives_a_task_at_once() -> None:
    coordinator = Coordinator()
    async with within():
        replicas = await replicas_of(coordinator, "a", "b")
        following = [asyncio.create_task(replica.do()) for replica in replicas]
        await turns()
        assert len(await publish(coordinator, 1)) == 2
        await asyncio.gather(*following)


async def test_a_poll_without_a_task_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_TIMEOUT_S", 0.01)
    coordinator = Coordinator()
    async with within():
        assert await (await join(coordinator, "a")).poll() is None


async def test_a_task_is_repeated_until_its_answer_has_come() -> None:
    """A response may be lost, or its call be cancelled."""
    coordinator = Coordinator()
    async with within():
        a = await join(coordinator, "a")
        publishing = asyncio.create_task(publish(coordinator, 1))
        polling = asyncio.create_task(a.next())
        await turns()
        polling.cancel()
        task = await a.next()
        assert await a.next() == task
        await a.finish(task)
        await a.finish(task)
        await publishing


async def test_a_failure_of_all_is_an_error_that_names_the_replicas_and_the_reasons() -> None:
    coordinator = Coordinator()
    async with within():
        a, b = await replicas_of(coordinator, "a", "b")
        publishing = asyncio.create_task(publish(coordinator, 1))
        await b.do(failure="wrong shape")
        await turns()
        assert not publishing.done()
        await a.do(failure="no memory")
        with pytest.raises(WeightSyncError, match="a: no memory; b: wrong shape"):
            await publishing
        assert coordinator.versions() == Versions()
        assert not coordinator.snapshot().evicted


async def test_a_failure_does_not_stay_for_the_next_version() -> None:
    coordinator = Coordinator()
    async with within():
        a = await join(coordinator, "a")
        publishing = asyncio.create_task(publish(coordinator, 1))
        await a.do(failure="no")
        with pytest.raises(WeightSyncError):
            await publishing
        following = asyncio.create_task(a.do())
        assert len(await publish(coordinator, 2)) == 1
        await following


async def test_a_failed_order_is_given_to_no_replica_any_more() -> None:
    coordinator = Coordinator()
    async with within():
        a = await join(coordinator, "a")
        await give(a, publish(coordinator, 1))
        publishing = asyncio.create_task(coordinator.client.publish(2, ["bad"], 60.0, adapter="x"))
        await a.do(failure="wrong shape")
        with pytest.raises(WeightSyncError):
            await publishing
        assert await a.idle()
        late = Replica(coordinator, "late")
        await late.subscribe()
        (task,) = await late.catch_up()
        assert task.order.payload_ref == PAYLOAD_REF
        assert coordinator.versions() == Versions(0, {"x": 1})


async def test_a_version_of_an_adapter_is_never_used_again_even_after_a_failure() -> None:
    coordinator = Coordinator()
    async with within():
        await join(coordinator, "a")
        with pytest.raises(WeightSyncError, match="did not reach a"):
            await publish(coordinator, 3, 0.01)
        for version in (3, 2, 0, -1):
            for adapter in (None, "new"):
                with pytest.raises(WeightSyncError, match="never reused"):
                    await publish(coordinator, version, adapter=adapter)


@pytest.mark.parametrize("adapter", ["x", None], ids=["adapter", "weights"])
async def test_a_call_that_ended_is_answered_again_after_restarts(adapter: str | None) -> None:
    """The answer may be lost with the coordinator. A joined replica is not waited for: no sender exists."""
    coordinator = Coordinator()
    async with within():
        a, order = await join(coordinator, "a"), Order("weights", 60.0, 1, token="a publication")
        if adapter:
            order = Order("adapter", 60.0, 1, adapter, PAYLOAD_REF)
        else:
            sending = asyncio.create_task(send(coordinator, 1, order.token))
        following = asyncio.create_task(do(a, 1 if adapter else 4))
        await coordinator.issue("call", order)
        await following
        for _ in range(2):
            snapshot, coordinator = coordinator.snapshot(), Coordinator(restored=False)
            await coordinator.restore(snapshot)
            joined = Replica(coordinator, "joined")
            await joined.subscribe()
            assert (await coordinator.issue("call", order))[0] == {"a": None}
            assert coordinator.snapshot().lacking == (set() if adapter else {"joined"})
            with pytest.raises(WeightSyncError, match="never reused"):
                await publish(coordinator, 1, adapter=adapter)
        if not adapter:
            await sending


async def do(replica: Replica, tasks: int) -> None:
    for _ in range(tasks):
        await replica.do()


@pytest.mark.parametrize("late", [True, False])
async def test_a_version_that_failed_is_refused_after_a_restart_too(late: bool) -> None:
    """Even if all replicas have it by then: its caller may have another payload."""
    coordinator = Coordinator()
    async with within():
        await join(coordinator, "a")
        with pytest.raises(WeightSyncError, match="did not reach a"):
            await publish(coordinator, 3, 0.01)
        if late:
            await coordinator.leave("a")
            replacement = Replica(coordinator, "b")
            await replacement.subscribe()
            await replacement.catch_up()
            assert coordinator.versions().adapters == {"x": 3}
        restarted = Coordinator(restored=False)
        await restarted.restore(coordinator.snapshot())
        with pytest.raises(WeightSyncError, match="never reused"):
            await publish(restarted, 3, 0.01)


ORDERS: dict[str, Any] = {
    "adapter": lambda client, timeout=60.0: client.publish(1, PAYLOAD_REF, timeout, adapter="x"),
    "pin": lambda client, timeout=60.0: client.pin("x", 0, PAYLOAD_REF, timeout),
    "release": lambda client, timeout=60.0: client.release("y", timeout),
    "sleep": lambda client, timeout=60.0: client.sleep(timeout),
    "wake": lambda client, timeout=60.0: client.wake(timeout),
    "probe": lambda client, timeout=60.0: client.probe([1, 2], timeout),
}
BEFORE: dict[str, Any] = {
    "release": lambda client: client.pin("y", 0, PAYLOAD_REF, 60.0),
    "wake": lambda client: client.sleep(60.0),
}
"""Orders before which a replica has nothing to do."""


async def prepared(name: str, *names: str) -> tuple[Coordinator, list[Replica]]:
    """Return replicas that an order gives something to do."""
    coordinator = Coordinator()
    replicas = await replicas_of(coordinator, *names)
    if name in BEFORE:
        doing = [asyncio.create_task(replica.do()) for replica in replicas]
        await BEFORE[name](coordinator.client)
        await asyncio.gather(*doing)
    return coordinator, replicas


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
async def test_an_order_without_replicas_is_an_error_and_uses_up_no_version(order: Any) -> None:
    coordinator = Coordinator()
    async with within():
        with pytest.raises(WeightSyncError, match="no engine replica"):
            await order(coordinator.client)
        assert await give(await join(coordinator, "a"), publish(coordinator, 1)) == {"a": None}


@pytest.mark.parametrize("name", ORDERS)
async def test_every_order_fails_with_the_replica_that_fails(name: str) -> None:
    async with within():
        coordinator, replicas = await prepared(name, "a", "b")
        giving = asyncio.create_task(ORDERS[name](coordinator.client))
        obeying = [asyncio.create_task(replica.do(failure="no memory")) for replica in replicas]
        with pytest.raises(WeightSyncError, match="a: no memory; b: no memory"):
            await giving
        await asyncio.gather(*obeying)
        assert all([await replica.idle() for replica in replicas])


@pytest.mark.parametrize("name", ORDERS)
async def test_every_order_ends_with_its_time(name: str) -> None:
    async with within():
        coordinator, _ = await prepared(name, "a")
        late = r"did not reach a replacement for a \(it sent nothing for 0\.0075 s .*\) within 0\.01 s"
        with pytest.raises(WeightSyncError, match=late):
            await ORDERS[name](coordinator.client, 0.01)


async def test_a_replica_that_joins_receives_the_current_version() -> None:
    coordinator = Coordinator()
    async with within():
        a = await join(coordinator, "a")
        await give(a, publish(coordinator, 4))
        late = Replica(coordinator, "late")
        await late.subscribe()
        (task,) = await late.catch_up()
        assert (task.order.version, task.order.payload_ref) == (4, PAYLOAD_REF)
        obeying = [asyncio.create_task(replica.do()) for replica in (a, late)]
        assert len(await publish(coordinator, 5)) == 2
        await asyncio.gather(*obeying)


async def test_a_version_waits_for_a_replica_that_is_catching_up() -> None:
    coordinator = Coordinator()
    async with within():
        a, late = await join(coordinator, "a"), Replica(coordinator, "late")
        await late.subscribe()
        publishing = asyncio.create_task(publish(coordinator, 1))
        await a.do()
        await turns()
        assert not publishing.done()
        await late.catch_up()
        assert len(await publishing) == 2


async def give(replica: Replica, order: Any, result: Any = None) -> Any:
    """Issue an order that one replica executes."""
    doing = asyncio.create_task(replica.do(result=result))
    done = await order
    await doing
    return done


async def kinds_of_joining(coordinator: Coordinator, name: str) -> list[tuple[str, Any]]:
    """Return what a replica executes that joins, without weights, and leaves."""
    late = Replica(coordinator, name)
    await late.subscribe()
    tasks = await late.catch_up()
    await coordinator.leave(name)
    return [(task.kind, task.order.payload_ref if task.order else None) for task in tasks]


async def test_adapters_and_sleep_stand_next_to_each_other() -> None:
    coordinator = Coordinator()
    async with within():
        a, client = await join(coordinator, "a"), coordinator.client
        await give(a, client.publish(1, ["x1"], 60.0, adapter="x"))
        await give(a, client.publish(3, ["y3"], 60.0, adapter="y"))
        await give(a, client.publish(4, ["x4"], 60.0, adapter="x"))
        await give(a, client.sleep(60.0))
        assert coordinator.versions() == Versions(0, {"y": 3, "x": 4}, asleep=1)
        current = [("adapter", ["y3"]), ("adapter", ["x4"])]
        assert await kinds_of_joining(coordinator, "late") == [*current, ("sleep", None)]
        await give(a, client.wake(60.0))
        assert coordinator.versions() == Versions(0, {"y": 3, "x": 4})
        assert await kinds_of_joining(coordinator, "later") == current


async def test_a_pinned_version_stays_until_its_release_also_for_a_replica_that_joins() -> None:
    coordinator = Coordinator()
    async with within():
        a, client = await join(coordinator, "a"), coordinator.client
        await give(a, client.publish(1, ["x1"], 60.0, adapter="x"))
        await give(a, client.pin("x@1", 1, ["x1"], 60.0))
        await give(a, client.publish(2, ["x2"], 60.0, adapter="x"))
        assert coordinator.versions() == Versions(0, {"x": 2, "x@1": 1})
        assert await kinds_of_joining(coordinator, "late") == [("adapter", ["x1"]), ("adapter", ["x2"])]
        restarted = Coordinator(restored=False)
        await restarted.restore(coordinator.snapshot())
        assert restarted.versions().adapters == {"x": 2, "x@1": 1}
        await give(a, client.release("x@1", 60.0))
        assert coordinator.versions() == Versions(0, {"x": 2})
        assert await kinds_of_joining(coordinator, "later") == [("adapter", ["x2"])]
        assert [*coordinator._desired] == ["adapter x"]


async def test_a_replica_that_joins_during_a_release_keeps_no_pin() -> None:
    coordinator = Coordinator()
    async with within():
        a, late = await join(coordinator, "a"), Replica(coordinator, "late")
        await give(a, coordinator.client.pin("x@1", 1, ["x1"], 60.0))
        await late.subscribe()
        task = await late.next()
        releasing = asyncio.create_task(coordinator.client.release("x@1", 60.0))
        await a.do()
        await late.finish(task)
        await turns()
        assert not releasing.done()
        assert (await late.do()).kind == "release"
        await releasing
        assert late.state.adapters == {}


async def test_sleep_returns_why_nothing_was_freed() -> None:
    coordinator = Coordinator()
    async with within():
        a, b = await replicas_of(coordinator, "a", "b")
        sleeping = asyncio.create_task(coordinator.client.sleep(60.0))
        await a.do(result="a CPU has no device memory")
        await b.do()
        assert await sleeping == {"a": "a CPU has no device memory", "b": None}


@pytest.mark.parametrize("name", ["adapter", "pin", "probe"])
async def test_sleeping_engines_take_nothing(name: str) -> None:
    coordinator = Coordinator()
    async with within():
        a = await join(coordinator, "a")
        await give(a, coordinator.client.sleep(60.0))
        with pytest.raises(WeightSyncError, match="the engines are asleep; wake them before"):
            await ORDERS[name](coordinator.client)
        await give(a, coordinator.client.wake(60.0))
        await give(a, ORDERS[name](coordinator.client), [-1.0])


async def test_there_is_no_deeper_sleep() -> None:
    with pytest.raises(WeightSyncError, match="level 2 forgets the weights"):
        await Coordinator().client.sleep(60.0, level=2)


async def test_a_probe_returns_every_replicas_answer_and_leaves_nothing() -> None:
    coordinator = Coordinator()
    async with within():
        a, b = await replicas_of(coordinator, "a", "b")
        probing = asyncio.create_task(coordinator.client.probe([7, 8, 9], 60.0, "x"))
        task = await a.next()
        assert (task.kind, task.order.ids, task.order.adapter) == ("probe", (7, 8, 9), "x")
        await a.finish(task, result=[-1.0, -2.0])
        joined = Replica(coordinator, "joins meanwhile")
        await joined.subscribe()
        await b.do(result=[-1.5, -2.5])
        await turns()
        assert not probing.done()
        await joined.do(result=[-1.0, -2.0])
        expected = {"a": [-1.0, -2.0], "b": [-1.5, -2.5], "joins meanwhile": [-1.0, -2.0]}
        assert await probing == expected
        assert await a.idle()


async def test_a_publication_returns_the_probe_of_what_was_loaded() -> None:
    coordinator = Coordinator()
    async with within():
        a = await join(coordinator, "a")
        publishing = asyncio.create_task(publish(coordinator, 1, probe=[1, 2]))
        assert [(await a.do(result=[-1.0])).kind for _ in range(2)] == ["adapter", "probe"]
        assert await publishing == {"a": [-1.0]}


async def test_orders_wait_for_one_another_but_not_for_ever() -> None:
    coordinator = Coordinator()
    async with within():
        a = await join(coordinator, "a")
        first = asyncio.create_task(publish(coordinator, 1))
        second = asyncio.create_task(publish(coordinator, 2))
        await turns()
        with pytest.raises(
            WeightSyncError, match=r"could not begin within .*version 1 .* is still under way"
        ):
            await coordinator.client.wake(0.02)
        assert coordinator.versions() == Versions()
        for publishing in (first, second):
            await a.do()
            assert len(await publishing) == 1


async def test_an_order_whose_publisher_is_cancelled_makes_room() -> None:
    coordinator = Coordinator()
    async with within():
        a = await join(coordinator, "a")
        first = asyncio.create_task(coordinator._execute("", Order("adapter", 60.0, 1, "x", PAYLOAD_REF)))
        await turns()
        first.cancel()
        second = asyncio.create_task(publish(coordinator, 2))
        await turns()
        task = await a.do()
        assert task.order.version == 2
        assert len(await second) == 1


# the dead, the stuck and the leaving


async def dead(coordinator: Coordinator) -> None:
    await Replica(coordinator, "dead", Life(dead=True)).subscribe()


async def test_a_dead_replica_is_not_waited_for() -> None:
    coordinator = Coordinator()
    async with within():
        living = await join(coordinator, "living")
        await dead(coordinator)
        assert await give(living, publish(coordinator, 1)) == {"living": None}


async def test_a_replica_that_dies_while_it_is_waited_for_is_waited_for_no_longer() -> None:
    coordinator, life = Coordinator(), Life()
    async with within():
        living = await join(coordinator, "living")
        await join(coordinator, "doomed", life)
        publishing = asyncio.ensure_future(publish(coordinator, 1))
        await living.do()
        await turns()
        assert not publishing.done()
        life.end()
        assert len(await publishing) == 1


async def test_a_replica_that_joins_and_dies_during_an_order_is_noticed() -> None:
    coordinator = Coordinator()
    async with within():
        living = await join(coordinator, "living")
        publishing = asyncio.ensure_future(publish(coordinator, 1))
        await turns()
        await dead(coordinator)
        await living.do()
        assert len(await publishing) == 1


async def test_a_leave_or_a_death_is_reported_once() -> None:
    told: list[str] = []

    async def tell(replica: str) -> None:
        told.append(replica)

    coordinator, lives = Coordinator(tell), {name: Life() for name in ("a", "b")}
    async with within():
        for name, life in lives.items():
            await join(coordinator, name, life)
        await coordinator.leave("a")
        lives["a"].end()
        lives["b"].end()
        await until(lambda: len(told) == 2)
        await turns()
    assert told == ["a", "b"]


async def test_the_death_of_one_of_the_same_name_is_not_that_of_its_successor() -> None:
    coordinator, first = Coordinator(), Life()
    async with within():
        await join(coordinator, "a", first)
        second = await join(coordinator, "a", Life())
        first.end()
        await turns()
        assert await give(second, publish(coordinator, 1)) == {"a": None}


async def test_when_all_died_a_version_waits_for_a_replacement() -> None:
    coordinator = Coordinator()
    async with within():
        await dead(coordinator)
        publishing = asyncio.ensure_future(publish(coordinator, 1, 5.0))
        await turns()
        assert not publishing.done()
        new = Replica(coordinator, "new")
        await new.subscribe()
        assert [task.kind for task in await new.catch_up()] == ["adapter"]
        assert len(await publishing) == 1


async def test_when_all_died_and_none_came_the_error_says_so() -> None:
    coordinator = Coordinator()
    async with within():
        await dead(coordinator)
        with pytest.raises(WeightSyncError, match="did not reach a replacement for a dead replica"):
            await publish(coordinator, 1, 0.02)


async def test_a_replica_that_leaves_is_not_waited_for_and_must_subscribe_again() -> None:
    coordinator = Coordinator()
    async with within():
        a, leaving = await replicas_of(coordinator, "a", "leaving")
        publishing = asyncio.create_task(publish(coordinator, 1, 5.0))
        await a.do()
        polling = asyncio.create_task(leaving.next())
        await turns()
        await coordinator.leave("leaving")
        assert len(await publishing) == 1
        await polling
        with pytest.raises(NotSubscribedError, match="leaving is not subscribed"):
            await leaving.poll()
        await coordinator.leave("leaving")


async def test_a_replica_is_up_when_it_has_caught_up() -> None:
    coordinator = Coordinator()
    async with within():
        await join(coordinator, "a")
        waiting = asyncio.create_task(coordinator.wait_for_replicas(2))
        b = Replica(coordinator, "b")
        await b.subscribe()
        await turns()
        assert not waiting.done()
        await b.catch_up()
        await waiting


async def test_a_replica_that_cannot_start_ends_the_waiting_for_it() -> None:
    coordinator = Coordinator()
    async with within():
        waiting = asyncio.ensure_future(coordinator.wait_for_start(1, 0, 60.0))
        await turns()
        await coordinator.report_start_failure("OSError: no model")
        with pytest.raises(EngineStartError, match="OSError: no model"):
            await waiting


async def test_a_replica_that_fails_to_catch_up_does_not_take_from_the_others_what_they_have() -> None:
    coordinator = Coordinator()
    async with within():
        a = await join(coordinator, "a")
        await give(a, publish(coordinator, 1))
        late = Replica(coordinator, "late")
        await late.subscribe()
        await late.do(failure="ObjectLostError")
        assert coordinator.versions() == Versions(0, {"x": 1})
        assert not coordinator.snapshot().evicted, "it ends by itself"
        assert len(await kinds_of_joining(coordinator, "later")) == 1


class Arrays:
    """A payload that supports weak references."""


async def test_superseded_payloads_are_dropped() -> None:
    coordinator = Coordinator()
    alive: list[weakref.ref[Arrays]] = []

    def payload_ref() -> list[Any]:
        arrays = Arrays()
        alive.append(weakref.ref(arrays))
        return [arrays]

    async with within():
        a, client = await join(coordinator, "a"), coordinator.client
        for version in (1, 2, 3):
            await give(a, client.publish(version, payload_ref(), 60.0, adapter="x"))
        await give(a, client.publish(4, payload_ref(), 60.0, adapter="y"))
        for version in (5, 6):
            await give(a, client.publish(version, payload_ref(), 60.0, adapter="x"))
        failing = asyncio.create_task(client.publish(7, payload_ref(), 60.0, adapter="x"))
        await a.do(failure="no")
        await asyncio.wait([failing])
        assert failing.exception()
        del failing
    gc.collect(1)  # the objects of this test
    assert [ref() is not None for ref in alive] == [False, False, False, True, False, True, False]


# evictions


class Killer:
    """Collects the handles of killed replicas, and the names of replicas that are gone."""

    def __init__(self) -> None:
        self.killed: list[Any] = []
        self.gone: list[str] = []

    async def on_leave(self, replica: str) -> None:
        self.gone.append(replica)

    def coordinator(self, **settings: Any) -> Coordinator:
        return Coordinator(self.on_leave, self.killed.append, **settings)


async def test_a_replica_that_fails_what_another_one_executes_is_evicted() -> None:
    killer = Killer()
    coordinator = killer.coordinator()
    async with within():
        a, b = await replicas_of(coordinator, "a", "b")
        publishing = asyncio.create_task(publish(coordinator, 1))
        await b.do(failure="no memory")
        await turns()
        assert not publishing.done()
        await a.do()
        assert len(await publishing) == 1
        assert coordinator.versions() == Versions(0, {"x": 1})
        assert killer.killed == ["handle of b"]
        await until(lambda: killer.gone == ["b"])
        assert coordinator.snapshot().evicted == {"b": "no memory"}
        for call in (b.poll(), b.subscribe()):
            with pytest.raises(ReplicaEvictedError, match="b was evicted: no memory"):
                await call


async def test_a_replica_that_cannot_leave_a_state_that_is_no_longer_ordered_is_evicted() -> None:
    coordinator = Coordinator()
    async with within():
        a = await join(coordinator, "a")
        a.state = ReplicaState(asleep=True, serves=True)
        assert (await a.do(failure="no memory")).kind == "wake"
        assert coordinator.snapshot().evicted == {"a": "no memory"}


async def test_a_silent_replica_is_evicted_and_the_order_completes_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raylight.weights.quorum.MIN_SILENCE_S", 0.02)
    killer = Killer()
    coordinator = killer.coordinator()
    async with within():
        a, _ = await replicas_of(coordinator, "a", "frozen")
        assert await give(a, publish(coordinator, 1, 0.1)) == {"a": None}
        assert killer.killed == ["handle of frozen"]
        assert "it sent nothing for 0.025 s during version 1" in coordinator.snapshot().evicted["frozen"]


async def test_reports_prove_that_a_replica_is_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylight.weights.quorum.MIN_SILENCE_S", 0.2)
    killer = Killer()
    coordinator = killer.coordinator()
    async with within():
        a, hangs = await replicas_of(coordinator, "a", "hangs")
        obeying = asyncio.create_task(a.do())
        publishing = asyncio.create_task(publish(coordinator, 1, 0.4))
        while not publishing.done():
            await asyncio.wait([publishing], timeout=0.01)
            if not killer.killed:
                await hangs.poll(waits=False)
        assert len(await publishing) == 1
        await obeying
        late = "it had not executed version 1 of adapter 'x' after 0.3 s"
        assert coordinator.snapshot().evicted == {"hangs": late}


async def test_an_order_without_replicas_waits_for_the_replacement() -> None:
    killer = Killer()
    coordinator = killer.coordinator(replacement_timeout_s=30.0)
    async with within():
        await join(coordinator, "frozen")
        publishing = asyncio.create_task(publish(coordinator, 1, 0.2))
        await until(lambda: killer.killed == ["handle of frozen"])
        replacement = Replica(coordinator, "replacement")
        await replacement.subscribe()
        await replacement.catch_up()
        assert len(await publishing) == 1


async def test_an_order_whose_replacement_does_not_come_names_the_evicted_replica() -> None:
    coordinator = Killer().coordinator(replacement_timeout_s=0.05)
    expected = r"did not reach a replacement for frozen \(it sent nothing for 0.015 s .*\) within 0.07 s"
    async with within():
        await join(coordinator, "frozen")
        with pytest.raises(WeightSyncError, match=expected):
            await publish(coordinator, 1, 0.02)


async def test_a_late_order_stays_for_replicas_that_come_later() -> None:
    coordinator = Coordinator()
    async with within():
        await join(coordinator, "a")
        with pytest.raises(WeightSyncError):
            await publish(coordinator, 1, 0.01)
        new = Replica(coordinator, "new")
        await new.subscribe()
        await new.catch_up()
        assert coordinator.versions() == Versions(0, {"x": 1})


# restarts


async def restarted(old: Coordinator, killer: Killer) -> Coordinator:
    coordinator = killer.coordinator(restored=False)
    await coordinator.restore(old.snapshot())
    return coordinator


async def test_a_restarted_coordinator_answers_no_subscription_until_it_is_restored() -> None:
    old = Coordinator()
    async with within():
        a = await join(old, "a")
        await give(a, publish(old, 3))
        coordinator = Coordinator(restored=False)
        late = Replica(coordinator, "late")
        subscribing = asyncio.create_task(late.subscribe())
        publishing = asyncio.create_task(publish(coordinator, 4))
        await turns()
        assert not subscribing.done()
        assert await coordinator.next_snapshot(0, 60.0) is None
        a.coordinator = coordinator
        with pytest.raises(NotSubscribedError):
            await a.poll()
        await coordinator.restore(old.snapshot())
        await subscribing
        assert coordinator.versions() == Versions(0, {"x": 3})
        await late.catch_up()
        assert late.state.adapters["x"] >= 3
        assert not publishing.done()  # it waits for "a" to return
        publishing.cancel()


async def test_replicas_of_the_snapshot_are_waited_for_until_they_return() -> None:
    killer, old = Killer(), Coordinator()
    async with within():
        replicas = await replicas_of(old, "a", "b")
        coordinator = await restarted(old, killer)
        waiting = asyncio.create_task(coordinator.wait_for_replicas(2))
        publishing = asyncio.create_task(publish(coordinator, 1))
        for replica in replicas:
            await turns()
            assert not any(task.done() for task in (waiting, publishing))
            replica.coordinator = coordinator
            with pytest.raises(NotSubscribedError, match="must subscribe again"):
                await replica.poll()
            await replica.subscribe()
            await replica.do()
        await waiting
        assert len(await publishing) == 2


async def test_an_answer_to_the_coordinator_before_is_not_one_to_a_task_of_the_restarted_one() -> None:
    killer, old = Killer(), Coordinator()
    async with within():
        a = await join(old, "a")
        snapshot = old.snapshot()
        publishing = asyncio.create_task(publish(old, 1))
        task = await a.next()
        coordinator = killer.coordinator(restored=False)
        await coordinator.restore(snapshot)
        repeated = asyncio.create_task(coordinator.client.sleep(60.0))
        a.coordinator = coordinator
        await a.subscribe()
        await a.finish(task, failure="no memory")
        assert (await a.do()).kind == "sleep"
        assert await repeated == {"a": None}
        publishing.cancel()


async def test_a_replica_that_does_not_return_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylight.weights.quorum.RETURN_TIMEOUT_S", 0.01)
    killer, old = Killer(), Coordinator()
    async with within():
        await join(old, "dead")
        await restarted(old, killer)
        await until(lambda: killer.gone == ["dead"])
    assert killer.killed == ["handle of dead"]


@pytest.mark.parametrize("order", ["adapter", "wake"])
async def test_a_snapshot_leaves_out_the_pending_order(order: str) -> None:
    killer, old = Killer(), Coordinator()
    async with within():
        a = await join(old, "a")
        await give(a, old.client.publish(1, ["old"], 60.0, adapter="x"))
        if order == "wake":
            await give(a, old.client.sleep(60.0))
        pending = publish(old, 2) if order == "adapter" else old.client.wake(60.0)
        task = asyncio.create_task(pending)
        await a.next()
        snapshot = old.snapshot()
        assert snapshot.version == 1
        kept = [o.payload_ref for o in snapshot.desired.values()]
        assert kept == ([["old"]] if order == "adapter" else [["old"], None])
        coordinator = await restarted(old, killer)
        if order == "adapter":  # its caller repeats it
            repeated = asyncio.create_task(publish(coordinator, 2))
            a.coordinator = coordinator
            await a.subscribe()
            await a.do()
            await repeated
            assert coordinator.versions() == Versions(0, {"x": 2})
        task.cancel()


async def test_restoring_twice_has_no_effect() -> None:
    coordinator = Coordinator()
    await join(coordinator, "a")
    await coordinator.restore(Snapshot(number=7, version=9))
    assert coordinator.snapshot().version == -1


async def test_a_repeated_call_joins_the_first() -> None:
    coordinator = Coordinator()
    async with within():
        a, order = await join(coordinator, "a"), Order("adapter", 60.0, 1, "x", [ADAPTER])
        calls = [asyncio.create_task(coordinator.issue("key", order)) for _ in range(2)]
        await turns()
        await a.do()
        for results, state in await asyncio.gather(*calls):
            assert (results, state.version) == ({"a": None}, 1)
        assert (await coordinator.issue("key", order))[0] == {"a": None}


async def test_weights_are_published_by_their_sender() -> None:
    coordinator = Coordinator()
    async with within():
        a = await join(coordinator, "a")
        publishing = asyncio.create_task(publish_weights(coordinator, 1))
        assert [(await a.do()).kind for _ in range(4)] == ["init", "start", "update", "finish"]
        assert await publishing == 1
        assert coordinator.versions() == Versions(1)
