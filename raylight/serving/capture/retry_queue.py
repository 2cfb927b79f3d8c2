"""A queue of items for the store that keeps each item until it is delivered."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from raylight._utils.aio import BroadcastCondition

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

MAX_BATCH = 1000
"""Most items in one message."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
"""Pauses between two deliveries that fail; each is twice as long as the one before."""
INVALID_ITEM = (ValueError, TypeError, OverflowError)
"""Errors that the content of an item causes, so that sending it again would not help."""


class RetryQueue(Generic[_T]):
    """Delivers items in order and in batches, one message at a time, and retries until they are delivered.

    Args:
        send: delivers items. It raises one of `INVALID_ITEM` because of an item's content, and anything else
            because the store cannot be reached.
        replace_invalid: returns the item to deliver in place of an invalid one; None drops it.
        is_ready: True if an item may be sent. Those behind it wait too. Call `check` when the answer may have
            changed.
        interval_s: shortest time between two messages that are not full.

    Attributes:
        queue: items that are not delivered.
    """

    def __init__(
        self,
        send: Callable[[list[_T]], Awaitable[None]],
        replace_invalid: Callable[[_T, Exception], _T | None],
        is_ready: Callable[[_T], bool],
        interval_s: float = 0.0,
    ) -> None:
        self.queue: deque[_T] = deque()
        self._send = send
        self._replace_invalid = replace_invalid
        self._is_ready = is_ready
        self._interval_s = interval_s
        self._ready = asyncio.Event()
        self._changed = BroadcastCondition()
        self._flush = BroadcastCondition()
        self._flushing = False
        self._due = math.inf
        """Time at which the queued items are to be sent."""
        self._send_alone = 0
        """Number of the oldest items that are sent one by one."""
        self._sender: asyncio.Task[None] | None = None

    def put(self, *items: _T, within: float = 0.0) -> None:
        """Append items.

        Args:
            within: longest wait of the items for others in their batch, in seconds.
        """
        self.queue.extend(items)
        if (due := time.monotonic() + within) < self._due:
            self._due = due
            self._changed.notify_all()
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_forever())
        self.check()

    def check(self) -> None:
        """Start a delivery if the oldest item is ready."""
        if not self.queue or not self._is_ready(self.queue[0]):
            self._ready.clear()
            return
        self._ready.set()
        if self._is_batch_complete():
            self._changed.notify_all()

    def flush(self) -> None:
        """Deliver without lingering and with short pauses from now on."""
        self._flushing = True
        self._flush.notify_all()
        self._changed.notify_all()

    async def stop(self) -> list[_T]:
        """Stop delivering; returns the items that are not delivered."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
        undelivered = list(self.queue)
        self.queue.clear()
        self._send_alone = 0
        return undelivered

    async def _send_forever(self) -> None:
        pause, earliest = FIRST_PAUSE_S, 0.0
        while True:
            await self._ready.wait()
            await self._wait_until_due(earliest)
            batch = self._next_batch()
            earliest = time.monotonic() + self._interval_s
            try:
                await self._send(batch)
            except INVALID_ITEM as error:
                self._due = 0.0
                self._isolate_invalid(batch, error)
            except Exception:  # `send` logs it; the items are kept until the store has them
                self._due = 0.0
                await self._pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            else:
                self._remove(len(batch))
            pause = FIRST_PAUSE_S

    async def _wait_until_due(self, earliest: float) -> None:
        """Wait until a message is to be sent, but not before `earliest` unless it is full."""
        while not self._is_batch_complete():
            due = self._due
            if (wait := max(due, earliest) - time.monotonic()) <= 0:
                return
            await self._changed.wait_for(functools.partial(self._is_due_before, due), wait)

    def _is_due_before(self, due: float) -> bool:
        return self._due < due or self._is_batch_complete()

    async def _pause(self, seconds: float) -> None:
        if self._flushing:
            await self._flush.wait_for(lambda: False, FIRST_PAUSE_S)
        else:
            await self._flush.wait_for(lambda: self._flushing, seconds)

    def _is_batch_complete(self) -> bool:
        return self._flushing or self._send_alone > 0 or len(self.queue) >= MAX_BATCH

    def _next_batch(self) -> list[_T]:
        """Return the oldest ready items; they stay in the queue until they are delivered."""
        limit = 1 if self._send_alone else MAX_BATCH
        batch = list(itertools.takewhile(self._is_ready, itertools.islice(self.queue, limit)))
        if len(batch) == len(self.queue):
            self._due = math.inf
        return batch

    def _isolate_invalid(self, batch: list[_T], error: Exception) -> None:
        """Send the items of a batch with an invalid one singly; replace the invalid one once it is alone."""
        if len(batch) > 1:
            self._send_alone = len(batch)
            return
        self._send_alone = max(self._send_alone, 1)
        logger.error(
            "the store rejects a call's announcement or record as invalid: %s", error, exc_info=error
        )
        replacement = self._replace_invalid(batch[0], error)
        if replacement is not None:
            self.queue[0] = replacement
        else:
            self._remove(1)

    def _remove(self, count: int) -> None:
        self._send_alone = max(self._send_alone - count, 0)
        for _ in range(count):
            self.queue.popleft()
        self.check()
