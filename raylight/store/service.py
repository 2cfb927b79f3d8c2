"""The store with waiting: every wait is on an event or a deadline. Runs in any asyncio loop, inside a Ray actor or in a test.

Laws: calls that come together are committed together, and are answered only when they are (group commit); a call that fails undoes
what it changed and nothing else; time passes by a timer of the store's own, not when somebody happens to call; a timer that failed
is started again, and one of those who call or wait is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import pickle
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylight.aio import BroadcastCondition
from raylight.config import StoreConfig
from raylight.errors import QueryError, RaylightError, StoreError
from raylight.store.attempts import Attempts
from raylight.store.journal import Journal, JournalError
from raylight.store.queries import Queries
from raylight.store.records import ClosedCall, OpenedCall, Records, RefusedCall
from raylight.store.resources import Resources
from raylight.store.rollouts import Changes, Rollouts
from raylight.store.rows import Row
from raylight.store.workers import Workers

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""After so long a wait for room in the queue the store says so in its log."""

TICK_S = 0.001
"""The timer waits no shorter: an event loop's clock and the store's own may differ by less."""

Call = tuple[str, tuple[Any, ...]]
Answer = tuple[bool, Any]
"""Whether the call succeeded, and its result or its error."""


@dataclass(eq=False)
class FinishWaiter:
    """Waits until `needed` more of a set of rollouts are decided."""

    needed: int
    done: asyncio.Future[None]


