"""The way of records to the store: what began and what ended, in order, in batches, beside the requests.

Laws: a call is announced before its answer leaves, so that a lost record is noticed and never mistaken for silence; nothing that
was handed over is dropped: while the store cannot be reached it is kept, and sent again in its order until the store has it; what
is open or unsent at once is bounded, and where there is no room new calls wait, for a time, and are then turned away.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from raylight.aio import Signal
from raylight.serving.engine import RequestError
from raylight.types import CallKey, Generation, Span

logger = logging.getLogger(__name__)

Opened: TypeAlias = tuple[CallKey, float]
"""A call and the time at which it began, in seconds since the epoch."""
Closed: TypeAlias = tuple[CallKey, Generation | None, Span | None]
"""A call, what it sampled, and its span; None where nothing was sampled, or there is nothing to tell."""
Sink: TypeAlias = Callable[[list[Opened], list[Closed]], Awaitable[Sequence[CallKey]]]
"""Stores what began and what ended, and returns the calls that could not begin because their attempt is over."""

MAX_BATCH = 1000
"""Announcements and closings in one message."""
LINGER_S = 0.003
"""How long closings wait for an announcement to travel with. A client's next call follows at once, and would wait behind them."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
"""Between two tries to reach the store; each is twice as long as the one before."""
UNFIT = (ValueError, TypeError, OverflowError)
"""Errors that a record causes by what it holds: sending it again would not help."""


class AttemptOver(RequestError):
    """A call of an attempt that is decided, or that the store does not know."""

    def __init__(self) -> None:
        super().__init__("this attempt is over; its key opens nothing any more", 401, "authentication_error")


class Overloaded(RequestError):
    """A call that is turned away; it may come again.

    Attributes:
        retry_after: seconds.
    """

    retry_after = 1

    def __init__(self, why: str) -> None:
        super().__init__(why, 503, "overloaded_error")


@dataclass
class RecorderStats:
    """Counts of calls since the start; `unsent` is a gauge."""

    opened: int = 0
    closed: int = 0
    refused: int = 0
    """Turned away by the store: their attempt is over."""
    overloaded: int = 0
    """Turned away because there was no room, or the store did not answer in time."""
    aborted: int = 0
    """Closed with a response that was cut off."""
    unsent: int = 0
    """Announcements and closings that the store does not have yet."""
    lost: int = 0
    """Announcements and closings that never reached the store: at the end, or because it could not hold them."""


