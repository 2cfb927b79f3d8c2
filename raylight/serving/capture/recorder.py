"""Recorder of calls: sends announcements and records to the store in order and in batches.

Laws: a call is announced before its answer leaves, or covered by a hold of its attempt, so that a lost record
is noticed and never looks like no call. No answer waits for the records of others: announcements for which
an answer waits leave immediately, and records travel with them, with the announcements of covered calls.
The store never receives a record before its announcement. Nothing that was handed over is dropped:
while the store cannot be reached it is kept, and sent again in order. Calls that are open or unsent are
bounded; beyond the bound new calls wait for a time, and are then rejected.

A hold is a call that is announced to the store like any other, samples nothing, and stays open: while it is
open, its attempt cannot succeed. So the calls that follow need not be announced before they are answered. If
this process dies, the store keeps the hold, and the attempt is retried, because calls may be missing. A hold
covers calls only after the store has it, and no longer once its release is on its way. Its release follows
all calls that it covered. One that covered a call which the store cannot have is never released.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from cachetools import LRUCache

from raylight._utils.aio import BroadcastCondition
from raylight.http.errors import RequestError
from raylight.serving.capture.retry_queue import INVALID_ITEM, RetryQueue
from raylight.store.tables.transitions import HOLD
from raylight.types import CallKey, Generation, Span

logger = logging.getLogger(__name__)

HOLD_S = 0.01
"""Time without a new call and an end of one after which an attempt is released. An attempt that ends waits
for it."""
QUICK_S = 0.02
"""Longest time between two calls of an attempt that follow each other quickly."""
QUICK_CALLS = 2
"""Number of such calls after which an attempt is held. The second one shows that the agent makes several:
further ones save the wait for an announcement, for one wait for the release at the end."""
REMEMBERED = 1_000
"""Attempts whose quick calls are counted."""
STORED_IMAGES = 100_000
"""Images that are known to be in the store."""


@dataclass(eq=False, slots=True)
class Hold:
    """A hold of one attempt."""

    key: CallKey
    used: float
    """Time of the last call that began or ended."""
    is_stored: bool = False
    is_broken: bool = False
    """True if the store cannot have a call that it covered."""


class Holds:
    """The attempts that are held, at most one hold each.

    Args:
        hold_s: see `HOLD_S`; 0 holds no attempt.
        clock: monotonic time in seconds.
    """

    def __init__(self, hold_s: float, clock: Callable[[], float]) -> None:
        self.hold_s = hold_s
        self._clock = clock
        self._holds: OrderedDict[str, Hold] = OrderedDict()
        """Holds by attempt; the one used last is at the end."""
        self._streaks: LRUCache[str, tuple[int, float]] = LRUCache(REMEMBERED)
        """Number of quick calls, and time of the last one, by attempt that is not held."""

    def request(self, key: CallKey) -> Hold | None:
        """Return a new hold of a call's attempt, to announce with the call; None if it has one, or calls too
        seldom."""
        count, last = self._streaks.get(key.attempt_id, (0, 0.0))
        count = count + 1 if self._clock() - last < QUICK_S else 1
        self._streaks[key.attempt_id] = count, self._clock()
        if not self.hold_s or count < QUICK_CALLS or key.attempt_id in self._holds:
            return None
        hold_key = CallKey(key.rollout_id, key.attempt_id, f"{HOLD}{secrets.token_hex(14)}")
        hold = self._holds[key.attempt_id] = Hold(hold_key, self._clock())
        return hold

    def use(self, attempt_id: str) -> Hold | None:
        """Return the hold that covers an attempt's calls, which stays for a while longer; None if none
        does."""
        hold = self._holds.get(attempt_id)
        if hold is None:
            if (streak := self._streaks.get(attempt_id)) is not None:
                self._streaks[attempt_id] = streak[0], self._clock()
            return None
        hold.used = self._clock()
        self._holds.move_to_end(attempt_id)
        return hold if hold.is_stored else None

    def drop(self, hold: Hold) -> None:
        """Cover no further calls. The hold of a call that was rejected or lost stays in the store."""
        hold.is_broken = True
        if self._holds.get(hold.key.attempt_id) is hold:
            del self._holds[hold.key.attempt_id]

    def release(self, everything: bool = False) -> list[Hold]:
        """Return the holds to release now, which cover no further calls.

        Args:
            everything: True releases those in use too.
        """
        until = self._clock() - self.hold_s
        released = []
        for attempt_id, hold in list(self._holds.items()):
            if not everything and hold.used > until:  # later ones were used after it
                break
            if hold.is_stored:
                del self._holds[attempt_id]
                self._streaks[attempt_id] = QUICK_CALLS, hold.used  # its next quick call gets a hold again
                released.append(hold)
        return released

    @property
    def next_release(self) -> float | None:
        """Time at which the next hold may be released; None if the store has no hold."""
        return next((hold.used + self.hold_s for hold in self._holds.values() if hold.is_stored), None)


OpenedCall: TypeAlias = tuple[CallKey, float]
"""A call and its start, in seconds since the epoch."""
ClosedCall: TypeAlias = tuple[CallKey, Generation | None, Span | None]
"""A call, its generation and its span; None where it sampled nothing, or has no span."""
CallSink: TypeAlias = Callable[[list[OpenedCall], list[ClosedCall]], Awaitable[Sequence[CallKey]]]
"""Stores announcements and records; returns the calls rejected because their attempt has finished.

