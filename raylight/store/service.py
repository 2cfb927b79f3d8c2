"""The store as an asynchronous service: every wait is on an event or a deadline.

It runs in any asyncio loop, even without Ray.

Laws:
- Calls that arrive together are committed together and answered after the commit (group commit). A call that
  fails undoes its own changes only.
- Deadlines are enforced by a timer of the store, not by the next call.
- A timer that failed is started again, and one caller receives its error.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from raylight._utils.aio import BroadcastCondition, cancel_all
from raylight._utils.disk import disk_errors
from raylight.config import StoreConfig
from raylight.errors import DiskError, QueryError, RaylightError, StoreError
from raylight.images.folder import ImageFolder
from raylight.store.queries import Queries
from raylight.store.rows import Row
from raylight.store.tables.answered_messages import AnsweredMessages, CallResult
from raylight.store.tables.attempts import Attempts
from raylight.store.tables.budgets import Budgets
from raylight.store.tables.journal import Journal, JournalError
from raylight.store.tables.leases import Leases
from raylight.store.tables.outages import Outages
from raylight.store.tables.records import Records
from raylight.store.tables.resources import Resources, Steps
from raylight.store.tables.rollouts import CommitEvents, Rollouts
from raylight.store.tables.run_clock import RunClock
from raylight.store.tables.sessions import Sessions
from raylight.store.tables.workers import Workers
from raylight.types import JsonObject

logger = logging.getLogger(__name__)
Args = TypeVarTuple("Args")
Result = TypeVar("Result")


def image_folder(path: Path) -> ImageFolder:
    """Return the folder of the images of a store, next to its file: `store-images` for `store.db`."""
    return ImageFolder(path.with_name(f"{path.stem}-images"))


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


FULL_QUEUE_WARNING_S = 60.0
"""Interval of the log messages about a full queue."""
SETTLE_S = 0.02
"""Longest wait of a message for the records of the attempts that it decides. They are usually on their way,
and the client would have to wait for them and to send the decisions again."""

REPEATABLE = frozenset({"capture", "finish_attempt", "add_spans", "update_worker"})
"""Frequent methods that keep nothing in memory, so that they can be undone and executed again."""

DURABLE = frozenset({"record_step"})
"""Methods that return once all commits are on the disk: a training state must not outlive what it was trained
on when the power fails."""

Call = tuple[str, tuple[Any, ...]]
"""Name of a method, and its arguments."""
REMEMBERED_REPLIES = 64
"""Replies that are kept for a repetition of their request."""

Request = tuple[str, JsonObject]
"""Name of a run, and the content of a request to its driver."""


class Mailbox:
    """Requests and replies, by key; `StoreClient` documents the methods."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._replies: collections.OrderedDict[str, JsonObject] = collections.OrderedDict()
        self._mail_changed = BroadcastCondition()
        self._mail_closed = False

    async def ask_driver(self, run: str, key: str, request: JsonObject, timeout: float) -> JsonObject | None:
        """Wait for the reply to a request; None after `timeout` seconds, with which the request ends."""
        if key not in self._replies:
            self._requests[key] = run, request
            self._mail_changed.notify_all()
        try:
            await self._mail_changed.wait_for(lambda: self._mail_closed or key in self._replies, timeout)
        finally:
            self._requests.pop(key, None)
        return self._replies.get(key)

    async def next_driver_request(
        self, run: str, known: list[str], timeout: float
    ) -> tuple[str, JsonObject] | None:
        """Wait for a request to the driver of a run that is not among the known ones."""

        def unknown() -> list[str]:
            return [key for key, (asked, _) in self._requests.items() if asked == run and key not in known]

        await self._mail_changed.wait_for(lambda: self._mail_closed or bool(unknown()), timeout)
        return next(((key, self._requests[key][1]) for key in unknown()), None)

    def close_mail(self) -> None:
        """End all waits, without a result."""
        self._mail_closed = True
        self._mail_changed.notify_all()

    async def reply_to_request(self, key: str, reply: JsonObject) -> None:
        """Reply to a request. A request that is repeated later gets the reply at once."""
        self._requests.pop(key, None)
        self._replies[key] = reply
        while len(self._replies) > REMEMBERED_REPLIES:
            self._replies.popitem(last=False)
        self._mail_changed.notify_all()


