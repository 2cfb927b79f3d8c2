"""One kind of messages to the store: items leave in their order, in batches, and each is kept until it is there."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from raylight.aio import BroadcastCondition

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

MAX_BATCH = 1000
"""Items in one message."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
"""Between two tries to reach the store; each is twice as long as the one before."""
UNFIT = (ValueError, TypeError, OverflowError)
"""Errors that a record causes by what it holds: sending it again would not help."""


class RetryQueue(Generic[_T]):
    """Sends items in their order, in batches, one message at a time, and keeps each until it is there.

    Args:
        send: brings items to the store. It raises one of `UNFIT` because of what an item holds, and anything else because the store
            was not reached.
        give_up: what to send in place of an item that the store cannot hold; None: nothing, it is lost.
        may_leave: whether an item can be sent yet; those behind it wait too. Call `look` when that may have changed.
        linger_s: how long an item waits for others to travel with.
    """

    def __init__(
        self,
        send: Callable[[list[_T]], Awaitable[None]],
        give_up: Callable[[_T, Exception], _T | None],
        may_leave: Callable[[_T], bool],
        linger_s: float,
    ) -> None:
        self._send = send
        self._give_up = give_up
        self._may_leave = may_leave
        self._linger_s = linger_s
        self.queue: deque[_T] = deque()
        """What the store does not have yet."""
        self._ready = asyncio.Event()
        self._pressing = BroadcastCondition()
        self._hurry = BroadcastCondition()
        self._hurried = False
        self._one_by_one = 0
        """How many of the oldest are to be sent each alone."""
        self._sender: asyncio.Task[None] | None = None

    def put(self, *items: _T) -> None:
        self.queue.extend(items)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_forever())
        self.look()

    def look(self) -> None:
        if not self.queue or not self._may_leave(self.queue[0]):
            self._ready.clear()
            return
        self._ready.set()
        if self._is_pressing():
            self._pressing.notify_all()

    def hurry(self) -> None:
        """From now on nothing lingers, and pauses are short."""
        self._hurried = True
        self._hurry.notify_all()
        self._pressing.notify_all()

    async def stop(self) -> list[_T]:
        """Send no more; returns what was not sent."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
        left = list(self.queue)
        self.queue.clear()
        self._one_by_one = 0
        return left

    async def _send_forever(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            await self._ready.wait()
            await self._pressing.wait_for(self._is_pressing, self._linger_s)
            batch = self._next()
            try:
                await self._send(batch)
            except UNFIT as error:
                self._set_apart(batch, error)
            except (
                Exception
            ):  # whatever it is, and told of by `send`: what was handed over is kept until the store has it
                await self._rest(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            else:
                self._done(len(batch))
            pause = FIRST_PAUSE_S

    async def _rest(self, seconds: float) -> None:
        """A pause before the next try; short when there is hurry."""
        if self._hurried:
            await self._hurry.wait_for(lambda: False, FIRST_PAUSE_S)
        else:
            await self._hurry.wait_for(lambda: self._hurried, seconds)

    def _is_pressing(self) -> bool:
        return self._hurried or self._one_by_one > 0 or len(self.queue) >= MAX_BATCH

    def _next(self) -> list[_T]:
        """The oldest items that may leave; they stay in the queue until they are there."""
        limit = 1 if self._one_by_one else MAX_BATCH
        return list(itertools.takewhile(self._may_leave, itertools.islice(self.queue, limit)))

    def _set_apart(self, batch: list[_T], error: Exception) -> None:
        """One of these cannot be stored: send each alone, and give up the one that it is."""
        if len(batch) > 1:
            self._one_by_one = len(batch)
            return
        self._one_by_one = max(self._one_by_one, 1)
        logger.error("the store cannot hold the record of a call: %s", error, exc_info=error)
        if (instead := self._give_up(batch[0], error)) is not None:
            self.queue[0] = instead
        else:
            self._done(1)

    def _done(self, count: int) -> None:
        self._one_by_one = max(self._one_by_one - count, 0)
        for _ in range(count):
            self.queue.popleft()
        self.look()
