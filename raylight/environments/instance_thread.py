"""Thread in which the methods of one environment run, one after another."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, TypeVar

T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]


class InstanceThread:
    """A daemon thread for the synchronous code of one environment, started by the first call.

    An environment may hold what belongs to a thread, such as a connection of sqlite3, and expects no two
    calls at once. A daemon thread does not keep the process alive if a call never returns.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Calls that wait, and None for the end. Each has a caller that waits for it."""
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function in the thread, in a copy of the caller's context, after all earlier calls.

        When the caller is cancelled, a running call goes on, and its result is dropped.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._calls,), name="environment", daemon=True
            )
            self._thread.start()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome] = loop.create_future()
        self._calls.put(functools.partial(_call, copy_context(), function, loop, done))
        value, error = await done
        if isinstance(error, SystemExit | KeyboardInterrupt):  # would end the event loop
            raise RuntimeError(f"{error!r} was raised in an environment") from error
        if error is not None:
            raise error
        return value

    def end(self) -> None:
        """End the thread after the calls that have begun or wait."""
        self._calls.put(None)


def _work(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()


def _call(
    context: Context,
    function: Callable[[], Any],
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[Outcome],
) -> None:
    if done.cancelled():
        return
    outcome: Outcome
    try:
        outcome = context.run(function), None
    except BaseException as error:  # delivered to the caller
        outcome = None, error

    def deliver() -> None:
        if not done.done():
            done.set_result(outcome)

    with contextlib.suppress(RuntimeError):  # the loop was closed, so that no caller waits
        loop.call_soon_threadsafe(deliver)