class StoreService(Mailbox):
    """Asynchronous interface of the journal and its tables; `StoreClient` documents each method.

    Args:
        path: the journal's file; None keeps it in a temporary folder, which is removed on close.
        clock: seconds since the epoch.
        monotonic: seconds since any moment, as of `time.monotonic`.
        read_only: allow queries only; for reading a run's store, even while the run is in progress.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        config: StoreConfig | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        read_only: bool = False,
    ) -> None:
        super().__init__()
        config = config or StoreConfig()
        self._read_only = read_only
        self._journal = Journal(path, read_only)
        self._clock = run_clock = RunClock(self._journal, clock, monotonic)
        self._max_queued = config.max_queued
        self._rollouts = Rollouts(self._journal, run_clock)
        self._workers = Workers(self._journal, clock)
        self._attempts = Attempts(self._journal, self._rollouts, self._workers, run_clock, config.lease_s)
        tables = (self._journal, self._rollouts, self._attempts)
        self._outages = Outages(*tables, run_clock)
        self._leases = Leases(*tables, self._workers, self._outages, run_clock)
        self._records = Records(*tables, clock)
        self._budgets = Budgets(*tables, run_clock)
        self._resources = Resources(self._journal, clock)
        self._steps = Steps(self._journal)
        self._sessions = Sessions(*tables, run_clock)
        self._queries = Queries(self._journal.reader, monotonic)
        self._answered = AnsweredMessages(self._journal)
        self._images = image_folder(self._journal.path)
        self._methods = self._callable_methods()
        self._queue_changed = BroadcastCondition()
        self._queue_has_room = BroadcastCondition()
        self._calls_closed = BroadcastCondition()
        self._n_polls = 0
        self._waiters = FinishWaiters()
        self._reader_thread = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        self._file_threads = ThreadPoolExecutor(4, thread_name_prefix="store-files")
        self._timer = DeadlineTimer(self._leases.next_deadline, self.expire, self._wake_all, run_clock.lived)
        self._is_closed = False
        if not read_only:
            with self._journal.transaction():
                self._leases.renew_all()

    def _callable_methods(self) -> dict[str, Callable[..., object]]:
        """Methods that `call` executes, by name."""
        return {
            "start_rollout": self._attempts.start_rollout,
            "start_attempt": self._attempts.start_attempt,
            "update_rollout": self._update_rollout,
            "update_attempt": self._attempts.update,
            "finish_attempt": self._finish_attempt,
            "retire_worker": self._leases.retire_worker,
            "release_worker": self._leases.release_worker,
            "cancel": self._rollouts.cancel,
            "add_spans": self._records.add_spans,
            "grade": self._records.grade,
            "next_sequence_ids": self._records.next_sequence_ids,
            "capture": self._records.capture,
            "lose_recorder": self._records.lose_recorder,
            "check_budgets": self._budgets.check,
            "truncation": self._budgets.truncation,
            "add_resources": self._resources.add_resources,
            "update_resources": self._resources.update_resources,
            "record_step": self._steps.record,
            "begin_session": self._sessions.begin,
            "session_state": self._sessions.state,
            "renew_session": self._sessions.renew,
            "update_worker": self._leases.record_heartbeat,
            "report_outage": self._outages.report,
            "stop_time": self._leases.stop_time,
            "continue_time": self._leases.continue_time,
        }

    # calls that never wait

    async def call(self, calls: list[Call], client_id: str = "", number: int = 0) -> list[CallResult]:
        """Execute calls in one transaction; each fails on its own.

        A repeated message gets the results of the first one.

        Args:
            client_id: id of the sending CallBatcher; "" for a message that is never repeated.
            number: number of the message, which grows with each message of the client.

        Raises:
            StoreError: the journal cannot be written; nothing was changed.
        """
        await self._settle([args[1] for method, args in calls if method == "finish_attempt" and not args[4]])
        with self._committed():
            results = self._answered.find(client_id, number) if client_id else None
            if results is None:
                results = self._execute_all(calls)
                if client_id:
                    self._answered.add(client_id, number, results)
        if any(method in DURABLE for method, _ in calls):
            await self._in_thread(self._journal.sync)
        return results

    async def _settle(self, attempt_ids: list[str]) -> None:
        """Wait a short time until the calls of attempts are recorded."""
        awaited = self._records.count_awaited_calls
        if attempt_ids:
            await self._wait_for(self._calls_closed, lambda: not any(map(awaited, attempt_ids)), SETTLE_S)

    async def lease_s(self) -> float:
        self._ensure_timer()
        return self._attempts.lease_s

    def _execute_all(self, calls: list[Call]) -> list[CallResult]:
        """Execute the calls of a message; each fails on its own.

        The frequent ones have no savepoints, which would take a sixth of their time. If one fails, all are
        undone and executed again with savepoints.
        """
        if all(method in REPEATABLE for method, _ in calls):
            try:
                return [(True, self._methods[method](*args)) for method, args in calls]
            except (DiskError, JournalError, sqlite3.Error):
                raise
            except Exception:  # raised again below, by the call that it belongs to
                self._journal.restart()
                self._rollouts.events = CommitEvents()
        return [self._execute(method, args) for method, args in calls]

    def _execute(self, method: str, args: tuple[object, ...]) -> CallResult:
        try:
            with self._journal.savepoint():
                return True, self._methods[method](*args)
        except (DiskError, JournalError, sqlite3.Error):
            raise
        except RaylightError as error:
            return False, error
        except Exception as error:
            logger.exception("a call of %s failed", method)
            return False, StoreError(
                f"{method} failed, probably because of its arguments: {type(error).__name__}: {error}; the "
                "store's log has the traceback"
            )

    @contextlib.contextmanager
    def _committed(self) -> Iterator[None]:
        """A transaction; after its commit, those that wait for its events are woken."""
        self._ensure_timer()
        try:
            with self._journal.transaction():
                yield
                self._clock.save()
        except BaseException:
            self._rollouts.events = CommitEvents()
            raise
        self._wake()

    def _update_rollout(self, rollout_id: str, values: JsonObject) -> Row:
        self._rollouts.update(rollout_id, values)
        if "config" in values:
            self._attempts.apply_config(rollout_id)
        return self._rollouts.state(rollout_id)

    def _finish_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        values: JsonObject,
        spans: list[Row],
        force: bool,
        losses: dict[str, int] | None,
    ) -> Row | None:
        """Decide an attempt; returns None without any change while it has open calls, unless forced."""
        if not force and self._attempts.count_open_calls(attempt_id):
            return None
        for name, count in (losses or {}).items():
            self._journal.increment(name, by=count)
        return self._records.finish_attempt(rollout_id, attempt_id, values, spans)

    # calls that wait

    async def enqueue(self, requests: list[Row]) -> list[tuple[bool, Row]]:
        """Queue rollouts, waiting while the queue is full; see `Rollouts.enqueue`."""
        self._ensure_timer()
        self._rollouts.check_requests(requests)
        rows: list[tuple[bool, Row]] = []
        while len(rows) < len(requests):
            while not await self._wait_for(
                self._queue_has_room,
                lambda: self._rollouts.n_waiting < self._max_queued,
                FULL_QUEUE_WARNING_S,
            ):
                if self._outages.is_away:
                    continue  # the run has shown it
                logger.warning(
                    "the queue has been full (%d rollouts) for %g s and no runner dequeues; check that "
                    "runners are up",
                    self._max_queued,
                    FULL_QUEUE_WARNING_S,
                )
            room = self._max_queued - self._rollouts.n_waiting
            with self._committed():
                rows += self._rollouts.enqueue(requests[len(rows) : len(rows) + room])
        return rows

    async def dequeue(self, worker_id: str | None, limit: int, timeout: float, request_id: str) -> list[Row]:
        """Lease rollouts, waiting up to `timeout` seconds for the first; callers that wait share evenly."""
        self._ensure_timer()
        if limit < 1:
            return []
        if timeout > 0 and not self._leases.leased_by(request_id):
            can_dequeue = self._leases.can_dequeue
            if worker_id is not None and not can_dequeue(worker_id):
                with self._committed():  # a worker that waits is known to be idle
                    self._workers.record_dequeue(worker_id)
            self._n_polls += 1
            try:
                await self._wait_for(self._queue_changed, lambda: can_dequeue(worker_id), timeout)
                limit = min(limit, max(1, math.ceil(self._rollouts.n_waiting / self._n_polls)))
            finally:
                self._n_polls -= 1
        with self._committed():
            return self._leases.dequeue(worker_id, limit, request_id)

    async def wait_for_records(self, attempt_id: str, timeout: float) -> bool:
        """Wait until no call of the attempt is open; False after the timeout, or if the recorder of an open
        call is gone."""
        await self._wait_for(
            self._calls_closed, lambda: self._records.count_awaited_calls(attempt_id) == 0, timeout
        )
        return self._attempts.count_open_calls(attempt_id) == 0

    async def _wait_for(
        self, condition: BroadcastCondition, predicate: Callable[[], bool], timeout: float
    ) -> bool:
        """Wait for a predicate; raises if the store is closed meanwhile, or its timer fails."""

        def check() -> bool:
            self._ensure_timer()
            return predicate()

        return await condition.wait_for(check, timeout)

    async def wait_until_decided(
        self, rollout_ids: list[str], at_least: int | None, timeout: float | None, final: bool = False
    ) -> list[str]:
        """Wait until `at_least` rollouts are decided (default: all), or for `timeout` seconds; returns the
        ids of the decided ones.

        Args:
            final: a rollout that failed because its attempt is unresponsive counts as undecided.
        """
        unique = list(dict.fromkeys(rollout_ids))
        wanted = len(unique) if at_least is None else min(at_least, len(unique))
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            self._ensure_timer()
            undecided = self._rollouts.undecided(unique, final)
            needed = wanted - (len(unique) - len(undecided))
            remaining = None if deadline is None else deadline - loop.time()
            if needed <= 0 or (remaining is not None and remaining <= 0):
                decided = set(unique) - set(undecided)
                return [rollout_id for rollout_id in unique if rollout_id in decided]
            await self._waiters.wait(undecided, needed, remaining)

    async def query(self, method: str, *args: object) -> Any:
        """Run one of the `Queries` in the reader thread, while the writer continues."""
        if self._read_only:
            self._check_open()
        else:
            self._ensure_timer()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._reader_thread, self._queries.run, method, args)
        except UnicodeEncodeError as error:
            raise QueryError(
                f"a filter holds characters that are not Unicode, which match nothing: {error}"
            ) from None
        except sqlite3.Error as error:
            raise StoreError(
                f"the store's file {self._journal.path} cannot be read: {error}; check its disk"
            ) from None

    # files of images

    async def write_images(self, images: dict[str, bytes]) -> None:
        """Write the files of images, by digest; see `ImageFolder.write`."""
        self._ensure_timer()
        with disk_errors(self._images.path):
            await self._in_thread(self._images.write, images)

    async def read_images(self, digests: list[str]) -> dict[str, bytes]:
        """Return the files of images by their digests."""
        self._check_open()
        return await self._in_thread(self._images.read, digests)

    async def _in_thread(self, function: Callable[[*Args], Result], *args: *Args) -> Result:
        """Call a function on files in a thread, for whose end `close` waits even if the caller was
        cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._file_threads, function, *args)

    # events and deadlines

    def _wake(self) -> None:
        """Wake those that wait for the events of the last transaction."""
        events, self._rollouts.events = self._rollouts.events, CommitEvents()
        self._waiters.decide(events.decided)
        if events.queued:
            self._queue_changed.notify_all()
        if events.dequeued:
            self._queue_has_room.notify_all()
        if events.calls_closed:
            self._calls_closed.notify_all()
        if events.deadline is not None:
            self._timer.add(events.deadline)

    def _wake_all(self) -> None:
        """Wake all waiters, so that each receives the error of a closed store or a failed timer."""
        for condition in (self._queue_changed, self._queue_has_room, self._calls_closed):
            condition.notify_all()
        self._waiters.wake_all()

    def _ensure_timer(self) -> None:
        """Check that the store can be changed, and keep its timer running; see `DeadlineTimer`."""
        self._check_open()
        if self._read_only:
            raise StoreError(
                f"the store {self._journal.path} was opened for reading only; change it through its own run"
            )
        self._timer.keep_running()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"the store {self._journal.path} is closed; open another StoreService")

    async def expire(self) -> int:
        """End the attempts whose deadline has passed, as the timer does; returns their number."""
        with self._committed():
            return self._leases.expire()

    async def close(self) -> None:
        """Stop the timer and close the file; callers that wait receive a StoreError."""
        self._is_closed = True
        self.close_mail()
        await self._timer.stop()
        self._wake_all()
        await self._waiters.empty()  # their responses are sent before the process ends
        self._reader_thread.shutdown()
        self._file_threads.shutdown()
        self._journal.close()


