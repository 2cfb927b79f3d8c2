"""Calls to ranks hang if nothing progresses; long calls that progress do not."""

import asyncio
import math
import threading

import pytest

from raylight._utils.aio import wait_while_progressing
from raylight.learner import progress
from raylight.learner.progress import ProgressClock

LIMIT_S = 0.05


def pending() -> asyncio.Future:
    return asyncio.get_running_loop().create_future()


async def test_a_call_without_progress_is_late() -> None:
    call = pending()

    async def idle() -> float:
        return LIMIT_S

    assert await wait_while_progressing([call], LIMIT_S, idle, pending()) == (set(), {call})


async def test_a_call_with_progress_may_last_longer() -> None:
    call, asked = pending(), []

    async def idle() -> float:
        asked.append(0.0)
        if len(asked) == 3:
            call.set_result("done")
        return 0.0

    assert await wait_while_progressing([call], LIMIT_S, idle, pending()) == ({call}, set())
    assert len(asked) == 3


async def test_the_next_question_comes_when_the_limit_would_be_reached() -> None:
    call, clock = pending(), asyncio.get_running_loop().time
    asked: list[float] = []

    async def idle() -> float:
        asked.append(clock())
        return math.inf if len(asked) == 2 else 0.15

    await wait_while_progressing([call], 0.2, idle, pending())
    assert asked[1] - asked[0] >= 0.045


async def test_a_rank_that_does_not_respond_hangs() -> None:
    call = pending()

    async def idle() -> float:
        return math.inf

    assert (await wait_while_progressing([call], LIMIT_S, idle, pending()))[1] == {call}


async def test_a_failure_ends_the_wait_at_once() -> None:
    call, other = pending(), pending()
    call.set_exception(ValueError("wrong"))
    done, late = await wait_while_progressing([call, other], 60, None, pending())
    assert (done, late) == ({call}, {other})


async def test_a_bounded_call_is_late_whatever_its_progress() -> None:
    call = pending()
    assert await wait_while_progressing([call], LIMIT_S, None, pending()) == (set(), {call})


@pytest.fixture
def dumps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of faulthandler, which dumps stacks at a deadline."""
    seen: list[str] = []
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(
            progress.faulthandler, name, lambda *_, _name=name, **__: seen.append(_name.split("_")[0])
        )
    return seen


def test_marks_move_the_deadline_of_the_dump_at_most_once_a_second(
    dumps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    clock = ProgressClock()
    clock.mark()
    assert dumps == []
    clock.start("update", 10)
    for now[0] in (0.5, 0.9, 1.5, 2.0):
        clock.mark()
    assert dumps == ["dump", "dump"]
    now[0] = 5.0
    assert clock.idle_s("update") == 3.0
    clock.stop("update")
    assert dumps[-1] == "cancel"


def test_two_calls_in_threads_of_their_own_have_deadlines_of_their_own(
    dumps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    clock = ProgressClock()
    clock.start("update", 10)
    sending = threading.Thread(target=clock.start, args=("publish_weights", 100))
    sending.start()
    sending.join()
    now[0] = 4.0
    clock.mark()  # of the update
    now[0] = 5.0
    assert (clock.idle_s("update"), clock.idle_s("publish_weights")) == (1.0, 5.0)
    assert clock.thread_of("update") == threading.get_ident() != clock.thread_of("publish_weights")
    clock.stop("update")
    assert dumps[-1] == "dump", "the other call is still watched"
    clock.stop("publish_weights")
    assert dumps[-1] == "cancel"


async def test_a_wait_ends_when_another_call_has_failed() -> None:
    call, end = pending(), pending()
    waiting = asyncio.create_task(wait_while_progressing([call], 60, None, end))
    await asyncio.sleep(0)
    end.set_result("a rank died")
    assert await waiting == (set(), {call})