@dataclass(eq=False, slots=True)
class _Opening:
    """Calls of one request, on their way to the store together."""

    calls: list[Opened]
    known: asyncio.Future[None]
    timer: asyncio.TimerHandle | None = field(default=None)

    def settle(self, error: RequestError | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self.known.done():
            self.known.set_exception(error) if error else self.known.set_result(None)
            self.known.exception()  # whoever called may be gone, and then nobody else looks


_Item: TypeAlias = _Opening | Closed


class Recorder:
    """Sends what began and what ended to a sink, one message at a time. Belongs to one event loop.

    Args:
        sink: normally `StoreClient.capture`.
        capacity: calls that may be open or unsent at once.
        patience_s: how long a call waits for room and for the store to know of it.
    """

    def __init__(self, sink: Sink, capacity: int = 10_000, patience_s: float = 30.0) -> None:
        self._sink = sink
        self._capacity = capacity
        self._patience_s = patience_s
        self._used = 0
        self._room = Signal()
        self._queue: deque[_Item] = deque()
        self._awake = asyncio.Event()
        self._announcements = 0
        """In the queue."""
        self._pressing = Signal()
        self._empty = Signal()
        self._hurry = Signal()
        self._one_by_one = 0
        self._sender: asyncio.Task[None] | None = None
        self._closing = False
        self.stats = RecorderStats()

    async def open(self, keys: Sequence[CallKey], start: float) -> asyncio.Future[None]:
        """Announce the calls of one request. The future is done when the store knows all of them.

        It fails with `AttemptOver` if their attempt is, and with `Overloaded` if the store did not answer in time; the calls are to
        be closed all the same.

        Raises:
            Overloaded: there was no room for them in time, or this recorder is closed.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._patience_s
        await self._room.until(lambda: self._closing or self._fits(keys), self._patience_s if len(keys) <= self._capacity else 0)
        if self._closing or not self._fits(keys):
            self.stats.overloaded += len(keys)
            raise Overloaded("no more calls can be recorded now; try again")
        self._used += len(keys)
        self.stats.opened += len(keys)
        opening = _Opening([(key, start) for key in keys], loop.create_future())
        opening.timer = loop.call_at(end, self._out_of_patience, opening)
        self._put(opening)
        return opening.known

    def close(self, records: Sequence[Closed]) -> None:
        """Hand over the records of calls that were opened; returns at once."""
        self.stats.closed += len(records)
        self.stats.aborted += sum(call is not None and call.finish_reason == "aborted" for _, call, _ in records)
        self._put(*records)

    async def aclose(self, timeout: float = 10.0) -> int:
        """Take no more calls, wait for the ends of the open ones, and send what there is.

        Returns how many announcements and closings were lost.
        """
        self._closing = True
        self._hurry.fire()
        self._pressing.fire()
        self._room.fire()
        if not await self._empty.until(lambda: not self._queue and self._used == 0, timeout):
            lost = self.stats.unsent
            self.stats.lost += lost
            if lost:
                logger.error("%d announcements and records of calls never reached the store: it was gone for %g s", lost, timeout)
            if still_open := self._used - sum(not isinstance(item, _Opening) for item in self._queue):
                logger.error(
                    "%d calls were still open %g s after the last was let in; what they sample is lost", still_open, timeout
                )
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
        for item in self._queue:
            if isinstance(item, _Opening):
                item.settle(Overloaded("this replica is closing; try again"))
        self._queue.clear()
        self.stats.unsent = 0
        return self.stats.lost

    def _fits(self, keys: Sequence[CallKey]) -> bool:
        return self._used + len(keys) <= self._capacity

    def _out_of_patience(self, opening: _Opening) -> None:
        self.stats.overloaded += len(opening.calls)
        opening.settle(Overloaded(f"the store was not reached within {self._patience_s:g} s; try again"))

    def _put(self, *items: _Item) -> None:
        self._queue.extend(items)
        self.stats.unsent += sum(map(_size, items))
        self._announcements += sum(isinstance(item, _Opening) for item in items)
        self._awake.set()
        if self._is_pressing():
            self._pressing.fire()
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_forever())

    async def _send_forever(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            await self._awake.wait()
            if not self._is_pressing():
                await self._pressing.until(self._is_pressing, LINGER_S)
            batch = self._next()
            try:
                await self._send(batch)
            except UNFIT as error:
                self._set_apart(batch, error)
            except Exception as error:  # whatever it is: what was handed over is kept until the store has it
                if pause == FIRST_PAUSE_S:
                    logger.warning("the store cannot be reached; %d records wait: %s", self.stats.unsent, error, exc_info=error)
                await self._rest(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            if pause > FIRST_PAUSE_S:
                logger.warning("the store is there again")
                pause = FIRST_PAUSE_S
            if not self._queue:
                self._awake.clear()
                self._empty.fire()

    def _is_pressing(self) -> bool:
        """Whether what is in the queue should leave at once."""
        return self._announcements > 0 or len(self._queue) >= MAX_BATCH or self._closing

    def _next(self) -> list[_Item]:
        """The oldest items; they stay in the queue until they are sent."""
        limit = 1 if self._one_by_one else MAX_BATCH
        return list(itertools.islice(self._queue, limit))

    async def _send(self, batch: list[_Item]) -> None:
        openings = [item for item in batch if isinstance(item, _Opening)]
        closed = [item for item in batch if not isinstance(item, _Opening)]
        over = set(await self._sink([call for opening in openings for call in opening.calls], closed))
        for opening in openings:
            refused = sum(key in over for key, _ in opening.calls)
            self.stats.refused += refused
            opening.settle(AttemptOver() if refused else None)
        self._done(batch)

    def _set_apart(self, batch: list[_Item], error: Exception) -> None:
        """One of these cannot be stored: send each alone, and give up the one that it is."""
        if len(batch) > 1:
            self._one_by_one = len(batch)
            return
        self._one_by_one = max(self._one_by_one, 1)
        (item,) = batch
        logger.error("the store cannot hold the record of a call: %s", error, exc_info=error)
        if isinstance(item, _Opening):
            item.settle(RequestError(f"the call cannot be recorded: {error}", 500, "server_error"))
        elif item[2] is not None:  # its tokens may do without its span
            self._queue[0] = (item[0], item[1], None)
            return
        self.stats.lost += _size(item)
        self._done(batch)

    def _done(self, batch: list[_Item]) -> None:
        self._one_by_one = max(self._one_by_one - len(batch), 0)
        for item in batch:
            self._queue.popleft()
            self._announcements -= isinstance(item, _Opening)
            self.stats.unsent -= _size(item)
            self._used -= not isinstance(item, _Opening)
        self._room.fire()

    async def _rest(self, seconds: float) -> None:
        """A pause before the next try; short when this recorder is to be closed."""
        if self._closing:
            await self._hurry.until(lambda: False, FIRST_PAUSE_S)
        else:
            await self._hurry.until(lambda: self._closing, seconds)


def _size(item: _Item) -> int:
    return len(item.calls) if isinstance(item, _Opening) else 1