class StoreService:
    """Asynchronous face of the journal and its rules; `StoreClient` documents each method.

    Args:
        path: the journal's file; None keeps it in a temporary folder for as long as this object lives.
        clock: seconds since the epoch.
        read_only: only queries are answered; for looking at a run, also while it goes on.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        config: StoreConfig | None = None,
        clock: Callable[[], float] = time.time,
        read_only: bool = False,
    ) -> None:
        config = config or StoreConfig()
        self._read_only = read_only
        self._journal = Journal(path, read_only)
        self._clock = clock
        self._max_queued = config.max_queued
        self._rollouts = Rollouts(self._journal, clock)
        self._workers = Workers(self._journal, clock)
        self._attempts = Attempts(self._journal, self._rollouts, self._workers, clock, config.lease_seconds)
        self._records = Records(self._journal, self._rollouts, self._attempts)
        self._resources = Resources(self._journal, clock)
        self._queries = Queries(self._journal.reader)
        self._methods = self._table()
        self._queued, self._room, self._closed, self._earlier = (
            BroadcastCondition(),
            BroadcastCondition(),
            BroadcastCondition(),
            BroadcastCondition(),
        )
        self._waiters: dict[str, set[FinishWaiter]] = {}
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        self._watching: asyncio.Task[None] | None = None
        self._alarm = math.inf
        self._shut = False
        if not read_only:
            with self._journal.transaction():
                self._attempts.recover()

    def _table(self) -> dict[str, Callable[..., Any]]:
        """What `call` can do."""
        rollouts, attempts, records, resources = (
            self._rollouts,
            self._attempts,
            self._records,
            self._resources,
        )
        return {
            "start_rollout": attempts.start_rollout,
            "start_attempt": attempts.start_attempt,
            "update_rollout": self._update_rollout,
            "update_attempt": attempts.update,
            "finish_attempt": self._finish_attempt,
            "release_worker": attempts.release_worker,
            "cancel": rollouts.cancel,
            "add_spans": records.add_spans,
            "next_sequence_ids": records.next_sequence_ids,
            "capture": self._capture,
            "lose_recorder": records.lose_recorder,
            "add_resources": resources.add_resources,
            "update_resources": resources.update_resources,
            "update_worker": self._update_worker,
        }

    # calls that never wait

    async def call(self, calls: list[Call], lane: str = "", number: int = 0) -> list[Answer]:
        """Carry out calls in one transaction; each fails for itself. A message that comes a second time is only answered again.

        Args:
            lane: of the client, and
            number: of the message in it, which grows; "" for a message that nobody sends twice.

        Raises:
            StoreError: the journal cannot be written; nothing was changed.
        """
        with self._committed():
            if lane and (
                answered := self._journal.one("SELECT number, answers FROM lanes WHERE lane = ?", (lane,))
            ):
                last, answers = answered
                if last == number:
                    return pickle.loads(answers)
                if last > number:  # a message that was given up, and came after the next one nevertheless
                    raise StoreError(
                        f"message {number} of a client came after its message {last}; it was not carried out"
                    )
            answers = [self._one_call(method, args) for method, args in calls]
            if lane:
                self._journal.execute(
                    "INSERT OR REPLACE INTO lanes VALUES (?, ?, ?)", (lane, number, pickle.dumps(answers))
                )
            return answers

    async def lease_seconds(self) -> float:
        self._watch()
        return self._attempts.lease_seconds

    def _one_call(self, method: str, args: tuple[Any, ...]) -> Answer:
        try:
            with self._journal.one_call():
                return True, self._methods[method](*args)
        except (JournalError, sqlite3.Error):
            raise
        except RaylightError as error:
            return False, error
        except Exception as error:
            logger.exception("a call of %s failed", method)
            return False, StoreError(
                f"{method} was called in a way that it cannot understand: {type(error).__name__}: {error}"
            )

    @contextlib.contextmanager
    def _committed(self) -> Iterator[None]:
        """A transaction; when it is over, those who wait for what changed are woken."""
        self._watch()
        try:
            with self._journal.transaction():
                yield
        except BaseException:
            self._rollouts.changes = Changes()
            raise
        self._wake()

    def _update_rollout(self, rollout_id: str, values: dict[str, Any]) -> Row:
        self._rollouts.update(rollout_id, values)
        if "config" in values:
            self._attempts.adopt_config(rollout_id)
        return self._rollouts.get(rollout_id)

    def _update_worker(
        self, worker_id: str, stats: str | None, attempt_ids: list[str] | None
    ) -> tuple[Row, list[str]]:
        """A heartbeat; returns the worker, and those of its attempts that nobody needs any more."""
        over = self._attempts.renew_leases(worker_id, attempt_ids)
        return self._workers.heartbeat(worker_id, stats), over

    def _finish_attempt(
        self, rollout_id: str, attempt_id: str, values: dict[str, Any], spans: list[Row], at_once: bool
    ) -> Row | None:
        """Store an attempt's last spans and decide it, in one step; None, and nothing done, while calls of it are open."""
        if not at_once and self._attempts.count_open_calls(attempt_id):
            return None
        self._records.add_spans(spans)
        return self._attempts.finish(rollout_id, attempt_id, values)

    def _capture(self, opened: list[OpenedCall], closed: list[ClosedCall]) -> list[RefusedCall]:
        refused = self._records.open_calls(opened)
        self._records.close_calls(closed)
        return refused

    # calls that wait

    async def enqueue(self, requests: list[Row]) -> list[Row]:
        """Queue rollouts as there is room for them."""
        self._watch()
        self._rollouts.check(requests)
        rows: list[Row] = []
        while len(rows) < len(requests):
            while not await self._until(
                self._room, lambda: self._rollouts.waiting < self._max_queued, PATIENCE_S
            ):
                logger.warning("the queue is full (%d rollouts) and nobody takes any", self._max_queued)
            room = self._max_queued - self._rollouts.waiting
            with self._committed():
                rows += self._rollouts.enqueue(requests[len(rows) : len(rows) + room])
        return rows

    async def dequeue(self, worker_id: str | None, limit: int, timeout: float, request_id: str) -> list[Row]:
        """Lease rollouts, waiting up to `timeout` seconds for the first."""
        self._watch()
        if limit < 1:
            return []
        if timeout > 0 and not self._attempts.given_to(request_id):
            await self._until(self._queued, lambda: self._attempts.has_for(worker_id), timeout)
        with self._committed():
            return self._attempts.dequeue(worker_id, limit, request_id)

    async def settle(self, attempt_id: str, timeout: float) -> bool:
        """Wait until no call of the attempt is open; False if that did not happen in time, or can happen no more."""
        await self._until(self._closed, lambda: self._records.count_awaited(attempt_id) == 0, timeout)
        return self._attempts.count_open_calls(attempt_id) == 0

    async def _until(self, condition: BroadcastCondition, holds: Callable[[], bool], timeout: float) -> bool:
        """Wait for a condition; raises when the store is closed meanwhile, or its timer fails."""

        def look() -> bool:
            self._watch()
            return holds()

        return await condition.wait_for(look, timeout)

    async def wait_for_rollouts(
        self, rollout_ids: list[str], at_least: int | None, timeout: float | None
    ) -> list[Row]:
        """Decided rollouts among `rollout_ids`, once there are `at_least` (default all) or the time is over."""
        unique = list(dict.fromkeys(rollout_ids))
        wanted = len(unique) if at_least is None else min(at_least, len(unique))
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while True:
            self._watch()
            undecided = self._rollouts.undecided(unique)
            needed = wanted - (len(unique) - len(undecided))
            left = None if end is None else end - loop.time()
            if needed <= 0 or (left is not None and left <= 0):
                decided = set(unique) - set(undecided)
                return [self._rollouts.get(rollout_id) for rollout_id in unique if rollout_id in decided]
            await self._wait_for_any(undecided, needed, left)

    async def _wait_for_any(self, undecided: list[str], needed: int, timeout: float | None) -> None:
        waiter = FinishWaiter(needed, asyncio.get_running_loop().create_future())
        for rollout_id in undecided:
            self._waiters.setdefault(rollout_id, set()).add(waiter)
        try:
            await asyncio.wait([waiter.done], timeout=timeout)
        finally:
            for rollout_id in undecided:
                waiters = self._waiters.get(rollout_id, set())
                waiters.discard(waiter)
                if not waiters:
                    self._waiters.pop(rollout_id, None)

    async def query(self, method: str, *args: Any) -> Any:
        """Run one of the `Queries`, beside the writer."""
        if self._read_only:
            self._must_be_open()
        else:
            self._watch()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._readers, self._queries.run, method, args)
        except UnicodeEncodeError as error:
            raise QueryError(f"nothing can be found by what is not Unicode: {error}") from None
        except sqlite3.Error as error:
            raise StoreError(f"the store's file {self._journal.path} cannot be read: {error}") from None

    # events and the timer

    def _wake(self) -> None:
        changes, self._rollouts.changes = self._rollouts.changes, Changes()
        for rollout_id in changes.decided:
            for waiter in self._waiters.pop(rollout_id, set()):
                waiter.needed -= 1
                if waiter.needed == 0 and not waiter.done.done():
                    waiter.done.set_result(None)
        if changes.queued:
            self._queued.notify_all()
        if changes.taken:
            self._room.notify_all()
        if changes.closed:
            self._closed.notify_all()
        if changes.deadline is not None and changes.deadline < self._alarm:
            self._earlier.notify_all()

    def _wake_all(self) -> None:
        """So that everybody looks at what became of the store."""
        for condition in (self._queued, self._room, self._closed):
            condition.notify_all()
        for waiter in {waiter for waiters in self._waiters.values() for waiter in waiters}:
            if not waiter.done.done():
                waiter.done.set_result(None)

    def _watch(self) -> None:
        """Keep the timer running. If it failed, say so to this caller; the next one starts it again."""
        self._must_be_open()
        if self._read_only:
            raise StoreError(f"the store {self._journal.path} was opened for reading only")
        watching = self._watching
        if watching is not None and watching.done():
            self._watching = None
            if not watching.cancelled():  # else its event loop is gone
                watching.result()
        if self._watching is None:
            self._watching = asyncio.create_task(self._expire_forever())

    def _must_be_open(self) -> None:
        if self._shut:
            raise StoreError(f"the store {self._journal.path} is closed")

    async def _expire_forever(self) -> None:
        try:
            while True:
                deadline = self._attempts.next_deadline()
                self._alarm = math.inf if deadline is None else deadline
                left = None if deadline is None else deadline - self._clock()
                if left is not None and left > 0:
                    left = max(left, TICK_S)
                if not await self._earlier.wait_for(self._is_earlier, left):
                    await self.expire()
        except Exception:
            logger.exception("the store's timer failed")
            self._wake_all()
            raise

    def _is_earlier(self) -> bool:
        first = self._attempts.next_deadline()
        return first is not None and first < self._alarm

    async def expire(self) -> int:
        """End what is over its time, as the timer does; returns how many attempts that were."""
        with self._committed():
            return self._attempts.expire()

    async def close(self) -> None:
        """Stop the timer and close the file; whoever still waits hears of it."""
        self._shut = True
        if self._watching is not None and not self._watching.done():
            self._watching.cancel()
            await asyncio.wait([self._watching])
        self._wake_all()
        self._readers.shutdown()
        self._journal.close()
