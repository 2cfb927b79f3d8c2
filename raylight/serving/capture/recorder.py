"""Recorder of calls: sends announcements and records to the store in order and in batches.

Laws: a call is announced before its answer leaves, so that a lost record is noticed and never looks like no
call. No answer waits for the records of others: announcements leave immediately, and records travel beside
them. The store never receives a record before its announcement. Nothing that was handed over is dropped:
while the store cannot be reached it is kept, and sent again in order. Calls that are open or unsent are
bounded; beyond the bound new calls wait for a time, and are then rejected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from raylight.aio import BroadcastCondition
from raylight.http.errors import RequestError
from raylight.serving.capture.retry_queue import INVALID_ITEM, RetryQueue
from raylight.types import CallKey, Generation, Span

logger = logging.getLogger(__name__)

OpenedCall: TypeAlias = tuple[CallKey, float]
"""A call and its start, in seconds since the epoch."""
ClosedCall: TypeAlias = tuple[CallKey, Generation | None, Span | None]
"""A call, its generation and its span; None where it sampled nothing, or has no span."""
CallSink: TypeAlias = Callable[[list[OpenedCall], list[ClosedCall]], Awaitable[Sequence[CallKey]]]
"""Stores announcements and records; returns the calls rejected because their attempt has finished.

One of the two lists is empty. At most one message of each kind is under way."""

LINGER_S = 0.003
"""Longest wait of a record for others, so that the client's next call finds the store free."""


class AttemptFinishedError(RequestError):
    """A call of an attempt that has finished, or that the store does not know."""

    def __init__(self) -> None:
        super().__init__(
            "Incorrect API key provided: attempt already finished; its API key has been revoked",
            401,
            "authentication_error",
        )


