"""The weight board without Ray: a version is published when everyone has it, and whoever has not is named."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import RayActorError
from unit_helpers import within

from raylight.errors import EngineStartError, WeightSyncError
from raylight.serving.weights import WeightBoard

BOX = ["reference"]


async def follow(board: WeightBoard, name: str, have: int = 0) -> int:
    version, _ = await board.next(name, have, 60.0)
    await board.acknowledge(name, version, None)
    return version


async def board_with(*names: str) -> WeightBoard:
    board = WeightBoard()
    for name in names:
        assert await board.subscribe(name) == (0, None)
    return board


async def test_a_version_is_published_only_when_all_have_acknowledged_it() -> None:
    board = await board_with("a", "b")
    async with within():
        publishing = asyncio.create_task(board.publish(1, BOX, 60.0))
        assert await board.next("a", 0, 60.0) == (1, BOX)
        await board.acknowledge("a", 1, None)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not publishing.done()
        await board.acknowledge("b", 1, None)
        assert await publishing == 2


async def test_a_waiting_replica_hears_of_a_version_at_once() -> None:
    board = await board_with("a", "b")
    async with within():
        following = [asyncio.create_task(follow(board, name)) for name in ("a", "b")]
        await asyncio.sleep(0)
        assert await board.publish(1, BOX, 60.0) == 2
        assert await asyncio.gather(*following) == [1, 1]


async def test_waiting_for_a_version_ends_with_nothing() -> None:
    board = await board_with("a")
    async with within():
        assert await board.next("a", 0, 0.01) is None


async def test_a_failure_is_an_error_that_names_the_replica_and_the_reason() -> None:
    board = await board_with("a", "b")
    async with within():
        publishing = asyncio.create_task(board.publish(1, BOX, 60.0))
        await board.next("b", 0, 60.0)
        await board.acknowledge("b", 1, "WeightSyncError: wrong shape")
        with pytest.raises(WeightSyncError, match="b: WeightSyncError: wrong shape"):
            await publishing


async def test_a_failure_does_not_stay_for_the_next_version() -> None:
    board = await board_with("a")
    async with within():
        publishing = asyncio.create_task(board.publish(1, BOX, 60.0))
        await board.next("a", 0, 60.0)
        await board.acknowledge("a", 1, "no")
        with pytest.raises(WeightSyncError):
            await publishing
        following = asyncio.create_task(follow(board, "a", 1))
        assert await board.publish(2, BOX, 60.0) == 1
        assert await following == 2


async def test_a_late_word_about_an_older_version_does_not_fail_the_newer_one() -> None:
    board = await board_with("a")
    async with within():
        with pytest.raises(WeightSyncError):
            await board.publish(1, BOX, 0.01)
        publishing = asyncio.create_task(board.publish(2, BOX, 60.0))
        await board.next("a", 1, 60.0)
        await board.acknowledge("a", 1, "OutOfMemoryError: version 1 did not fit")
        await board.acknowledge("a", 2, None)
        assert await publishing == 1


async def test_who_is_late_is_named() -> None:
    board = await board_with("quick", "slow", "slower")
    async with within():
        following = asyncio.create_task(follow(board, "quick"))
        with pytest.raises(WeightSyncError, match=r"version 1 did not reach slow, slower within 0\.02 s"):
            await board.publish(1, BOX, 0.02)
        assert await following == 1


async def test_a_version_is_never_used_again_even_after_a_failure() -> None:
    board = await board_with("a")
    async with within():
        with pytest.raises(WeightSyncError, match="did not reach a"):
            await board.publish(3, BOX, 0.01)
        for version in (3, 2, 0, -1):
            with pytest.raises(WeightSyncError, match="never reused"):
                await board.publish(version, BOX, 60.0)


async def test_publishing_to_nobody_is_an_error_and_uses_up_no_version() -> None:
    board = WeightBoard()
    async with within():
        with pytest.raises(WeightSyncError, match="no engine replica"):
            await board.publish(1, BOX, 60.0)
        await board.subscribe("a")
        following = asyncio.create_task(follow(board, "a"))
        assert await board.publish(1, BOX, 60.0) == 1
        await following


async def test_who_subscribes_late_gets_the_current_version() -> None:
    board = await board_with("a")
    async with within():
        following = asyncio.create_task(follow(board, "a"))
        await board.publish(4, BOX, 60.0)
        await following
        assert await board.subscribe("late") == (4, BOX)
        following = [asyncio.create_task(follow(board, name, 4)) for name in ("a", "late")]
        assert await board.publish(5, BOX, 60.0) == 2
        await asyncio.gather(*following)


async def test_a_replica_that_missed_a_version_gets_the_newest() -> None:
    board = await board_with("a")
    async with within():
        for version in (1, 2):
            with pytest.raises(WeightSyncError):
                await board.publish(version, [version], 0.01)
        assert await board.next("a", 0, 60.0) == (2, [2])


class DeadActor:
    """An actor handle whose actor died."""

    class __ray_ready__:
        @staticmethod
        async def remote() -> None:
            raise RayActorError()


async def test_a_dead_replica_is_not_waited_for_but_the_one_in_its_place_is() -> None:
    board = await board_with("living")
    await board.subscribe("dead", DeadActor())
    async with within():
        living = asyncio.ensure_future(follow(board, "living"))
        assert await board.publish(1, BOX, 5.0) == 1
        assert await living == 1


async def test_when_all_died_a_version_waits_for_a_replacement() -> None:
    board = WeightBoard()
    await board.subscribe("dead", DeadActor())
    async with within():
        publishing = asyncio.ensure_future(board.publish(1, BOX, 5.0))
        await asyncio.sleep(0.01)
        assert not publishing.done()
        assert await board.subscribe("new") == (1, BOX)
        assert await publishing == 1


async def test_a_replica_that_cannot_start_ends_the_waiting_for_it() -> None:
    board = WeightBoard()
    async with within():
        waiting = asyncio.ensure_future(board.wait_for_subscribers(1))
        await board.cannot_start("OSError: no model")
        with pytest.raises(EngineStartError, match="OSError: no model"):
            await waiting


class StuckActor:
    """An actor handle whose actor neither answers nor is known to be dead."""

    class __ray_ready__:
        @staticmethod
        async def remote() -> None:
            await asyncio.Event().wait()


async def test_a_replica_that_hangs_does_not_outwait_the_deadline() -> None:
    board = WeightBoard()
    await board.subscribe("stuck", StuckActor())
    async with within():
        with pytest.raises(WeightSyncError, match="stuck within"):
            await board.publish(1, BOX, 0.05)
