"""Additions to asyncio: a task group that raises plain errors, the end of tasks, a daemon thread, a pause, a
condition without a lock, and a wait for progress."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar, overload

T = TypeVar("T")


class _TaskGroup(asyncio.TaskGroup):
    """A task group that knows its tasks which have not ended."""

    def __init__(self) -> None:
        super().__init__()
        self.unfinished: set[asyncio.Task[object]] = set()

    def create_task(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = super().create_task(*args, **kwargs)
        self.unfinished.add(task)
        task.add_done_callback(self.unfinished.discard)
        return task


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An `asyncio.TaskGroup` that raises the first error of its tasks, not an ExceptionGroup.

    Callers catch typed errors, and users read them: neither should have to unwrap a group. A cancellation
    from outside stays a CancelledError, even if tasks fail while they are cancelled.
    """
    task = asyncio.current_task()
    assert task is not None, "only a task can use a task group"
    cancellations = task.cancelling()
    first: BaseException | None = None
    try:
        async with _TaskGroup() as group:
            yield group
            # Wait for the tasks within the block: Python 3.11 uncounts the group's own cancellation of this
            # task only if it comes before the block ends.
            while group.unfinished:
                await asyncio.wait(group.unfinished)
    except BaseExceptionGroup as errors:
        cancelled = task.cancelling() > cancellations
        first = asyncio.CancelledError() if cancelled else errors.exceptions[0]
    if first is not None:  # outside the handler, so that the error keeps its own cause and context
        raise first


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait for their end; their errors are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Await a blocking function in a daemon thread; threads of `asyncio.to_thread` delay exit."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()  # a caller that is cancelled does not end the function

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # raised in the caller
            result.set_exception(error)

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    return await asyncio.wrap_future(result)


async def pause(seconds: float) -> None:
    """Wait for a time, between two looks at something that sends no event, such as another process."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


class BroadcastCondition:
    """A condition of one event loop: `notify_all` wakes every waiter, which evaluates its predicate again.

    In contrast to `asyncio.Condition` it has no lock, so that plain functions can notify.
    """

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}  # ordered: the longest waiting evaluates first

    def notify_all(self) -> None:
        """Wake all waiters."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    @overload
    async def wait_for(self, predicate: Callable[[], T | None]) -> T: ...
    @overload
    async def wait_for(self, predicate: Callable[[], bool], timeout: float | None) -> bool: ...
    async def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        """Wait until the predicate returns something true, and return it; False if it did not within
        `timeout` seconds."""
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while not (value := predicate()):
            remaining = None if end is None else end - loop.time()
            if remaining is not None and remaining <= 0:
                return False
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters[waiter] = None
            try:
                woken, _ = await asyncio.wait([waiter], timeout=remaining)
            finally:
                self._waiters.pop(waiter, None)
            if not woken:  # timers may fire a clock resolution before `end`
                return predicate()
        return value


async def wait_while_progressing(
    calls: Iterable[asyncio.Future[Any]],
    limit: float,
    idle_s: Callable[[], Awaitable[float]] | None,
    end: asyncio.Future[Any],
) -> tuple[set[asyncio.Future[Any]], set[asyncio.Future[Any]]]:
    """Wait until all calls are done, one failed, `end` is done, or nothing has progressed for `limit`
    seconds; return the calls that are done, and the others.

    Args:
        idle_s: returns the seconds since the last progress; None: the calls have `limit` seconds in all.
    """
    seconds, ended = limit, asyncio.ensure_future(asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION))
    try:
        while True:
            await asyncio.wait([ended, end], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            late = {call for call in calls if not call.done()}
            if ended.done() or end.done() or idle_s is None:
                return set(calls) - late, late
            idle = await idle_s()
            if idle >= limit:
                return set(calls) - late, late
            seconds = limit - idle
    finally:
        await cancel_all([ended])
