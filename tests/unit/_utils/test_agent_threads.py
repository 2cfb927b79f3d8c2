"""Threads of synchronous agents: what they return and raise comes back, and one that hangs is counted and
left alone."""

import asyncio
import contextlib
import gc
import threading
from contextvars import ContextVar

import pytest
from unit_helpers import until, within

from raylight._utils.agent_threads import AgentThreads

PLACE: ContextVar[str] = ContextVar("place", default="nowhere")


async def test_a_result_comes_back() -> None:
    assert await AgentThreads().run(lambda a, b: a + b, 1, 2) == (3, None)


@pytest.mark.parametrize(
    "error", [StopIteration(1), SystemExit(2), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()]
)
async def test_whatever_is_raised_comes_back(error: BaseException) -> None:
    def work() -> None:
        raise error

    assert await AgentThreads().run(work) == (None, error)


async def test_the_thread_has_a_copy_of_the_callers_context() -> None:
    PLACE.set("here")

    def work() -> str:
        before = PLACE.get()
        PLACE.set("there")
        return before

    assert (await AgentThreads().run(work))[0] == "here"
    assert PLACE.get() == "here"


async def test_calls_run_at_once_in_threads_that_do_not_hold_up_the_process() -> None:
    meeting = threading.Barrier(20, timeout=60)

    def work() -> bool:
        meeting.wait()
        return threading.current_thread().daemon

    threads = AgentThreads()
    async with within():
        assert await asyncio.gather(*(threads.run(work) for _ in range(20))) == [(True, None)] * 20


async def test_a_call_that_hangs_is_counted_until_it_returns() -> None:
    threads, leave = AgentThreads(), threading.Event()
    calls = [asyncio.create_task(threads.run(leave.wait, 60)) for _ in range(3)]
    await asyncio.sleep(0)
    for call in calls[:2]:
        call.cancel()
    await asyncio.wait(calls[:2])
    assert threads.abandoned == 2
    leave.set()
    assert await calls[2] == (True, None)
    await until(lambda: threads.abandoned == 0)


async def test_a_call_that_returns_in_the_moment_of_its_cancellation_is_not_counted() -> None:
    """Counting it would never be undone."""
    threads, returned = AgentThreads(), threading.Event()
    loop = asyncio.get_running_loop()
    call = asyncio.create_task(threads.run(returned.set))
    await asyncio.sleep(0)
    returned.wait(60)  # the loop stands still meanwhile
    loop.call_soon(call.cancel)  # after what the thread delivers, before the task takes it
    with contextlib.suppress(asyncio.CancelledError):
        await call
    for _ in range(5):
        await asyncio.sleep(0)
    assert threads.abandoned == 0


async def test_a_task_that_does_not_end_is_counted_and_kept_until_it_does() -> None:
    threads, ended = AgentThreads(), asyncio.Event()

    async def stubborn() -> None:
        inner = asyncio.get_running_loop().create_future()  # nobody else has it
        asyncio.get_running_loop().call_later(0.05, lambda f=inner: f.done() or f.set_result(None))
        try:
            await inner
        finally:
            ended.set()
        raise ValueError("nobody hears this")

    threads.abandon(asyncio.create_task(stubborn()))
    await asyncio.sleep(0)
    gc.collect(1)  # the objects of this test
    assert threads.abandoned == 1
    async with within():
        await ended.wait()
    await until(lambda: threads.abandoned == 0)


def test_a_thread_that_outlives_the_loop_ends_quietly(recwarn: pytest.WarningsRecorder) -> None:
    leave, left = threading.Event(), threading.Event()
    threads = AgentThreads()

    def work() -> None:
        leave.wait(60)
        left.set()

    async def main() -> None:
        call = asyncio.create_task(threads.run(work))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])

    asyncio.run(main())
    before = {thread for thread in threading.enumerate() if thread.name == "rollout"}
    leave.set()
    assert left.wait(5)
    for thread in before:
        thread.join(5)
    assert not [warning for warning in recwarn if "thread" in str(warning.message).lower()]
