"""A replica catches up before it serves, executes each order once, and reports the result."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from coordinator_helpers import ADAPTER, Coordinator, SpyEngine, Versions, publish_weights, send, turns
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayTaskError
from unit_helpers import until, within

from raylight.errors import CoordinatorLostError, CoordinatorUnavailableError, WeightSyncError
from raylight.weights.client import CoordinatorClient
from raylight.weights.executor import OrderExecutor
from raylight.weights.protocol import LoraAdapter


async def open_payload(payload_ref: list[Any]) -> Any:
    return payload_ref[0]


class LostCallback:
    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self) -> None:
        self.calls += 1


def make_executor(
    coordinator: Any, name: str = "a", engine: Any = None, **settings: Any
) -> tuple[OrderExecutor, SpyEngine, LostCallback]:
    engine, on_lost = engine or SpyEngine(), LostCallback()
    return (
        OrderExecutor(
            name, engine, coordinator, on_lost, **{"fetch": open_payload, "retry_delay_s": 0.01, **settings}
        ),
        engine,
        on_lost,
    )


@asynccontextmanager
async def following(coordinator: Coordinator, *names: str, **settings: Any) -> AsyncIterator[list[SpyEngine]]:
    """Replicas that execute orders until the end of the block."""
    made = [make_executor(coordinator, name, **settings) for name in names]
    tasks = []
    async with within():
        for executor, _, _ in made:
            await executor.catch_up()
            tasks.append(asyncio.create_task(executor.run()))
        yield [engine for _, engine, _ in made]
        for executor, _, _ in made:
            executor.check_health()
            await executor.close()
        await asyncio.gather(*tasks)


async def test_every_kind_of_order_reaches_every_engine() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "a", "b") as engines:
        assert await publish_weights(coordinator, 1, 5.0, "wait") == 2
        probed = await coordinator.client.publish(2, [ADAPTER], 5.0, "abort", adapter="x", probe=[4, 5, 6])
        assert probed == {"a": [-5.0, -6.0], "b": [-5.0, -6.0]}
        await coordinator.client.pin("x@2", 2, [ADAPTER], 5.0)
        assert coordinator.versions() == Versions(1, {"x": 2, "x@2": 2})
        await coordinator.client.release("x@2", 5.0)
        assert await coordinator.client.probe([4, 5, 6], 5.0, adapter="x") == {
            "a": [-5.0, -6.0],
            "b": [-5.0, -6.0],
        }
        assert await coordinator.client.sleep(5.0) == {
            "a": "there is no memory to free",
            "b": "there is no memory to free",
        }
        assert coordinator.versions() == Versions(1, {"x": 2}, asleep=1)
        await coordinator.client.wake(5.0)
        for engine in engines:
            assert engine.told == [
                ("weights", 1, "wait"),
                ("adapter", "x", 2, ADAPTER, "abort"),
                ("probe", [4, 5, 6], "x"),
                ("adapter", "x@2", 2, ADAPTER, "keep"),
                ("drop", "x@2"),
                ("probe", [4, 5, 6], "x"),
                ("sleep", 1),
                ("wake",),
            ]
        assert coordinator.versions() == Versions(1, {"x": 2})


async def join_late(coordinator: Coordinator, executor: OrderExecutor, version: int) -> None:
    """Have a replica catch up that lacks a version."""
    catching_up = asyncio.create_task(executor.catch_up())
    await until(lambda: bool(coordinator._quorum.lacking()))
    assert coordinator.snapshot().lacking == {"late"}
    sending = asyncio.create_task(send(coordinator, version))
    await catching_up
    await sending
    assert not coordinator.snapshot().lacking


async def test_who_comes_later_does_what_stands_before_it_serves() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "a"):
        await publish_weights(coordinator, 1, 5.0)
        await coordinator.client.publish(2, [ADAPTER], 5.0, adapter="x")
        await publish_weights(coordinator, 4, 5.0)
        await coordinator.client.sleep(5.0)
        executor, engine, _ = make_executor(coordinator, "late")
        await join_late(coordinator, executor, 4)
        assert engine.told == [
            ("adapter", "x", 2, ADAPTER, "keep"),
            ("weights", 4, "keep"),
            ("sleep", 1),
        ]
        await executor.close()


async def test_an_order_that_comes_while_a_replica_catches_up_is_done_too() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "a"):
        await coordinator.client.publish(1, [ADAPTER], 5.0, adapter="x")
        executor, engine, _ = make_executor(coordinator, "late")
        engine.gate.clear()
        catching_up = asyncio.create_task(executor.catch_up())
        await turns()
        publishing = asyncio.create_task(coordinator.client.publish(2, [ADAPTER], 5.0, adapter="y"))
        await turns()
        assert not publishing.done()
        engine.gate.set()
        await catching_up
        assert [told[1] for told in engine.told] == ["x", "y"]
        assert len(await publishing) == 2
        await executor.close()


async def test_who_joins_while_all_go_to_sleep_tells_of_it_too() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "a") as (engine,):
        engine.gate.clear()
        sleeping = asyncio.create_task(coordinator.client.sleep(5.0))
        await turns()
        executor, _, _ = make_executor(coordinator, "late")
        await executor.catch_up()
        engine.gate.set()
        assert await sleeping == {"a": "there is no memory to free", "late": "there is no memory to free"}
        await executor.close()


async def test_an_engines_failure_reaches_the_publisher_and_the_replica_goes_on() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "a") as (broken,):
        broken.fails["weights"] = WeightSyncError("model.norm.weight has shape (3,)")
        with pytest.raises(WeightSyncError, match=r"^a: model.norm.weight has shape"):
            await publish_weights(coordinator, 1, 5.0)
        broken.fails = {"sleep": ValueError("no such level")}
        with pytest.raises(WeightSyncError, match="a: ValueError: no such level"):
            await coordinator.client.sleep(5.0)
        broken.fails.clear()
        await coordinator.client.wake(5.0)
        assert await publish_weights(coordinator, 2, 5.0) == 1


async def test_what_is_no_adapter_is_refused() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "a") as (engine,):
        with pytest.raises(WeightSyncError, match="adapter 'x' is a str; it must be a"):
            await coordinator.client.publish(1, ["arrays"], 5.0, adapter="x")
        assert engine.told == []


async def never(payload_ref: list[Any]) -> Any:
    await asyncio.Event().wait()


async def test_a_payload_that_does_not_come_is_an_error_before_the_publishers_time_is_over() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "a", fetch=never) as (engine,):
        with pytest.raises(WeightSyncError, match=r"a: version 1 of .* could not be fetched within 0\.3 s"):
            await coordinator.client.publish(1, ["adapter"], 0.5, adapter="x")
        assert engine.told == []
        await coordinator.client.wake(5.0)


async def lost(payload_ref: list[Any]) -> Any:
    raise ObjectLostError("ab" * 28, None, "")


async def test_a_payload_whose_publisher_died_is_an_error_that_says_so() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "a", fetch=lost):
        with pytest.raises(
            WeightSyncError, match=r"a: the payload of version 1 .* is lost because its publisher died"
        ):
            await coordinator.client.publish(1, ["adapter"], 5.0, adapter="x")


async def test_a_replica_that_cannot_catch_up_does_not_start() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "a"):
        await publish_weights(coordinator, 1, 5.0)
        executor, engine, on_lost = make_executor(coordinator, "late")
        engine.fails["weights"] = WeightSyncError("no memory")
        with pytest.raises(WeightSyncError, match="cannot catch up with the others: no memory"):
            await join_late(coordinator, executor, 1)
        assert on_lost.calls == 0
        await coordinator.leave("late")
        assert coordinator.versions() == Versions(1)


class Handle:
    """A stand-in for the handle of a coordinator's actor. `fault(method)` may raise before a call."""

    def __init__(self, coordinator: Coordinator, fault: Callable[[str], None]) -> None:
        self._coordinator, self._fault = coordinator, fault

    def __getattr__(self, name: str) -> Any:
        async def remote(*args: Any) -> Any:
            self._fault(name)
            try:
                return await getattr(self._coordinator, name)(*args)
            except Exception as error:
                raise RayTaskError(name, "traceback", error).as_instanceof_cause() from None

        return type("Method", (), {"remote": staticmethod(remote)})


