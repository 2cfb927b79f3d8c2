"""Starts of replicas: progress, and their turns on devices that learners share."""

import asyncio

import pytest
from coordinator_helpers import join
from unit_helpers import until, within

from raylight.errors import EngineStartError
from raylight.weights.client import CoordinatorClient, wait_for_turn
from raylight.weights.coordinator import ReplicaCoordinator
from raylight.weights.starts import MAX_LOST, SILENCE_S, StageTimes, StartProgress, Starts


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_is_another_stage_or_more_work() -> None:
    starts = Starts(Clock(), 10.0)
    assert starts.report("a", "importing", 0)
    assert not starts.report("a", "importing", 0)
    assert starts.report("a", "loading weights", 0)
    assert starts.report("a", "loading weights", 5)
    assert (starts.progressed, starts.stages()) == (3, {"a": "loading weights"})
    starts.end("a")
    assert starts.stages() == {}


def test_learners_begin_once_the_replicas_that_have_entered_are_up() -> None:
    starts = Starts(Clock(), 10.0)
    starts.report("a", "loading", 0)
    assert starts.enter("a")
    assert not starts.hold("update")
    starts.end("a")
    assert starts.hold("update")
    starts.report("b", "importing", 0)
    assert not starts.enter("b"), "the learners hold no longer still"
    assert starts.report("b", "importing", 0), "it may wait as long as they work"
    starts.release("update")
    assert starts.enter("b")


def test_a_replica_that_enters_before_its_first_report_counts() -> None:
    starts = Starts(Clock(), 10.0)
    assert starts.enter("a")
    assert not starts.hold("update")
    assert starts.stages() == {}


def test_replacements_that_die_in_their_start_do_not_starve_the_learners() -> None:
    clock = Clock()
    starts = Starts(clock, 100.0)
    starts.enter("0")
    assert not starts.hold("update")
    assert not starts.enter("1"), "a request bars further replicas"
    clock.now += SILENCE_S + 1
    assert starts.hold("update")


def test_a_start_does_not_progress_for_ever_by_dying_again() -> None:
    clock = Clock()
    starts = Starts(clock, 100.0)
    for number in range(MAX_LOST + 2):
        progressed = [starts.report(str(number), "loading", work) for work in range(3)]
        assert all(progressed) == (number < MAX_LOST)
        assert starts.stages() == {str(number): "loading"}
        clock.now += SILENCE_S + 1


def test_a_late_report_revives_no_start() -> None:
    starts = Starts(Clock(), 10.0)
    starts.enter("a")
    starts.end("a")
    assert not starts.report("a", "loading", 5, entered=True)
    assert starts.hold("update")


def test_a_hold_that_is_released_before_it_is_granted_holds_nothing() -> None:
    starts = Starts(Clock(), 10.0)
    starts.enter("a")
    assert not starts.hold("update")
    starts.release("update")
    assert starts.hold("update"), "the request that is still under way ends"
    assert starts.enter("b")


@pytest.mark.parametrize("silent", [True, False])
def test_a_replica_that_dies_or_hangs_in_its_start_holds_up_nobody(silent: bool) -> None:
    clock = Clock()
    starts = Starts(clock, 200.0)
    starts.report("a", "loading", 0)
    starts.enter("a")
    clock.now = SILENCE_S - 1
    assert not starts.hold("update")
    starts.release("update")
    while clock.now < (SILENCE_S + 1 if silent else 201.0):
        clock.now += 10.0
        if not silent:
            starts.report("a", "loading", 0)
    assert starts.hold("update 2")
    assert bool(starts.stages()) is not silent


def test_a_replica_tells_a_restarted_coordinator_that_it_has_entered() -> None:
    starts = Starts(Clock(), 10.0)
    starts.report("a", "loading", 0, entered=True)
    assert not starts.hold("update")


def test_progress_in_words() -> None:
    assert str(StartProgress(0, 0, {})) == "waiting for its process"
    assert str(StartProgress(0, 1, {"a": "compiling"})) == "compiling"
    two = StartProgress(0, 2, {"a": "compiling", "b": "loading weights", "c": "compiling"})
    assert str(two) == "compiling (2 replicas), loading weights (1 replicas)"
    times = StageTimes(100.0)
    assert times.enter("importing", 100.0)
    assert not times.enter("importing", 105.0)
    assert times.enter("loading weights", 112.0)
    assert times.enter("compiling", 112.5)
    assert times.describe(120.0) == "20 s (importing 12 s, compiling 8 s)"


async def test_a_start_is_followed_until_the_replicas_are_up() -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        waiting = asyncio.ensure_future(coordinator.wait_for_start(1, 0, 60.0))
        await coordinator.report_start("a", "loading weights", 0, False)
        assert await waiting == StartProgress(0, 1, {"a": "loading weights"})
        waiting = asyncio.ensure_future(coordinator.wait_for_start(1, 1, 60.0))
        await coordinator.end_start("a")
        await join(coordinator, "a")
        assert await waiting == StartProgress(1, 1, {})
        assert await coordinator.wait_for_start(2, 1, 0.0) == StartProgress(1, 1, {}), "its time is over"
        await coordinator.report_start_failure("OSError: no model")
        with pytest.raises(EngineStartError, match="OSError: no model"):
            await coordinator.wait_for_start(2, 1, 60.0)


async def test_learners_and_a_replacement_take_turns() -> None:
    coordinator, seen = ReplicaCoordinator(replacement_timeout_s=60.0), list[str]()
    learners = CoordinatorClient(coordinator)

    async def start() -> None:
        await coordinator.report_start("a", "importing", 0, False)
        await wait_for_turn(coordinator, "enter_start", "a", 60.0)
        seen.append("replica enters")

    async def update() -> None:
        async with learners.starts_held():
            seen.append("update begins")
            await asyncio.sleep(0)
            seen.append("update ends")

    async with within():
        async with learners.starts_held():
            starting = asyncio.ensure_future(start())
            await asyncio.sleep(0)
            seen.append("learners hold")
        await starting
        updating = asyncio.ensure_future(update())
        await asyncio.sleep(0)
        seen.append("replica is up")
        await coordinator.end_start("a")
        await updating
    assert seen == ["learners hold", "replica enters", "replica is up", "update begins", "update ends"]


async def test_a_restarted_coordinator_goes_on_with_a_hold() -> None:
    coordinator = ReplicaCoordinator(replacement_timeout_s=60.0)
    async with within():
        assert await coordinator.hold_starts("update", 1.0)
        restarted = ReplicaCoordinator(replacement_timeout_s=60.0, restored=False)
        entering = asyncio.ensure_future(restarted.enter_start("a", 60.0))
        await restarted.restore(coordinator.snapshot())
        await asyncio.sleep(0)
        assert not entering.done()
        await restarted.release_starts("update")
        assert await entering


async def test_a_cancelled_hold_is_released() -> None:
    coordinator = ReplicaCoordinator(replacement_timeout_s=60.0)

    async def update() -> None:
        async with CoordinatorClient(coordinator, replacement_timeout_s=60.0).starts_held():
            pass

    async with within():
        assert await coordinator.enter_start("a", 0.0)
        updating = asyncio.ensure_future(update())
        await until(lambda: bool(coordinator.snapshot().holds))
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        assert await coordinator.enter_start("b", 0.0)
