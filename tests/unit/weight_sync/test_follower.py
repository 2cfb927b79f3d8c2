"""A replica follows its board: it catches up before it serves, does each order once, and says how it went."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from coordinator_helpers import ADAPTER, SpyEngine, turns
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayTaskError
from unit_helpers import within

from raylight.errors import CoordinatorLostError, CoordinatorUnavailableError, WeightSyncError
from raylight.weight_sync.client import CoordinatorClient
from raylight.weight_sync.coordinator import ReplicaCoordinator
from raylight.weight_sync.follower import Follower
from raylight.weight_sync.orders import Versions


async def open_box(box: list[Any]) -> Any:
    return box[0]


class Orphaned:
    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self) -> None:
        self.calls += 1


def make_follower(
    board: Any, name: str = "a", engine: Any = None, **settings: Any
) -> tuple[Follower, SpyEngine, Orphaned]:
    engine, orphaned = engine or SpyEngine(), Orphaned()
    return (
        Follower(name, engine, board, orphaned, **{"fetch": open_box, "pause_s": 0.01, **settings}),
        engine,
        orphaned,
    )


@asynccontextmanager
async def following(
    board: ReplicaCoordinator, *names: str, **settings: Any
) -> AsyncIterator[list[SpyEngine]]:
    """Replicas that follow the board until the end of the block."""
    made = [make_follower(board, name, **settings) for name in names]
    tasks = []
    async with within():
        for follower, _, _ in made:
            await follower.catch_up()
            tasks.append(asyncio.create_task(follower.follow()))
        yield [engine for _, engine, _ in made]
        for follower, _, _ in made:
            follower.check_health()
            await follower.close()
        await asyncio.gather(*tasks)


async def test_every_kind_of_order_reaches_every_engine() -> None:
    board = ReplicaCoordinator()
    async with following(board, "a", "b") as engines:
        assert await board.publish(1, ["arrays"], 5.0, "wait") == 2
        await board.publish(2, [ADAPTER], 5.0, "abort", adapter="x")
        assert await board.probe([4, 5, 6], 5.0, adapter="x") == {"a": [-5.0, -6.0], "b": [-5.0, -6.0]}
        assert await board.sleep(5.0) == {
            "a": "there is no memory to free",
            "b": "there is no memory to free",
        }
        assert await board.versions() == Versions(1, {"x": 2}, asleep=1)
        await board.wake(5.0)
        await board.drop_adapter("x", 5.0)
        for engine in engines:
            assert engine.told == [
                ("weights", 1, "arrays", "wait"),
                ("adapter", "x", 2, ADAPTER, "abort"),
                ("probe", [4, 5, 6], "x"),
                ("sleep", 1),
                ("wake",),
                ("drop", "x"),
            ]
        assert await board.versions() == Versions(1)


async def test_who_comes_later_does_what_stands_before_it_serves() -> None:
    board = ReplicaCoordinator()
    async with following(board, "a"):
        await board.publish(1, ["superseded"], 5.0)
        await board.publish(2, [ADAPTER], 5.0, adapter="x")
        await board.publish(3, [ADAPTER], 5.0, adapter="dropped")
        await board.publish(4, ["arrays"], 5.0)
        await board.drop_adapter("dropped", 5.0)
        await board.sleep(5.0)
        follower, engine, _ = make_follower(board, "late")
        await follower.catch_up()
        assert engine.told == [
            ("adapter", "x", 2, ADAPTER, "keep"),
            ("weights", 4, "arrays", "keep"),
            ("sleep", 1),
        ]
        await follower.close()


async def test_an_order_that_comes_while_a_replica_catches_up_is_done_too() -> None:
    board = ReplicaCoordinator()
    async with following(board, "a"):
        await board.publish(1, ["first"], 5.0)
        follower, engine, _ = make_follower(board, "late")
        engine.gate.clear()
        catching_up = asyncio.create_task(follower.catch_up())
        await turns()
        publishing = asyncio.create_task(board.publish(2, ["second"], 5.0))
        await turns()
        assert not publishing.done()
        engine.gate.set()
        await catching_up
        assert [told[1] for told in engine.told] == [1, 2]
        assert await publishing == 2
        await follower.close()


async def test_who_joins_while_all_go_to_sleep_tells_of_it_too() -> None:
    board = ReplicaCoordinator()
    async with following(board, "a") as (engine,):
        engine.gate.clear()
        sleeping = asyncio.create_task(board.sleep(5.0))
        await turns()
        follower, _, _ = make_follower(board, "late")
        await follower.catch_up()
        engine.gate.set()
        assert await sleeping == {"a": "there is no memory to free", "late": "there is no memory to free"}
        await follower.close()


async def test_an_engines_failure_reaches_the_publisher_and_the_replica_goes_on() -> None:
    board = ReplicaCoordinator()
    async with following(board, "a", "b") as (_, broken):
        broken.fails["weights"] = WeightSyncError("model.norm.weight has shape (3,)")
        with pytest.raises(WeightSyncError, match=r"^b: model.norm.weight has shape"):
            await board.publish(1, ["arrays"], 5.0)
        broken.fails = {"sleep": ValueError("no such level")}
        with pytest.raises(WeightSyncError, match="b: ValueError: no such level"):
            await board.sleep(5.0)
        broken.fails.clear()
        await board.wake(5.0)
        assert await board.publish(2, ["arrays"], 5.0) == 2


async def test_what_is_no_adapter_is_refused() -> None:
    board = ReplicaCoordinator()
    async with following(board, "a") as (engine,):
        with pytest.raises(WeightSyncError, match="adapter 'x' is a str, and must be a"):
            await board.publish(1, ["arrays"], 5.0, adapter="x")
        assert engine.told == []


async def never(box: list[Any]) -> Any:
    await asyncio.Event().wait()


async def test_a_box_that_does_not_come_is_an_error_before_the_publishers_time_is_over() -> None:
    board = ReplicaCoordinator()
    async with following(board, "a", fetch=never) as (engine,):
        with pytest.raises(WeightSyncError, match=r"a: version 1 could not be fetched within 0\.4 s"):
            await board.publish(1, ["arrays"], 0.5)
        assert engine.told == []
        await board.wake(5.0)


async def lost(box: list[Any]) -> Any:
    raise ObjectLostError("ab" * 28, None, "")


async def test_a_box_whose_publisher_died_is_an_error_that_says_so() -> None:
    board = ReplicaCoordinator()
    async with following(board, "a", fetch=lost):
        with pytest.raises(WeightSyncError, match="a: version 1 is lost, as its publisher is"):
            await board.publish(1, ["arrays"], 5.0)


async def test_a_replica_that_cannot_catch_up_does_not_start() -> None:
    board = ReplicaCoordinator()
    async with following(board, "a"):
        await board.publish(1, ["arrays"], 5.0)
        follower, engine, orphaned = make_follower(board, "late")
        engine.fails["weights"] = WeightSyncError("no memory")
        with pytest.raises(WeightSyncError, match="cannot catch up with the others: no memory"):
            await follower.catch_up()
        assert orphaned.calls == 0
        await board.leave("late")
        assert await board.versions() == Versions(1)


class Handle:
    """An actor handle whose actor holds a board. `fault` may raise, by the method's name, before it is called."""

    def __init__(self, board: ReplicaCoordinator, fault: Callable[[str], None]) -> None:
        self._board, self._fault = board, fault

    def __getattr__(self, name: str) -> Any:
        async def remote(*args: Any) -> Any:
            self._fault(name)
            try:
                return await getattr(self._board, name)(*args)
            except Exception as error:
                raise RayTaskError(name, "traceback", error).as_instanceof_cause() from None

        return type("Method", (), {"remote": staticmethod(remote)})


