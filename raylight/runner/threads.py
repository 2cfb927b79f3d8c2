"""Where agents run that may not come back: synchronous ones in threads. One that hangs is left alone, and nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any


class AgentThreads:
    """Runs each call in a daemon thread of its own, within a copy of the caller's context, and counts agents that were given up.

    A pool would lose a place to every agent that hangs. Threads are daemons, so that a hung one does not keep the process alive.
    """

    def __init__(self) -> None:
        self._threads = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        """Held here, because asyncio alone would let go of a task that nobody awaits."""

    @property
    def abandoned(self) -> int:
        """Agents, in threads or as tasks, that were given up and still run."""
        return self._threads + len(self._tasks)

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """Leave a task alone that did not let itself be cancelled; it is counted until it ends."""
        self._tasks.add(task)
        task.add_done_callback(self._returned)

    def _returned(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio would log one that nobody looked at

    async def run(self, function: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
        """Call the function; returns its result, and what it raised instead.

        When the caller is cancelled the thread goes on, and is counted until it ends.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = copy_context()

        def deliver(answer: tuple[Any, BaseException | None]) -> None:
            if done.done():
                self._threads -= 1
            else:
                done.set_result(answer)

        def work() -> None:
            answer: tuple[Any, BaseException | None]
            try:
                answer = context.run(function, *args), None
            except BaseException as error:  # handed to the caller; a future cannot carry a StopIteration
                answer = None, error
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
                loop.call_soon_threadsafe(deliver, answer)

        threading.Thread(target=work, name="rollout", daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:
            self._threads += done.cancelled()  # else the thread had returned at the same moment
            raise
