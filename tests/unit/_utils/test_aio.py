"""The task group that raises plain errors, the daemon thread, and the condition without a lock."""

import asyncio
import subprocess
import sys

import pytest

from raylight._utils.aio import BroadcastCondition, in_daemon_thread, task_group


async def fail(error: BaseException) -> None:
    raise error


async def run_group(*errors: BaseException) -> None:
    async with task_group() as group:
        for error in errors:
            group.create_task(fail(error))


async def test_tasks_of_a_group_run_concurrently() -> None:
    met = asyncio.Barrier(2)
    async with task_group() as group:
        tasks = [group.create_task(met.wait()) for _ in range(2)]
    assert sorted(task.result() for task in tasks) == [0, 1]


async def test_the_first_error_is_raised_as_it_is() -> None:
    cause = KeyError("cause")
    error = ValueError("first")
    error.__cause__ = cause
    with pytest.raises(ValueError, match="first") as caught:
        await run_group(error, OSError("second"))
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
    assert caught.value is error
    assert error.__cause__ is cause


async def test_an_error_cancels_the_other_tasks_and_waits_for_them() -> None:
    cleaned_up = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned_up.set()

    async def group() -> None:
        async with task_group() as tasks:
            tasks.create_task(work())
            await asyncio.sleep(0)
            tasks.create_task(fail(ValueError("wrong")))

    with pytest.raises(ValueError, match="wrong"):
        await group()
    assert cleaned_up.is_set()


async def test_a_cancelled_group_raises_the_cancellation_and_not_the_errors_of_its_tasks() -> None:
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("clean-up failed")

    async def group() -> None:
        async with task_group() as tasks:
            tasks.create_task(work())

    outer = asyncio.create_task(group())
    await asyncio.sleep(0.01)
    outer.cancel()
    await asyncio.wait([outer])
    assert outer.cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await group()


async def test_nested_groups_raise_the_error_itself() -> None:
    async def outer() -> None:
        async with task_group() as group:
            group.create_task(run_group(ValueError("inner")))

    with pytest.raises(ValueError, match="inner"):
        await outer()


async def test_a_cancelled_group_cancels_its_tasks() -> None:
    async def work() -> None:
        async with task_group() as group:
            group.create_task(asyncio.Event().wait())

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_every_waiter_evaluates_its_predicate_when_notified() -> None:
    condition, number = BroadcastCondition(), 0
    waiters = [asyncio.create_task(condition.wait_for(lambda limit=n: number >= limit)) for n in (1, 2)]
    await asyncio.sleep(0)
    for number in (1, 2):
        condition.notify_all()
        done, _ = await asyncio.wait(waiters, timeout=0.05)
        assert len(done) == number
    assert [waiter.result() for waiter in waiters] == [True, True]


async def test_a_wait_ends_at_its_timeout() -> None:
    condition = BroadcastCondition()
    assert not await condition.wait_for(lambda: False, timeout=0.01)
    assert await condition.wait_for(lambda: True, timeout=0.0)


def test_a_timer_that_fires_just_before_the_end_ends_the_wait() -> None:
    """An event loop fires timers that are less than its clock's resolution away."""

    class ClockLoop(asyncio.SelectorEventLoop):
        now = 0.0

        def time(self) -> float:
            return self.now

    loop, evaluations = ClockLoop(), 0

    def predicate() -> bool:
        nonlocal evaluations
        evaluations += 1
        assert evaluations < 10
        return False

    async def wait() -> bool:
        waiting = asyncio.create_task(BroadcastCondition().wait_for(predicate, 1.0))
        await asyncio.sleep(0)
        loop.now = 1.0 - 1e-10
        return await waiting

    try:
        assert loop.run_until_complete(wait()) is False
    finally:
        loop.close()


async def test_a_task_group_keeps_no_task_that_has_ended() -> None:
    """One that lasts as long as a run would grow with it."""
    async with task_group() as group:
        task = group.create_task(asyncio.sleep(0))
        await task
        await asyncio.sleep(0)
        assert not group.unfinished  # type: ignore[attr-defined]


async def test_a_daemon_thread_returns_or_raises() -> None:
    assert await in_daemon_thread(lambda: 3) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        await in_daemon_thread(lambda: int("x"))


def test_the_end_of_a_process_waits_for_no_daemon_thread() -> None:
    program = (
        "import asyncio, threading\n"
        "from raylight._utils.aio import in_daemon_thread\n"
        "work = in_daemon_thread(threading.Event().wait)\n"
        "try: asyncio.run(asyncio.wait_for(work, 0.1))\n"
        "except TimeoutError: print('cancelled')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "cancelled\n", "")
