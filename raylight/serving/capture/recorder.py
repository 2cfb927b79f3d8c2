"""The way of records to the store: what began and what ended, each in its own lane, in order, in batches, beside the requests.

Laws: a call is announced before its answer leaves, so that a lost record is noticed and never mistaken for silence; no answer waits
for the records of others: announcements leave at once, and what ended travels beside them; the store never hears of an end before
its beginning; nothing that was handed over is dropped: while the store cannot be reached it is kept, and sent again in its order
until the store has it; what is open or unsent at once is bounded, and where there is no room new calls wait, for a time, and are
then turned away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from raylight.aio import BroadcastCondition
from raylight.http.errors import RequestError
from raylight.serving.capture.retry_queue import UNFIT, RetryQueue
from raylight.types import CallKey, Generation, Span

logger = logging.getLogger(__name__)

Opened: TypeAlias = tuple[CallKey, float]
"""A call and the time at which it began, in seconds since the epoch."""
Closed: TypeAlias = tuple[CallKey, Generation | None, Span | None]
"""A call, what it sampled, and its span; None where nothing was sampled, or there is nothing to tell."""
Sink: TypeAlias = Callable[[list[Opened], list[Closed]], Awaitable[Sequence[CallKey]]]
"""Stores what began and what ended, and returns the calls that could not begin because their attempt is over. One of both is
empty; two messages may be under way at once, one of each kind."""

LINGER_S = 0.003
"""How long closings wait for others. A client's next call follows at once: its announcement would find the store busy with them."""


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


class Recorder:
    """Sends what began and what ended to a sink: one message of each kind at a time. Belongs to one event loop.

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
        """Calls that are open, and closings that the store does not have."""
        self._room = BroadcastCondition()
        self._empty = BroadcastCondition()
        self._unknown: set[CallKey] = set()
        """Calls of which the store may not have heard; what they sampled waits."""
        self._openings: RetryQueue[_Opening] = RetryQueue(
            self._send_openings, self._lose_opening, lambda _: True, 0
        )
        self._closings: RetryQueue[Closed] = RetryQueue(
            self._send_closings, self._lose_closing, lambda record: record[0] not in self._unknown, LINGER_S
        )
        self._away = False
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
        await self._room.wait_for(
            lambda: self._closing or self._fits(keys), self._patience_s if len(keys) <= self._capacity else 0
        )
        if self._closing or not self._fits(keys):
            self.stats.overloaded += len(keys)
            raise Overloaded("no more calls can be recorded now; try again")
        self._used += len(keys)
        self.stats.opened += len(keys)
        opening = _Opening([(key, start) for key in keys], loop.create_future())
        opening.timer = loop.call_at(end, self._out_of_patience, opening)
        self._unknown.update(keys)
        self.stats.unsent += len(keys)
        self._openings.put(opening)
        return opening.known

    def close(self, records: Sequence[Closed]) -> None:
        """Hand over the records of calls that were opened; returns at once."""
        self.stats.closed += len(records)
        self.stats.aborted += sum(
            call is not None and call.finish_reason == "aborted" for _, call, _ in records
        )
        self.stats.unsent += len(records)
        self._closings.put(*records)

    async def aclose(self, timeout: float = 10.0) -> int:
        """Take no more calls, wait for the ends of the open ones, and send what there is.

        Returns how many announcements and closings were lost.
        """
        self._closing = True
        self._openings.hurry()
        self._closings.hurry()
        self._room.notify_all()
        if not await self._empty.wait_for(lambda: self.stats.unsent == 0 and self._used == 0, timeout):
            lost = self.stats.unsent
            self.stats.lost += lost
            if lost:
                logger.error(
                    "%d announcements and records of calls never reached the store: it was gone for %g s",
                    lost,
                    timeout,
                )
            if still_open := self._used - len(self._closings.queue):
                logger.error(
                    "%d calls were still open %g s after the last was let in; what they sample is lost",
                    still_open,
                    timeout,
                )
        await self._closings.stop()
        for opening in await self._openings.stop():
            opening.settle(Overloaded("this replica is closing; try again"))
        self._unknown.clear()
        self.stats.unsent = 0
        return self.stats.lost

    def _fits(self, keys: Sequence[CallKey]) -> bool:
        return self._used + len(keys) <= self._capacity

    def _out_of_patience(self, opening: _Opening) -> None:
        self.stats.overloaded += len(opening.calls)
        opening.settle(Overloaded(f"the store was not reached within {self._patience_s:g} s; try again"))

    async def _send_openings(self, openings: list[_Opening]) -> None:
        over = set(await self._tell([call for opening in openings for call in opening.calls], []))
        for opening in openings:
            refused = sum(key in over for key, _ in opening.calls)
            self.stats.refused += refused
            opening.settle(AttemptOver() if refused else None)
        self._let_close(openings)

    async def _send_closings(self, closed: list[Closed]) -> None:
        await self._tell([], closed)
        self._make_room(len(closed))

    async def _tell(self, opened: list[Opened], closed: list[Closed]) -> Sequence[CallKey]:
        try:
            refused = await self._sink(opened, closed)
        except UNFIT:
            raise
        except Exception as error:
            if not self._away:
                logger.warning(
                    "the store cannot be reached; %d records wait: %s",
                    self.stats.unsent,
                    error,
                    exc_info=error,
                )
            self._away = True
            raise
        if self._away:
            logger.warning("the store is there again")
        self._away = False
        return refused

    def _lose_opening(self, opening: _Opening, error: Exception) -> None:
        opening.settle(RequestError(f"the call cannot be recorded: {error}", 500, "server_error"))
        self.stats.lost += len(opening.calls)
        self._let_close([opening])

    def _lose_closing(self, record: Closed, error: Exception) -> Closed | None:
        key, generation, span = record
        if span is not None:  # its tokens may do without it
            return key, generation, None
        self.stats.lost += 1
        self._make_room(1)
        return None

    def _let_close(self, openings: list[_Opening]) -> None:
        """The store has answered these; what their calls sampled may follow."""
        keys = [key for opening in openings for key, _ in opening.calls]
        self._unknown.difference_update(keys)
        self.stats.unsent -= len(keys)
        self._closings.look()

    def _make_room(self, count: int) -> None:
        self.stats.unsent -= count
        self._used -= count
        self._room.notify_all()
        self._empty.notify_all()