async def test_a_replica_that_failed_an_order_does_not_serve_when_its_report_is_lost() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "a"):
        await coordinator.client.publish(1, [ADAPTER], 5.0, adapter="x")
        engine = SpyEngine()
        engine.fails["adapter"] = WeightSyncError("no memory")
        polls = 0

        def fault(method: str) -> None:
            nonlocal polls
            polls += method == "poll"
            if polls == 2:  # the report of the failure
                raise ActorUnavailableError("restarting", None)

        executor, _, _ = make_executor(Handle(coordinator, fault), "late", engine)
        with pytest.raises(WeightSyncError, match="cannot catch up with the others: no memory"):
            await executor.catch_up()
        assert polls == 2
        assert coordinator._quorum.ready() == 1


async def test_a_coordinator_that_does_not_respond_is_called_again() -> None:
    coordinator, faults = Coordinator(), {"poll": 4}

    def fault(name: str) -> None:
        if caught_up and faults.get(name):
            faults[name] -= 1
            raise ActorUnavailableError("the network is slow", None)

    executor, engine, on_lost = make_executor(Handle(coordinator, fault))
    async with within():
        caught_up = False
        await executor.catch_up()
        caught_up = True
        task = asyncio.create_task(executor.run())
        assert await publish_weights(coordinator, 1, 5.0) == 1
        assert len(engine.told) == 1
        assert not any(faults.values())
        assert on_lost.calls == 0
        await executor.close()
        await task


