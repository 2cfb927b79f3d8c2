"""Timer of the store's deadlines."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from raylight._utils.aio import BroadcastCondition, cancel_all

logger = logging.getLogger(__name__)

MIN_WAIT_S = 0.001
"""Shortest wait, because the clocks of the event loop and of the store differ slightly."""


class DeadlineTimer:
    """Enforces deadlines when they pass.

    Args:
        next_deadline: returns the earliest deadline; None if there is none.
        expire: enforces the deadlines that have passed.
        on_failure: called when the timer has failed.
        clock: time of the deadlines, in seconds.
    """

    def __init__(
        self,
        next_deadline: Callable[[], float | None],
        expire: Callable[[], Awaitable[object]],
        on_failure: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._next_deadline = next_deadline
        self._expire = expire
        self._on_failure = on_failure
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._deadline = math.inf
        self._deadline_moved = BroadcastCondition()

    def keep_running(self) -> None:
        """Start the timer if it is not running.

        If it failed, raise its error to this caller; the next call starts it again.
        """
        task = self._task
        if task is not None and task.done():
            self._task = None
            if not task.cancelled():  # cancelled with its event loop
                task.result()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def add(self, deadline: float) -> None:
        """Take a new deadline into account."""
        if deadline < self._deadline:
            self._deadline_moved.notify_all()

    async def stop(self) -> None:
        """Stop the timer."""
        if self._task is not None and not self._task.done():
            await cancel_all([self._task])

    async def _run(self) -> None:
        try:
            while True:
                deadline = self._next_deadline()
                self._deadline = math.inf if deadline is None else deadline
                remaining = None if deadline is None else deadline - self._clock()
                if remaining is not None and remaining > 0:
                    remaining = max(remaining, MIN_WAIT_S)
                if not await self._deadline_moved.wait_for(self._has_earlier_deadline, remaining):
                    await self._expire()
        except Exception:
            logger.exception("the store's timer failed; the next call starts it again")
            self._on_failure()
            raise

    def _has_earlier_deadline(self) -> bool:
        deadline = self._next_deadline()
        return deadline is not None and deadline < self._deadline