class OverloadedError(RequestError):
    """A call that is rejected for now."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 503, "overloaded_error")


@dataclass
class RecorderStats:
    """Counts of calls since the start; `unsent` is a gauge."""

    opened: int = 0
    closed: int = 0
    rejected: int = 0
    """Calls rejected by the store because their attempt had finished."""
    overloaded: int = 0
    """Calls rejected because the recorder was full, or the store did not answer in time."""
    aborted: int = 0
    """Calls closed with an incomplete answer."""
    unsent: int = 0
    """Announcements and records that the store does not have yet."""
    lost: int = 0
    """Announcements and records that never reached the store: at shutdown, or because they are invalid."""


@dataclass(eq=False, slots=True)
class _Announcement:
    """The calls of one request, announced together."""

    calls: list[OpenedCall]
    known: asyncio.Future[None]
    timer: asyncio.TimerHandle | None = field(default=None)

    def resolve(self, error: RequestError | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self.known.done():
            self.known.set_exception(error) if error else self.known.set_result(None)
            self.known.exception()  # marks it as retrieved, which a cancelled request no longer does


class Recorder:
    """Sends announcements and records to a sink. Belongs to one event loop.

    Args:
        sink: normally `StoreClient.capture`.
        capacity: most calls that are open or unsent.
        timeout_s: longest wait of a call for room and for its announcement.
    """

    def __init__(self, sink: CallSink, capacity: int = 10_000, timeout_s: float = 30.0) -> None:
        self.stats = RecorderStats()
        self._sink = sink
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._used = 0
        """Calls that are open, and records that the store does not have."""
        self._room = BroadcastCondition()
        self._empty = BroadcastCondition()
        self._unannounced: set[CallKey] = set()
        """Calls whose announcement the store has not confirmed; their records wait."""
        self._announcements: RetryQueue[_Announcement] = RetryQueue(
            self._send_announcements, self._lose_announcement, lambda _: True, 0
        )
        self._records: RetryQueue[ClosedCall] = RetryQueue(
            self._send_records, self._lose_record, lambda record: record[0] not in self._unannounced, LINGER_S
        )
        self._unreachable = False
        self._closing = False

    async def open(self, keys: Sequence[CallKey], start: float) -> asyncio.Future[None]:
        """Announce the calls of one request. The future is done once the store has all of them.

        It fails with `AttemptFinishedError` if their attempt has finished, and with `OverloadedError` if the
        store does not answer in time. The calls must be closed in either case.

        Raises:
            OverloadedError: there was no room for them in time, or this recorder is closed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        await self._room.wait_for(
            lambda: self._closing or self._has_room(keys),
            self._timeout_s if len(keys) <= self._capacity else 0,
        )
        if self._closing or not self._has_room(keys):
            self.stats.overloaded += len(keys)
            raise OverloadedError("the recorder has no room for more calls; send the request again")
        self._used += len(keys)
        self.stats.opened += len(keys)
        announcement = _Announcement([(key, start) for key in keys], loop.create_future())
        announcement.timer = loop.call_at(deadline, self._time_out, announcement)
        self._unannounced.update(keys)
        self.stats.unsent += len(keys)
        self._announcements.put(announcement)
        return announcement.known

    def close(self, records: Sequence[ClosedCall]) -> None:
        """Hand over the records of calls that were opened; returns immediately."""
        self.stats.closed += len(records)
        self.stats.aborted += sum(
            call is not None and call.finish_reason == "aborted" for _, call, _ in records
        )
        self.stats.unsent += len(records)
        self._records.put(*records)

    async def aclose(self, timeout: float = 10.0) -> int:
        """Reject new calls, wait up to `timeout` seconds for the open ones to close, and send everything.

        Returns the number of announcements and records lost.
        """
        self._closing = True
        self._announcements.flush()
        self._records.flush()
        self._room.notify_all()
        if not await self._empty.wait_for(lambda: self.stats.unsent == 0 and self._used == 0, timeout):
            self._log_losses(timeout)
        await self._records.stop()
        for announcement in await self._announcements.stop():
            announcement.resolve(OverloadedError("this replica is shutting down; send the request again"))
        self._unannounced.clear()
        self.stats.unsent = 0
        return self.stats.lost

    def _log_losses(self, timeout: float) -> None:
        lost = self.stats.unsent
        self.stats.lost += lost
        if lost:
            logger.error(
                "%d announcements and records of calls are lost: the store was unreachable for %g s",
                lost,
                timeout,
            )
        if still_open := self._used - len(self._records.queue):
            logger.error(
                "%d calls were still open %g s after shutdown began; their samples are lost",
                still_open,
                timeout,
            )

    def _has_room(self, keys: Sequence[CallKey]) -> bool:
        return self._used + len(keys) <= self._capacity

    def _time_out(self, announcement: _Announcement) -> None:
        self.stats.overloaded += len(announcement.calls)
        announcement.resolve(
            OverloadedError(f"the store did not answer within {self._timeout_s:g} s; send the request again")
        )

    async def _send_announcements(self, announcements: list[_Announcement]) -> None:
        rejected = set(await self._send([call for one in announcements for call in one.calls], []))
        for announcement in announcements:
            count = sum(key in rejected for key, _ in announcement.calls)
            self.stats.rejected += count
            announcement.resolve(AttemptFinishedError() if count else None)
        self._release_records(announcements)

    async def _send_records(self, records: list[ClosedCall]) -> None:
        await self._send([], records)
        self._free_room(len(records))

    async def _send(self, opened: list[OpenedCall], closed: list[ClosedCall]) -> Sequence[CallKey]:
        try:
            rejected = await self._sink(opened, closed)
        except INVALID_ITEM:
            raise
        except Exception as error:
            if not self._unreachable:
                logger.warning(
                    "the store cannot be reached; %d announcements and records wait: %s",
                    self.stats.unsent,
                    error,
                    exc_info=error,
                )
            self._unreachable = True
            raise
        if self._unreachable:
            logger.warning("the store can be reached again")
        self._unreachable = False
        return rejected

    def _lose_announcement(self, announcement: _Announcement, error: Exception) -> None:
        announcement.resolve(RequestError(f"the call cannot be recorded: {error}", 500, "server_error"))
        self.stats.lost += len(announcement.calls)
        self._release_records([announcement])

    def _lose_record(self, record: ClosedCall, error: Exception) -> ClosedCall | None:
        """Return the record without its span, which may be the invalid part. A record without one is lost."""
        key, generation, span = record
        if span is not None:
            return key, generation, None
        self.stats.lost += 1
        self._free_room(1)
        return None

    def _release_records(self, announcements: list[_Announcement]) -> None:
        """Let the records of confirmed announcements be sent."""
        keys = [key for announcement in announcements for key, _ in announcement.calls]
        self._unannounced.difference_update(keys)
        self.stats.unsent -= len(keys)
        self._records.check()

    def _free_room(self, count: int) -> None:
        self.stats.unsent -= count
        self._used -= count
        self._room.notify_all()
        self._empty.notify_all()