@pytest.mark.parametrize("when", ["subscribe", "poll"])
async def test_when_the_coordinator_is_gone_the_callback_is_called_once(when: str) -> None:
    gone = False

    def fault(name: str) -> None:
        if gone and name == when:
            raise RayActorError()

    coordinator = Coordinator()
    executor, _, on_lost = make_executor(Handle(coordinator, fault))
    async with within():
        if when == "subscribe":
            gone = True
            with pytest.raises(CoordinatorLostError, match="the replica coordinator's actor is gone"):
                await executor.catch_up()
        else:
            await executor.catch_up()
            gone = True
            await executor.run()
        assert on_lost.calls == 1
        executor.check_health()
        await executor.close()


async def test_an_evicted_replica_is_unhealthy() -> None:
    coordinator = Coordinator()
    executor, _, on_lost = make_executor(coordinator)
    async with within():
        await executor.catch_up()
        executor.check_health()
        following = asyncio.create_task(executor.run())
        await turns()
        coordinator._quorum.evict("a", "it was late")
        coordinator._notify()
        await following
    with pytest.raises(WeightSyncError, match=r"no longer executes orders.*evicted: it was late"):
        executor.check_health()
    assert on_lost.calls == 0


async def test_a_replica_that_is_not_known_any_more_subscribes_again_and_loads_nothing_twice() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "a") as (engine,):
        await publish_weights(coordinator, 1, 5.0)
        await coordinator.client.publish(2, [ADAPTER], 5.0, adapter="x")
        await coordinator.client.sleep(5.0)
        told = list(engine.told)
        await coordinator.leave("a")
        await coordinator.client.wake(5.0)  # waits for it
        assert engine.told == [*told, ("wake",)]
        await publish_weights(coordinator, 3, 5.0)
        assert engine.told == [*told, ("wake",), ("weights", 3, "keep")]