@dataclass(eq=False)
class FinishWaiter:
    """A caller that waits until `needed` more of its rollouts are decided."""

    needed: int
    done: asyncio.Future[None]


class FinishWaiters:
    """Waiting callers, by the rollouts they wait for."""

    def __init__(self) -> None:
        self._waiters: dict[str, set[FinishWaiter]] = {}
        self._n_waiting = 0
        self._left = BroadcastCondition()

    async def wait(self, undecided: list[str], needed: int, timeout: float | None) -> None:
        """Wait until `needed` of these rollouts are decided, for `timeout` seconds, or until `wake_all`."""
        waiter = FinishWaiter(needed, asyncio.get_running_loop().create_future())
        for rollout_id in undecided:
            self._waiters.setdefault(rollout_id, set()).add(waiter)
        self._n_waiting += 1
        try:
            await asyncio.wait([waiter.done], timeout=timeout)
        finally:
            self._n_waiting -= 1
            self._left.notify_all()
            for rollout_id in undecided:
                waiters = self._waiters.get(rollout_id, set())
                waiters.discard(waiter)
                if not waiters:
                    self._waiters.pop(rollout_id, None)

    def decide(self, rollout_ids: Iterable[str]) -> None:
        """Wake the callers whose last needed rollout is among these."""
        for rollout_id in rollout_ids:
            for waiter in self._waiters.pop(rollout_id, set()):
                waiter.needed -= 1
                if waiter.needed == 0 and not waiter.done.done():
                    waiter.done.set_result(None)

    def wake_all(self) -> None:
        for waiter in {waiter for waiters in self._waiters.values() for waiter in waiters}:
            if not waiter.done.done():
                waiter.done.set_result(None)

    async def empty(self) -> None:
        """Wake all callers, and wait until they have continued."""
        self.wake_all()
        await self._left.wait_for(lambda: not self._n_waiting)
