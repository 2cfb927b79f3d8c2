"""Attempts in the journal: leases, signs of life, and how they decide their rollouts. No Ray, no network, no wall clock.

Laws: a rollout is decided by its latest attempt only; a dequeue is a lease, so that an attempt whose worker is not heard of again
goes back to the queue; an attempt succeeds only when every call that was opened for it has been closed; a client that lost an
answer and asks again gets the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raylight.errors import InvalidTransitionError, UnknownIdError
from raylight.store.journal import Journal
from raylight.store.rollouts import Rollouts
from raylight.store.rows import ATTEMPT, Row, new_id
from raylight.store.rules import check_attempt, decide
from raylight.types import ATTEMPT_FINISHED, LIVE, AttemptStatus, Failure

_LIVE = "attempt_id, rollout_id, sequence_id, status, worker_id, timeout_at, silent_at"
_NEVER = 9e99
_EARLIEST = f"MIN(COALESCE(timeout_at, {_NEVER}), COALESCE(silent_at, {_NEVER}), COALESCE(lease_until, {_NEVER}))"


@dataclass(frozen=True)
class LiveAttempt:
    """What the rules need of an attempt."""

    attempt_id: str
    rollout_id: str
    sequence_id: int
    status: AttemptStatus
    worker_id: str | None
    timeout_at: float | None
    silent_at: float | None


class Attempts:
    """Attempts, and the passing of time.

    Args:
        clock: seconds since the epoch.
        lease_seconds: how long a dequeued attempt may go without a sign of life of itself or its worker.
    """

    def __init__(self, journal: Journal, rollouts: Rollouts, clock: Callable[[], float], lease_seconds: float) -> None:
        self._journal = journal
        self._rollouts = rollouts
        self._clock = clock
        self._lease_seconds = lease_seconds

    # beginning

    def dequeue(self, worker_id: str | None, limit: int, request_id: str) -> list[Row]:
        """Lease up to `limit` waiting rollouts, oldest first, each with a new attempt. The same request gets the same again."""
        again = self._journal.execute("SELECT rollout_id FROM attempts WHERE request_id = ?", (request_id,)).fetchall()
        if again:
            return [self._rollouts.get(rollout_id) for (rollout_id,) in again]
        if worker_id is not None and not self._seen(worker_id):
            return []
        found = self._rollouts.first_in_queue(limit)
        for rollout_id in found:
            self._rollouts.set_status(rollout_id, "preparing")
            self.begin(rollout_id, new_id("at"), worker_id, request_id)
        return [self._rollouts.get(rollout_id) for rollout_id in found]

    def _seen(self, worker_id: str) -> bool:
        """Note that a worker asked; False for one that was released: a poll that outlives its worker must not take anything."""
        self._journal.execute(
            "INSERT INTO workers (worker_id, last_dequeue_time) VALUES (?, ?)"
            " ON CONFLICT DO UPDATE SET last_dequeue_time = excluded.last_dequeue_time",
            (worker_id, self._clock()),
        )
        return self._journal.one("SELECT gone FROM workers WHERE worker_id = ?", (worker_id,)) == (0,)

    def start_rollout(self, request: Row, attempt_id: str, worker_id: str | None) -> Row:
        """A rollout that its caller runs at once."""
        if self._rollouts.insert(request, "preparing"):
            self.begin(request[0], attempt_id, worker_id)
        return self._rollouts.get(request[0])

    def start_attempt(self, rollout_id: str, attempt_id: str, worker_id: str | None) -> Row:
        """Another attempt by hand, outside the queue. What the attempt before it still does changes nothing any more.

        Raises:
            InvalidTransitionError: the rollout is cancelled.
        """
        if not self._journal.one("SELECT 1 FROM attempts WHERE attempt_id = ?", (attempt_id,)):
            if self._rollouts.status(rollout_id) == "cancelled":
                raise InvalidTransitionError(f"rollout {rollout_id} is cancelled; it cannot be tried again")
            self._journal.execute(
                "UPDATE rollouts SET status = 'preparing', queue = NULL, end_time = NULL WHERE rollout_id = ?", (rollout_id,)
            )
            self.begin(rollout_id, attempt_id, worker_id)
        return self._rollouts.get(rollout_id)

    def begin(self, rollout_id: str, attempt_id: str, worker_id: str | None, request_id: str | None = None) -> None:
        """Add an attempt. Only one that came from the queue is leased: nobody else is to take what its caller began by hand."""
        now, config = self._clock(), self._rollouts.config(rollout_id)
        sequence_id = self._rollouts.column(rollout_id, "n_attempts") + 1
        self._journal.execute(
            "INSERT INTO attempts (attempt_id, rollout_id, sequence_id, status, worker_id, start_time, request_id, silence,"
            " timeout_at) VALUES (?, ?, ?, 'preparing', ?, ?, ?, ?, ?)",
            (
                attempt_id, rollout_id, sequence_id, worker_id, now, request_id, config.unresponsive_seconds,
                now + config.timeout_seconds if config.timeout_seconds else None,
            ),
        )  # fmt: skip
        self._renew(attempt_id, now)
        self._journal.execute("UPDATE rollouts SET n_attempts = ? WHERE rollout_id = ?", (sequence_id, rollout_id))
        self._journal.count("total_attempts")
        if worker_id is not None:
            self._journal.execute(
                "INSERT INTO workers (worker_id, last_busy_time) VALUES (?, ?)"
                " ON CONFLICT DO UPDATE SET last_busy_time = excluded.last_busy_time",
                (worker_id, now),
            )

    def _renew(self, attempt_id: str, now: float) -> None:
        """Silence and lease begin anew."""
        self._journal.execute(
            "UPDATE attempts SET silent_at = ? + silence, lease_until = IIF(request_id IS NULL, NULL, ?) WHERE attempt_id = ?",
            (now, now + self._lease_seconds, attempt_id),
        )
        found = self._journal.one(
            f"UPDATE attempts SET deadline = NULLIF({_EARLIEST}, {_NEVER}) WHERE attempt_id = ? RETURNING deadline", (attempt_id,)
        )
        self._rollouts.changes.deadline_set(found[0] if found else None)

    # going on

    def get(self, rollout_id: str, attempt_id: str) -> LiveAttempt:
        """An attempt, or the "latest" one.

        Raises:
            UnknownIdError: no such rollout, or it has no such attempt.
        """
        n_attempts = self._rollouts.column(rollout_id, "n_attempts")
        which, value = ("sequence_id", n_attempts) if attempt_id == "latest" else ("attempt_id", attempt_id)
        found = self._journal.one(f"SELECT {_LIVE} FROM attempts WHERE rollout_id = ? AND {which} = ?", (rollout_id, value))
        if found is None:
            raise UnknownIdError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
        return LiveAttempt(*found)

    def sign_of_life(self, attempt: LiveAttempt) -> None:
        """A span or a call came: the attempt runs, even if it was thought unresponsive, and its silence begins anew."""
        if attempt.status in ATTEMPT_FINISHED:
            return
        now = self._clock()
        self._journal.execute("UPDATE attempts SET last_heartbeat_time = ? WHERE attempt_id = ?", (now, attempt.attempt_id))
        if attempt.status == "running":
            self._renew(attempt.attempt_id, now)
        else:
            self._journal.count("attempts_revived", by=attempt.status == "unresponsive")
            self.set_status(attempt, "running")

    def renew_leases(self, worker_id: str, attempt_ids: list[str] | None) -> list[str]:
        """A worker says that it works on these attempts (None: on all that it has). Returns those that nobody needs any more."""
        now, over = self._clock(), []
        if attempt_ids is None:
            live = "SELECT attempt_id FROM attempts WHERE worker_id = ? AND status IN ('preparing', 'running')"
            attempt_ids = [attempt_id for (attempt_id,) in self._journal.execute(live, (worker_id,)).fetchall()]
        for attempt_id in attempt_ids:
            found = self._journal.one(
                "SELECT a.status, r.status, r.n_attempts = a.sequence_id FROM attempts a JOIN rollouts r USING (rollout_id)"
                " WHERE a.attempt_id = ?",
                (attempt_id,),
            )
            if found is None or found[0] in ATTEMPT_FINISHED or found[1] == "cancelled" or not found[2]:
                over.append(attempt_id)
            elif found[0] in LIVE:
                self._journal.execute(
                    "UPDATE attempts SET lease_until = ? WHERE attempt_id = ? AND lease_until IS NOT NULL",
                    (now + self._lease_seconds, attempt_id),
                )
                self._journal.execute(
                    f"UPDATE attempts SET deadline = NULLIF({_EARLIEST}, {_NEVER}) WHERE attempt_id = ?", (attempt_id,)
                )  # fmt: skip
        return over

    # ending

    def update(self, rollout_id: str, attempt_id: str, values: dict[str, Any]) -> Row:
        """Change an attempt (or the "latest"): columns, and the status by the table of its changes.

        Raises:
            InvalidTransitionError: the table does not have this change, or it succeeds while calls are open.
        """
        attempt = self.get(rollout_id, attempt_id)
        columns = {name: value for name, value in values.items() if name not in ("status", "failure")}
        if columns:
            changes = ", ".join(f"{name} = ?" for name in columns)
            self._journal.execute(f"UPDATE attempts SET {changes} WHERE attempt_id = ?", (*columns.values(), attempt.attempt_id))
        status, failure = values.get("status"), values.get("failure")
        if status is not None and status != attempt.status:
            if status == "succeeded" and (n := self.count_open_calls(attempt.attempt_id)):
                raise InvalidTransitionError(f"attempt {attempt.attempt_id} succeeds while {n} calls are open")
            self.set_status(attempt, status, Failure.model_validate_json(failure) if failure else None)
        found = self._journal.one(f"SELECT {ATTEMPT} FROM attempts WHERE attempt_id = ?", (attempt.attempt_id,))
        assert found is not None, "it was there a moment ago"
        return found

    def finish(self, rollout_id: str, attempt_id: str, values: dict[str, Any]) -> Row:
        """Decide an attempt and return its rollout; an attempt that was decided before stays as it is, and is counted."""
        attempt = self.get(rollout_id, attempt_id)
        if attempt.status in ATTEMPT_FINISHED:
            self._journal.count("attempts_late", by=attempt.status != values["status"])
        else:
            self.update(rollout_id, attempt_id, values)
        return self._rollouts.get(rollout_id)

    def set_status(self, attempt: LiveAttempt, status: AttemptStatus, failure: Failure | None = None) -> None:
        """Change an attempt's status, and let its rollout follow if it is the latest one."""
        check_attempt(attempt.attempt_id, attempt.status, status)
        now = self._clock()
        self._journal.execute(
            "UPDATE attempts SET status = ?, end_time = ?, failure = ?, deadline = ? WHERE attempt_id = ?",
            (
                status, now if status in ATTEMPT_FINISHED else None, failure.model_dump_json() if failure else None,
                attempt.timeout_at if status == "unresponsive" else None, attempt.attempt_id,
            ),
        )  # fmt: skip
        if status in LIVE:
            self._renew(attempt.attempt_id, now)
        elif attempt.worker_id:
            self._idle(attempt.worker_id, now)
        if failure:
            self._journal.count(f"attempts_failed_{failure.kind}")
        self._follow(attempt, status, infrastructure=failure is not None and failure.kind == "infrastructure")

    def _follow(self, attempt: LiveAttempt, status: AttemptStatus, infrastructure: bool) -> None:
        """The rollout follows its latest attempt; once that was given up as unresponsive, only life or success change it."""
        rollout_id = attempt.rollout_id
        if attempt.status == "unresponsive" and status not in ("running", "succeeded"):
            return
        if attempt.sequence_id != self._rollouts.column(rollout_id, "n_attempts"):
            return
        lost = self._rollouts.column(rollout_id, "infrastructure_failures") + infrastructure
        if infrastructure:
            self._journal.execute("UPDATE rollouts SET infrastructure_failures = ? WHERE rollout_id = ?", (lost, rollout_id))
        after = decide(status, attempt.sequence_id, infrastructure, lost, self._rollouts.config(rollout_id))
        if after != self._rollouts.status(rollout_id):
            self._rollouts.set_status(rollout_id, after)

    def _idle(self, worker_id: str, now: float) -> None:
        live = "SELECT 1 FROM attempts WHERE worker_id = ? AND status IN ('preparing', 'running') LIMIT 1"
        if not self._journal.one(live, (worker_id,)):
            self._journal.execute("UPDATE workers SET last_idle_time = ? WHERE worker_id = ?", (now, worker_id))

    def release_worker(self, worker_id: str, why: str) -> int:
        """A worker is gone for good: all that it had is lost to the infrastructure. Returns how many attempts that were."""
        self._journal.execute(
            "INSERT INTO workers (worker_id, gone) VALUES (?, 1) ON CONFLICT DO UPDATE SET gone = 1", (worker_id,)
        )  # fmt: skip
        held = f"SELECT {_LIVE} FROM attempts WHERE worker_id = ? AND status IN ('preparing', 'running') ORDER BY start_time"
        lost = [LiveAttempt(*row) for row in self._journal.execute(held, (worker_id,)).fetchall()]
        for attempt in lost:
            self.set_status(attempt, "failed", Failure(kind="infrastructure", error=f"RunnerLost: {why}"))
        return len(lost)

    # the passing of time

    def recover(self) -> None:
        """After a restart: whoever worked meanwhile gets a whole lease, and a whole silence, to say so."""
        live = "SELECT attempt_id FROM attempts WHERE status IN ('preparing', 'running')"
        for (attempt_id,) in self._journal.execute(live).fetchall():
            self._renew(attempt_id, self._clock())

    def next_deadline(self) -> float | None:
        found = self._journal.one("SELECT MIN(deadline) FROM attempts WHERE deadline IS NOT NULL")
        return found[0] if found else None

    def expire(self) -> int:
        """End what is over its time; returns how many attempts that were."""
        now = self._clock()
        due = self._journal.execute(f"SELECT {_LIVE} FROM attempts WHERE deadline <= ?", (now,)).fetchall()
        for row in due:
            attempt = LiveAttempt(*row)
            status, failure = self._overdue(attempt, now)
            self.set_status(attempt, status, failure)
        return len(due)

    def _overdue(self, attempt: LiveAttempt, now: float) -> tuple[AttemptStatus, Failure]:
        config = self._rollouts.config(attempt.rollout_id)
        if attempt.timeout_at is not None and attempt.timeout_at <= now:
            error = f"TimeoutError: the attempt took longer than {config.timeout_seconds:g} s"
            return "timeout", Failure(kind="timeout", error=error)
        if attempt.silent_at is not None and attempt.silent_at <= now:
            error = f"Unresponsive: no span came for {config.unresponsive_seconds:g} s"
            return "unresponsive", Failure(kind="unresponsive", error=error)
        error = f"LeaseExpired: {attempt.worker_id or 'whoever took it'} was not heard of for {self._lease_seconds:g} s"
        return "unresponsive", Failure(kind="infrastructure", error=error)

    def count_open_calls(self, attempt_id: str) -> int:
        found = self._journal.one("SELECT COUNT(*) FROM calls WHERE attempt_id = ? AND generation IS NULL", (attempt_id,))
        return found[0] if found else 0