async def test_a_replica_that_is_forgotten_again_while_it_subscribes_subscribes_once_more() -> None:
    """The coordinator was restarted twice."""
    coordinator = Coordinator()
    async with following(coordinator, "a") as (engine,):
        await publish_weights(coordinator, 1, 5.0)
        await coordinator.leave("a")
        engine.gate.clear()
        publishing = asyncio.create_task(publish_weights(coordinator, 2, 5.0))
        await until(lambda: "a" in coordinator._quorum)
        await coordinator.leave("a")
        engine.gate.set()
        assert await publishing == 1
        assert [told[1] for told in engine.told] == [1, 2]


async def test_a_replica_that_returns_undoes_what_was_ended_meanwhile() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "a", "b") as (engine, _):
        await coordinator.client.publish(1, [ADAPTER], 5.0, adapter="x")
        await coordinator.client.sleep(5.0)
        engine.told.clear()
        coordinator._desired.clear()  # what ended the sleep and the adapter reached the others only
        await coordinator.leave("a")
        assert await publish_weights(coordinator, 2, 5.0) == 2
        assert engine.told == [("drop", "x"), ("wake",), ("weights", 2, "keep")]


async def test_a_slow_engine_sends_heartbeats() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "a", heartbeat_s=0.005) as (engine,):
        engine.gate.clear()
        publishing = asyncio.create_task(publish_weights(coordinator, 1, 5.0))
        await until(lambda: bool(coordinator._pending))
        subscription = coordinator._quorum["a"]
        heard = subscription.heard
        await until(lambda: subscription.heard > heard)
        engine.gate.set()
        assert await publishing == 1


async def test_a_replica_that_closes_is_waited_for_no_longer() -> None:
    coordinator = Coordinator()
    async with following(coordinator, "stays"):
        executor, engine, _ = make_executor(coordinator, "goes")
        await executor.catch_up()
        task = asyncio.create_task(executor.run())
        engine.gate.clear()
        publishing = asyncio.create_task(publish_weights(coordinator, 1, 5.0))
        await turns()
        await executor.close()
        assert await publishing == 1
        engine.gate.set()
        await task
        executor.check_health()


class Arrays:
    """A payload that supports weak references."""


async def test_a_replica_keeps_no_payload_while_it_waits() -> None:
    coordinator = Coordinator()
    arrays = Arrays()
    alive = weakref.ref(arrays)
    async with within():
        executor, engine, _ = make_executor(coordinator)
        await executor.catch_up()
        task = asyncio.create_task(executor.run())
        adapter = LoraAdapter({}, {"weights": arrays})
        await coordinator.client.publish(1, [adapter], 5.0, adapter="x")
        await coordinator.client.publish(2, [ADAPTER], 5.0, adapter="x")
        del adapter
        del arrays
        engine.told.clear()
        await turns()
        gc.collect(1)  # the objects of this test
        assert alive() is None
        await executor.close()
        await task


# the coordinator behind an actor


async def test_an_actors_errors_arrive_as_they_were_raised() -> None:
    client = CoordinatorClient(Handle(Coordinator(), lambda name: None))
    with pytest.raises(WeightSyncError, match="no engine replica has subscribed") as caught:
        await client.publish(1, ["arrays"], 5.0)
    assert type(caught.value) is WeightSyncError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RayActorError(), CoordinatorLostError),
        (ActorUnavailableError("slow", None), CoordinatorUnavailableError),
    ],
)
async def test_the_death_of_the_coordinator_is_a_typed_error(
    error: Exception, expected: type[Exception]
) -> None:
    def fault(name: str) -> None:
        raise error

    with pytest.raises(expected):
        await CoordinatorClient(Handle(Coordinator(), fault)).publish(1, ["arrays"], 0.1)


async def test_no_call_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylight.weights.client.GRACE_S", 0.01)
    coordinator = Coordinator()
    handle = Handle(coordinator, lambda name: None)
    monkeypatch.setattr(coordinator, "issue", never_answers)
    with pytest.raises(CoordinatorUnavailableError, match=r"did not respond to `issue` within 0\.05 s"):
        await CoordinatorClient(handle).publish(1, ["arrays"], 0.01)


async def never_answers(*args: Any) -> None:
    await asyncio.Event().wait()