async def test_a_board_that_does_not_answer_for_a_while_is_asked_again() -> None:
    board, faults = ReplicaCoordinator(), {"next": 2, "acknowledge": 2}

    def fault(name: str) -> None:
        if caught_up and faults.get(name):
            faults[name] -= 1
            raise ActorUnavailableError("the network is slow", None)

    follower, engine, orphaned = make_follower(Handle(board, fault))
    async with within():
        caught_up = False
        await follower.catch_up()
        caught_up = True
        task = asyncio.create_task(follower.follow())
        assert await board.publish(1, ["arrays"], 5.0) == 1
        assert len(engine.told) == 1
        assert not any(faults.values())
        assert orphaned.calls == 0
        await follower.close()
        await task


@pytest.mark.parametrize("when", ["subscribe", "next", "acknowledge"])
async def test_when_the_board_is_gone_the_replica_is_told_once_and_stops(when: str) -> None:
    gone = False

    def fault(name: str) -> None:
        if gone and name == when:
            raise RayActorError()

    board = ReplicaCoordinator()
    follower, _, orphaned = make_follower(Handle(board, fault))
    async with within():
        if when == "subscribe":
            gone = True
            with pytest.raises(CoordinatorLostError, match="the board's actor is gone"):
                await follower.catch_up()
        else:
            await follower.catch_up()
            gone = True
            following = asyncio.create_task(follower.follow())
            if when == "acknowledge":
                with pytest.raises(WeightSyncError):
                    await board.publish(1, ["arrays"], 0.02)
            await following
        assert orphaned.calls == 1
        follower.check_health()
        await follower.close()


