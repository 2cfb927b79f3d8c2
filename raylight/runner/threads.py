"""Threads for synchronous agents. One that never returns is left alone: no other rollout waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any


class AgentThreads:
    """Runs each call in a daemon thread of its own, within a copy of the caller's context.

    A pool would lose a place to every agent that hangs. Threads are daemons, so that a hung one does not keep the process alive.
    """

    def __init__(self) -> None:
        self.abandoned = 0
        """Threads that were given up and still run."""

    async def run(self, function: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
        """Call the function; returns its result, and what it raised instead.

        When the caller is cancelled the thread goes on, and is counted until it ends.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = copy_context()

        def deliver(answer: tuple[Any, BaseException | None]) -> None:
            if done.done():
                self.abandoned -= 1
            else:
                done.set_result(answer)

        def work() -> None:
            answer: tuple[Any, BaseException | None]
            try:
                answer = context.run(function, *args), None
            except BaseException as error:  # raised again by the caller; a future cannot carry a StopIteration
                answer = None, error
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, answer)

        threading.Thread(target=work, name="rollout", daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:
            self.abandoned += 1
            raise
