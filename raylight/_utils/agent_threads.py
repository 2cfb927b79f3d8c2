"""Daemon threads for synchronous code of users. A hanging thread is abandoned rather than joined."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any


class AgentThreads:
    """Runs each call in a separate daemon thread, in a copy of the caller's context, and counts abandoned
    agents.

    A thread pool would lose a thread to every agent that hangs. A daemon thread does not keep the process
    alive.
    """

    def __init__(self) -> None:
        self._threads = 0
        self._tasks: set[asyncio.Task[object]] = set()
        """Strong references, because asyncio keeps only weak ones to a task that is not awaited."""

    @property
    def abandoned(self) -> int:
        """Number of abandoned agents, in threads or as tasks, that still run."""
        return self._threads + len(self._tasks)

    def abandon(self, task: asyncio.Task[object]) -> None:
        """Stop waiting for a task that ignored its cancellation; it is counted until it ends."""
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that it was never retrieved

    async def run(self, function: Callable[..., object], *args: object) -> tuple[Any, BaseException | None]:
        """Call the function in a thread; returns its result and its error, one of which is None.

        When the caller is cancelled, the thread is abandoned, and counted until it ends.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()
        context = copy_context()

        def deliver(result: tuple[object, BaseException | None]) -> None:
            if done.done():
                self._threads -= 1
            else:
                done.set_result(result)

        def work() -> None:
            result: tuple[object, BaseException | None]
            try:
                result = context.run(function, *args), None
            except BaseException as error:  # returned, because a future cannot carry a StopIteration
                result = None, error
            with contextlib.suppress(RuntimeError):  # the loop was closed, so that no caller waits
                loop.call_soon_threadsafe(deliver, result)

        threading.Thread(target=work, name="rollout", daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:
            self._threads += done.cancelled()  # False if the thread returned at the same moment
            raise