One of the two lists is empty, unless the calls are covered by a hold. At most one message of announcements
for which answers wait is under way, and one other."""

LINGER_S = 0.003
"""Longest wait of a record for others, so that the client's next call finds the store free."""

LATE_S = 0.002
"""Delay of a timer that shows that the event loop was busy."""
COVERED_LINGER_S = 0.05
"""Longest wait of what a hold covers, which leaves with the release of the hold at the latest."""
INTERVAL_S = 0.01
"""Shortest time between two messages of records: a busy replica's records share messages, each of which costs
both ends as much as many calls."""


class AttemptFinishedError(RequestError):
    """A call of an attempt that has finished, or that the store does not know."""

    def __init__(self) -> None:
        super().__init__(
            "Incorrect API key provided: attempt already finished; its API key has been revoked",
            401,
        )


class OverloadedError(RequestError):
    """A call that is rejected for now."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 503)


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
    """The calls of one request, announced together, and perhaps a hold of their attempt."""

    calls: list[OpenedCall]
    known: asyncio.Future[None]
    begun: float
    hold: Hold | None
    confirmed: float | None = None
    timer: asyncio.TimerHandle | None = field(default=None)

    def resolve(self, error: RequestError | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self.known.done():
            self.known.set_exception(error) if error else self.known.set_result(None)
            self.known.exception()  # marks it as retrieved, which a cancelled request no longer does


@dataclass(eq=False, slots=True)
class _Item:
    """A covered call's announcement, a record, or the release of a hold, on its way to the store."""

    opened: OpenedCall | None = None
    closed: ClosedCall | None = None
    hold: Hold | None = None
    """The hold that covers an announced call, or that is released."""
    images: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the images that a record names and that were not stored, by digest."""


class Recorder:
    """Sends announcements and records to a sink. Belongs to one event loop.

    Args:
        sink: normally `StoreClient.capture`.
        write_images: stores the files of images, before the records that name them; normally
            `StoreClient.write_images`.
        capacity: most calls that are open or unsent.
        timeout_s: longest wait of a call for room and for its announcement.
    """

    def __init__(
        self,
        sink: CallSink,
        capacity: int = 10_000,
        timeout_s: float = 30.0,
        write_images: Callable[[Mapping[str, bytes]], Awaitable[None]] | None = None,
    ) -> None:
        self.stats = RecorderStats()
        self._sink = sink
        self._write_images = write_images
        self._stored_images: LRUCache[str, None] = LRUCache(STORED_IMAGES)
        self._unsent_images: dict[str, bytes] = {}
        """Files that unsent records share, because each request of a conversation has its own copies."""
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._used = 0
        """Calls that are open, and records that the store does not have."""
        self._room = BroadcastCondition()
        self._empty = BroadcastCondition()
        self._unannounced: set[str] = set()
        """Ids of calls whose announcement the store has not confirmed; their records wait."""
        self._awaited: dict[str, _Announcement] = {}
        """Announcements of the open calls that are not covered, by the id of the first call."""
        self._holds = Holds(HOLD_S, time.monotonic)
        self._releasing: asyncio.TimerHandle | None = None
        self._waits = False
        """True if the answer of the last such call waited for its announcement: holds are worth it."""
        self._covered: asyncio.Future[None] | None = None
        """A future that is done."""
        self._announcements: RetryQueue[_Announcement] = RetryQueue(
            self._send_announcements, self._lose_announcement, lambda _: True
        )
        self._records: RetryQueue[_Item] = RetryQueue(
            self._send_records, self._lose_record, self._is_announced, INTERVAL_S
        )
        self._unreachable = False
        self._closing = False

    async def open(
        self, keys: Sequence[CallKey], start: float, *, may_cover: bool = True
    ) -> asyncio.Future[None]:
        """Announce the calls of one request. The future is done once they may be answered.

        It fails with `AttemptFinishedError` if their attempt has finished, and with `OverloadedError` if the
        store does not answer in time. The calls must be closed in either case. Calls of a held attempt may be
        answered at once; its end is noticed with the next call after their announcement.

        Args:
            may_cover: False announces the calls before they are answered in any case.

        Raises:
            OverloadedError: there was no room for them in time, or this recorder is closed.
        """
        deadline = time.monotonic() + self._timeout_s
        if self._closing or not self._has_room(keys):
            await self._wait_for_room(keys)
        self._used += len(keys)
        self.stats.opened += len(keys)
        self.stats.unsent += len(keys)
        hold = self._holds.use(keys[0].attempt_id) if may_cover else None
        if hold is not None:
            items = [_Item(opened=(key, start), hold=hold) for key in keys]
            self._records.put(*items, within=COVERED_LINGER_S)
            return self._done()
        hold = self._holds.request(keys[0]) if may_cover and self._waits else None
        return self._announce([(key, start) for key in keys], deadline, hold)

    async def _wait_for_room(self, keys: Sequence[CallKey]) -> None:
        await self._room.wait_for(
            lambda: self._closing or self._has_room(keys),
            self._timeout_s if len(keys) <= self._capacity else 0,  # more would never fit
        )
        if self._closing or not self._has_room(keys):
            self.stats.overloaded += len(keys)
            raise OverloadedError("the recorder has no room for more calls; send the request again")

    def _announce(self, calls: list[OpenedCall], deadline: float, hold: Hold | None) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        announcement = _Announcement(calls, loop.create_future(), time.monotonic(), hold)
        announcement.timer = loop.call_later(deadline - announcement.begun, self._time_out, announcement)
        ids = [key.call_id for key, _ in calls]
        self._unannounced.update(ids)
        self._awaited[ids[0]] = announcement
        self._announcements.put(announcement)
        return announcement.known

    def _done(self) -> asyncio.Future[None]:
        if self._covered is None:
            self._covered = asyncio.get_running_loop().create_future()
            self._covered.set_result(None)
        return self._covered

    def close(self, records: Sequence[ClosedCall], images: Mapping[str, bytes] | None = None) -> None:
        """Hand over the records of calls that were opened; returns immediately.

        Args:
            images: files of the images that they name, by digest.
        """
        self.stats.closed += len(records)
        self.stats.aborted += sum(
            call is not None and call.finish_reason == "aborted" for _, call, _ in records
        )
        self.stats.unsent += len(records)
        linger = COVERED_LINGER_S
        for key, _, _ in records:
            if self._holds.use(key.attempt_id) is None:
                linger = LINGER_S
            announcement = self._awaited.pop(key.call_id, None)
            if announcement is not None and announcement.confirmed is not None:
                waited = announcement.confirmed - announcement.begun  # a hold saves this part of the call
                self._waits = time.monotonic() - announcement.begun < 2 * waited
        items = [_Item(closed=record) for record in records]
        if images and self._write_images and any(call or span for _, call, span in records):
            items[0].images = {
                name: self._unsent_images.setdefault(name, data)
                for name, data in images.items()
                if name not in self._stored_images
            }
        self._records.put(*items, within=linger)

    async def aclose(self, timeout: float = 10.0) -> int:
        """Reject new calls, wait up to `timeout` seconds for the open ones to close, and send everything.

        Returns the number of announcements and records lost.
        """
        self._closing = True
        self._release_holds()
        self._announcements.flush()
        self._records.flush()
        self._room.notify_all()
        if not await self._empty.wait_for(lambda: self.stats.unsent == 0 and self._used == 0, timeout):
            self._log_losses(timeout)
        if self._releasing is not None:
            self._releasing.cancel()
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
        if still_open := self.stats.opened - self.stats.closed:
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
        opened = [call for one in announcements for call in one.calls]
        opened += [(one.hold.key, one.calls[0][1]) for one in announcements if one.hold is not None]
        rejected = {key.call_id for key in await self._send(opened, [], {})}
        now = time.monotonic()
        for announcement in announcements:
            count = sum(key.call_id in rejected for key, _ in announcement.calls)
            self.stats.rejected += count
            announcement.confirmed = now
            if (hold := announcement.hold) is not None:
                if hold.key.call_id in rejected:
                    self._holds.drop(hold)
                hold.is_stored = True
            announcement.resolve(AttemptFinishedError() if count else None)
        self._release_records(announcements)
        if self._releasing is None:
            self._release_holds()

    def _release_holds(self) -> None:
        """Release the holds that are no longer used, and plan the next release.

        If this comes late, the event loop was busy, and calls of held attempts may wait for it: they get the
        time of another hold.
        """
        planned, self._releasing = self._releasing, None
        loop = asyncio.get_running_loop()
        if planned is not None and loop.time() > planned.when() + LATE_S and not self._closing:
            self._releasing = loop.call_later(HOLD_S, self._release_late)
            return
        self._release_unused()

    def _release_late(self) -> None:
        self._releasing = None
        self._release_unused()

    def _release_unused(self) -> None:
        if released := self._holds.release(everything=self._closing):
            self.stats.unsent += len(released)
            self._records.put(*[_Item(closed=(hold.key, None, None), hold=hold) for hold in released])
        if (next_release := self._holds.next_release) is not None:
            delay = max(next_release - time.monotonic(), 0.001)
            self._releasing = asyncio.get_running_loop().call_later(delay, self._release_holds)

    async def _send_records(self, items: list[_Item]) -> None:
        opened = [item.opened for item in items if item.opened is not None]
        closed = [item.closed for item in items if item.closed is not None and not _is_kept(item)]
        images = {name: data for item in items for name, data in item.images.items()}
        rejected = await self._send(opened, closed, images) if opened or closed else ()
        if rejected:
            ids = {key.call_id for key in rejected}
            self.stats.rejected += len(rejected)
            for item in items:
                if item.opened is not None and item.hold is not None and item.opened[0].call_id in ids:
                    self._holds.drop(item.hold)
        self._free_room(items)

    def _is_announced(self, item: _Item) -> bool:
        return item.closed is None or item.closed[0].call_id not in self._unannounced

    async def _send(
        self, opened: list[OpenedCall], closed: list[ClosedCall], images: Mapping[str, bytes]
    ) -> Sequence[CallKey]:
        try:
            for name, data in images.items():  # one by one, because together they may be gigabytes
                if name not in self._stored_images and self._write_images is not None:
                    await self._write_images({name: data})
                    self._stored_images[name] = None
                    self._unsent_images.pop(name, None)
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
        announcement.resolve(RequestError(f"the call cannot be recorded: {error}", 500))
        self.stats.lost += len(announcement.calls)
        if announcement.hold is not None:
            self._holds.drop(announcement.hold)
        self._release_records([announcement])

    def _lose_record(self, item: _Item, error: Exception) -> _Item | None:
        """Return the record without its span, which may be the invalid part. Anything else is lost."""
        if item.closed is not None and item.closed[2] is not None:
            return _Item(closed=(*item.closed[:2], None), images=item.images)
        if item.hold is not None:
            self._holds.drop(item.hold)
        for name in item.images:  # other records that have the file keep it
            self._unsent_images.pop(name, None)
        self.stats.lost += 1
        self._free_room([item])
        return None

    def _release_records(self, announcements: list[_Announcement]) -> None:
        """Let the records of confirmed announcements be sent."""
        ids = [key.call_id for announcement in announcements for key, _ in announcement.calls]
        self._unannounced.difference_update(ids)
        self.stats.unsent -= len(ids)
        self._records.check()

    def _free_room(self, items: list[_Item]) -> None:
        self.stats.unsent -= len(items)
        self._used -= sum(item.closed is not None and item.hold is None for item in items)
        self._room.notify_all()
        self._empty.notify_all()


def _is_kept(item: _Item) -> bool:
    """Return True for the release of a hold that the store must keep."""
    return item.closed is not None and item.hold is not None and item.hold.is_broken