async def test_a_replica_that_was_taken_for_dead_is_unhealthy() -> None:
    board = ReplicaCoordinator()
    follower, _, orphaned = make_follower(board)
    async with within():
        await follower.catch_up()
        follower.check_health()
        following = asyncio.create_task(follower.follow())
        await turns()
        await board.leave("a")
        await following
    with pytest.raises(WeightSyncError, match=r"no longer follows its orders.*must start again"):
        follower.check_health()
    assert orphaned.calls == 0


async def test_a_replica_that_closes_is_waited_for_no_longer() -> None:
    board = ReplicaCoordinator()
    async with following(board, "stays"):
        follower, engine, _ = make_follower(board, "goes")
        await follower.catch_up()
        task = asyncio.create_task(follower.follow())
        engine.gate.clear()
        publishing = asyncio.create_task(board.publish(1, ["arrays"], 5.0))
        await turns()
        await follower.close()
        assert await publishing == 1
        engine.gate.set()
        await task
        follower.check_health()


class Arrays:
    """Can be watched."""


async def test_a_replica_keeps_no_box_while_it_waits() -> None:
    board = ReplicaCoordinator()
    arrays = Arrays()
    alive = weakref.ref(arrays)
    async with within():
        follower, engine, _ = make_follower(board)
        await follower.catch_up()
        task = asyncio.create_task(follower.follow())
        await board.publish(1, [arrays], 5.0)
        await board.publish(2, ["others"], 5.0)
        del arrays
        engine.told.clear()
        await turns()
        gc.collect()
        assert alive() is None
        await follower.close()
        await task


# the board behind an actor


async def test_an_actors_errors_arrive_as_they_were_raised() -> None:
    fleet = CoordinatorClient(Handle(ReplicaCoordinator(), lambda name: None))
    with pytest.raises(WeightSyncError, match="no engine replica has subscribed") as caught:
        await fleet.publish(1, ["arrays"], 5.0)
    assert type(caught.value) is WeightSyncError
    assert await fleet.versions() == Versions()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RayActorError(), CoordinatorLostError),
        (ActorUnavailableError("slow", None), CoordinatorUnavailableError),
    ],
)
async def test_the_death_of_the_board_is_a_typed_error(error: Exception, expected: type[Exception]) -> None:
    def fault(name: str) -> None:
        raise error

    with pytest.raises(expected):
        await CoordinatorClient(Handle(ReplicaCoordinator(), fault)).publish(1, ["arrays"], 5.0)


async def test_no_call_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylight.weight_sync.client.GRACE_S", 0.01)
    board = ReplicaCoordinator()
    handle = Handle(board, lambda name: None)
    monkeypatch.setattr(board, "publish", never_answers)
    with pytest.raises(CoordinatorUnavailableError, match=r"did not answer `publish` within 0\.02 s"):
        await CoordinatorClient(handle).publish(1, ["arrays"], 0.01)


async def never_answers(*args: Any) -> None:
    await asyncio.Event().wait()
