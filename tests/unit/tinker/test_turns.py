"""Requests of a model run in their order, and models take turns."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from unit_helpers import within

from raylight.http.errors import RequestError
from raylight.tinker.models import ModelTurns
from raylight.tinker.promises import ResultBody

Log = list[str]


def work(log: Log, name: str) -> Callable[[], Awaitable[ResultBody]]:
    async def run() -> ResultBody:
        log.append(name)
        await asyncio.sleep(0)
        return ResultBody(name.encode())

    return run


async def test_requests_of_a_model_run_by_their_numbers() -> None:
    log: Log = []
    turns = ModelTurns(asyncio.Lock(), 10)
    late = [turns.submit(number, work(log, str(number))) for number in (2, 1, 4)]
    turns.submit(3, None)  # rejected
    first = turns.submit(0, work(log, "0"))
    async with within():
        answers = await asyncio.gather(first, *late)
    assert log == ["0", "1", "2", "4"]
    assert [answer.content for answer in answers] == [b"0", b"2", b"1", b"4"]
    unnumbered = turns.submit(None, work(log, "5"))
    async with within():
        assert (await unnumbered).content == b"5"
    await turns.close()


async def test_models_take_turns_however_many_requests_they_send() -> None:
    log: Log = []
    lock = asyncio.Lock()
    busy, quiet = ModelTurns(lock, 100), ModelTurns(lock, 100)
    calls = [busy.submit(number, work(log, "busy")) for number in range(20)]
    calls += [quiet.submit(number, work(log, "quiet")) for number in range(5)]
    async with within():
        await asyncio.gather(*calls)
    last_quiet = max(place for place, name in enumerate(log) if name == "quiet")
    assert log[: last_quiet + 1].count("busy") <= 6
    await asyncio.gather(busy.close(), quiet.close())


async def test_a_failure_is_the_result_of_its_request_only() -> None:
    async def fail() -> ResultBody:
        raise ValueError("wrong")

    log: Log = []
    turns = ModelTurns(asyncio.Lock(), 10)
    failed, other = turns.submit(0, fail), turns.submit(1, work(log, "1"))
    async with within():
        with pytest.raises(ValueError, match="wrong"):
            await failed
        assert (await other).content == b"1"
    await turns.close()


async def test_too_many_waiting_requests_are_refused_but_never_the_next_one() -> None:
    log: Log = []
    turns = ModelTurns(asyncio.Lock(), 3)
    calls = [turns.submit(number, work(log, str(number))) for number in (1, 2, 3)]
    with pytest.raises(RequestError, match="wait already") as caught:
        turns.submit(4, work(log, "4"))
    assert caught.value.status == 429
    calls.append(turns.submit(0, work(log, "0")))
    with pytest.raises(RequestError, match="used before"):
        turns.submit(1, work(log, "1"))
    async with within():
        await asyncio.gather(*calls)
    await turns.close()


async def test_requests_after_one_that_never_came_fail() -> None:
    log: Log = []
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    turns = ModelTurns(asyncio.Lock(), 10, gap_s=0.01)
    turns.submit(5, None)  # rejected: its client has an answer
    lost = [turns.submit(number, work(log, str(number))) for number in (1, 2)]
    async with within():
        for call in lost:
            with pytest.raises(RequestError, match="request 0 of this model did not arrive"):
                await call
        assert (await turns.submit(6, work(log, "6"))).content == b"6"
    assert log == ["6"]
    gc.collect(1)  # the objects of this test
    assert unhandled == []
    await turns.close()


async def test_the_end_of_a_model_cancels_its_requests() -> None:
    lock = asyncio.Lock()
    turns = ModelTurns(lock, 10)
    async with lock:
        calls = [turns.submit(number, work([], "never")) for number in (0, 1)]
        await asyncio.sleep(0)
        await turns.close()
    assert all(call.cancelled() for call in calls)
