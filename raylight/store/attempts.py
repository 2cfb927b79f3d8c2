"""Attempts in the journal: leases, signs of life, and how they decide their rollouts. No Ray, no network, no wall clock.

Laws: a rollout is decided by its latest attempt only, and what was decided by hand stays; a dequeue is a lease, so that an attempt
whose worker is not heard of again goes back to the queue; an attempt succeeds only when every call that was opened for it has been
closed; a client that lost an answer and asks again gets the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raylight.errors import InvalidTransitionError, UnknownIdError, WorkerGoneError
from raylight.store.journal import Journal
from raylight.store.live import LIVE_ATTEMPT, WORKED_ON, LiveAttempt
from raylight.store.rollouts import Rollouts
from raylight.store.rows import ATTEMPT, Row, failure_of, failure_text, new_id
from raylight.store.rules import Losses, check_attempt, decide
from raylight.store.workers import Workers
from raylight.types import (
    ATTEMPT_FINISHED,
    FINISHED,
    LIVE,
    ROLLOUT_TRANSITIONS,
    WAITING,
    AttemptStatus,
    Failure,
)


class Attempts:
    """Attempts, and the passing of time.

    Args:
        clock: seconds since the epoch.
        lease_seconds: how long a dequeued attempt may go without a sign of life of itself or its worker.
    """

    def __init__(
        self,
        journal: Journal,
        rollouts: Rollouts,
        workers: Workers,
        clock: Callable[[], float],
        lease_seconds: float,
    ) -> None:
        self._journal = journal
        self._rollouts = rollouts
        self._workers = workers
        self._clock = clock
        self.lease_seconds = lease_seconds

    # beginning

    def dequeue(self, worker_id: str | None, limit: int, request_id: str) -> list[Row]:
        """Lease up to `limit` waiting rollouts, oldest first, each with a new attempt. The same request gets the same again."""
        if again := self.given_to(request_id):
            return [self._rollouts.get(rollout_id) for rollout_id in again]
        if worker_id is not None and not self._workers.seen(worker_id):
            raise WorkerGoneError(f"the store has released {worker_id}; what it had went back to the queue")
        found = self._rollouts.first_in_queue(1, suspect=True) if self._may_take_suspect(worker_id) else []
        found += self._rollouts.first_in_queue(limit - len(found))
        for rollout_id in found:
            self.begin(rollout_id, new_id("at"), worker_id, request_id)
        return [self._rollouts.get(rollout_id) for rollout_id in found]

    def _may_take_suspect(self, worker_id: str | None) -> bool:
        """A worker has one suspected rollout at a time, so that the next death tells which one it was."""
        return worker_id is None or not any(attempt.suspect for attempt in self._workers.held_by(worker_id))

    def has_for(self, worker_id: str | None) -> bool:
        """Whether a dequeue of this worker has anything to give, or to say."""
        if not self._rollouts.waiting:
            return self._workers.is_gone(worker_id)
        if self._rollouts.first_in_queue(1) or self._workers.is_gone(worker_id):
            return True
        return bool(self._rollouts.first_in_queue(1, suspect=True)) and self._may_take_suspect(worker_id)

    def given_to(self, request_id: str) -> list[str]:
        """Rollouts that a request was given before and that are still its own."""
        found = self._journal.execute(
            f"SELECT a.rollout_id FROM attempts a JOIN rollouts r ON r.rollout_id = a.rollout_id WHERE a.request_id = ?"
            f" AND {WORKED_ON} AND a.sequence_id = r.n_attempts ORDER BY a.rowid",
            (request_id,),
        )
        return [rollout_id for (rollout_id,) in found.fetchall()]

    def start_rollout(self, request: Row, attempt_id: str, worker_id: str | None) -> Row:
        """A rollout that its caller runs at once.

        Raises:
            InvalidTransitionError: there is one of this id already.
        """
        if self._rollouts.insert(request, "preparing"):
            self.begin(request[0], attempt_id, worker_id)
        elif not self._journal.one(
            "SELECT 1 FROM attempts WHERE attempt_id = ? AND rollout_id = ?", (attempt_id, request[0])
        ):
            raise InvalidTransitionError(
                f"rollout {request[0]} is there already; start_attempt tries it again"
            )
        return self._rollouts.get(request[0])

    def start_attempt(self, rollout_id: str, attempt_id: str, worker_id: str | None) -> Row:
        """Another attempt by hand, outside the queue. What the attempt before it still does changes nothing any more.

        Raises:
            InvalidTransitionError: the rollout is cancelled.
        """
        if not self._journal.one("SELECT 1 FROM attempts WHERE attempt_id = ?", (attempt_id,)):
            if self._rollouts.status(rollout_id) == "cancelled":
                raise InvalidTransitionError(f"rollout {rollout_id} is cancelled; it cannot be tried again")
            self.begin(rollout_id, attempt_id, worker_id)
        return self._rollouts.get(rollout_id)

    def begin(
        self, rollout_id: str, attempt_id: str, worker_id: str | None, request_id: str | None = None
    ) -> None:
        """Add an attempt. Only one that came from the queue is leased: nobody else is to take what its caller began by hand."""
        now, (config, sequence_id) = self._clock(), self._rollouts.take(rollout_id)
        attempt = LiveAttempt(
            attempt_id,
            rollout_id,
            sequence_id,
            "preparing",
            worker_id,
            now,
            None,
            request_id is not None,
            config.unresponsive_seconds,
            now + config.timeout_seconds if config.timeout_seconds else None,
            None,
            1,
            lost=False,
            latest=True,
            suspect=False,
        )
        attempt = attempt._replace(silent_at=self._silent_at(attempt, now))
        self._journal.execute(
            "INSERT INTO attempts (attempt_id, rollout_id, sequence_id, status, worker_id, start_time, request_id, silence,"
            " timeout_at, silent_at, deadline) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                attempt_id,
                rollout_id,
                sequence_id,
                attempt.status,
                worker_id,
                now,
                request_id,
                attempt.silence,
                attempt.timeout_at,
                attempt.silent_at,
                self._deadline(attempt, now),
            ),
        )
        self._journal.count("total_attempts")
        if worker_id is not None:
            self._workers.busy(worker_id, now)

    # going on

    def get(self, rollout_id: str, attempt_id: str) -> LiveAttempt:
        """An attempt by its id.

        Raises:
            UnknownIdError: no such rollout, or it has no such attempt.
        """
        found = self._journal.one(
            f"{LIVE_ATTEMPT} WHERE a.attempt_id = ? AND a.rollout_id = ?", (attempt_id, rollout_id)
        )
        if found is None:
            self._rollouts.status(rollout_id)  # says so if it is this that is not there
            raise UnknownIdError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
        return LiveAttempt._make(found)

    def latest(self, rollout_id: str) -> LiveAttempt | None:
        """A rollout's latest attempt; None if it has had none."""
        found = self._journal.one(
            f"{LIVE_ATTEMPT} WHERE r.rollout_id = ? AND a.sequence_id = r.n_attempts", (rollout_id,)
        )
        return LiveAttempt._make(found) if found else None

    def sign_of_life(self, attempt: LiveAttempt) -> None:
        """A span or a call came: the attempt runs, even if it was thought unresponsive, and its silence begins anew."""
        if attempt.status in ATTEMPT_FINISHED:
            return
        if attempt.status != "running":
            self._journal.count("attempts_revived", by=attempt.status == "unresponsive")
            self.set_status(attempt, "running")
            attempt = attempt._replace(status="running")
        now = self._clock()
        self._renew(attempt, now, silent_at=self._silent_at(attempt, now), heard=now)

    def renew_leases(self, worker_id: str, attempt_ids: list[str] | None) -> list[str]:
        """A worker says that it works on these attempts (None: on all that it has). Returns those that nobody needs any more."""
        now, over = self._clock(), []
        if attempt_ids is None:
            attempt_ids = [attempt.attempt_id for attempt in self._workers.held_by(worker_id)]
        for attempt_id in attempt_ids:
            found = self._journal.one(f"{LIVE_ATTEMPT} WHERE a.attempt_id = ?", (attempt_id,))
            attempt = LiveAttempt._make(found) if found else None
            if attempt is None or self._is_over(attempt):
                over.append(attempt_id)
            elif attempt.status in LIVE:
                self._renew(attempt, now, silent_at=attempt.silent_at, heard=now)
        return over

    def _is_over(self, attempt: LiveAttempt) -> bool:
        """Nobody needs the attempt any more. A rollout that failed because it was thought unresponsive may still go on."""
        if attempt.status in ATTEMPT_FINISHED or not attempt.latest:
            return True
        status = self._rollouts.status(attempt.rollout_id)
        return status in FINISHED and not (status == "failed" and attempt.status == "unresponsive")

    def adopt_config(self, rollout_id: str) -> None:
        """The limits of a rollout were changed: they hold for its latest attempt too."""
        attempt, config, now = self.latest(rollout_id), self._rollouts.config(rollout_id), self._clock()
        if attempt is None or attempt.status in ATTEMPT_FINISHED:
            return
        timeout_at = attempt.start_time + config.timeout_seconds if config.timeout_seconds else None
        attempt = attempt._replace(silence=config.unresponsive_seconds, timeout_at=timeout_at)
        self._journal.execute(
            "UPDATE attempts SET silence = ?, timeout_at = ? WHERE attempt_id = ?",
            (attempt.silence, timeout_at, attempt.attempt_id),
        )
        self._renew(attempt, now, silent_at=self._silent_at(attempt, now), heard=attempt.last_heartbeat_time)

    def _renew(self, attempt: LiveAttempt, now: float, silent_at: float | None, heard: float | None) -> None:
        """The lease begins anew."""
        attempt = attempt._replace(silent_at=silent_at)
        self._journal.execute(
            "UPDATE attempts SET last_heartbeat_time = ?, silent_at = ?, deadline = ? WHERE attempt_id = ?",
            (heard, silent_at, self._deadline(attempt, now), attempt.attempt_id),
        )

    @staticmethod
    def _silent_at(attempt: LiveAttempt, now: float) -> float | None:
        return now + attempt.silence if attempt.silence else None

    def _deadline(self, attempt: LiveAttempt, now: float) -> float | None:
        """When time ends the attempt, if nobody is heard from now on."""
        ends = [attempt.timeout_at]
        if attempt.status != "unresponsive":
            ends += [attempt.silent_at, now + self.lease_seconds if attempt.leased else None]
        deadline = min((end for end in ends if end is not None), default=None)
        self._rollouts.changes.deadline_set(deadline)
        return deadline

    # ending

    def update(self, rollout_id: str, attempt_id: str, values: dict[str, Any]) -> Row:
        """Change an attempt (or the "latest"): columns, and the status by the table of its changes.

        Raises:
            InvalidTransitionError: the table does not have this change, or it succeeds while calls are open.
        """
        found = self.latest(rollout_id) if attempt_id == "latest" else None
        attempt = found or self.get(rollout_id, attempt_id)
        columns = {name: value for name, value in values.items() if name not in ("status", "failure")}
        if columns:
            changes = ", ".join(f"{name} = ?" for name in columns)
            self._journal.execute(
                f"UPDATE attempts SET {changes} WHERE attempt_id = ?", (*columns.values(), attempt.attempt_id)
            )
            attempt = self._hand_over(attempt, columns)
        status, failure = values.get("status", attempt.status), values.get("failure")
        if failure is not None and status not in ("failed", "unresponsive", "timeout"):
            raise InvalidTransitionError(
                f"attempt {attempt.attempt_id}: a failure goes with a status of failure, not {status}"
            )
        if status != attempt.status:
            if status == "succeeded" and (n := self.count_open_calls(attempt.attempt_id)):
                raise InvalidTransitionError(
                    f"attempt {attempt.attempt_id} succeeds while {n} calls are open"
                )
            self.set_status(attempt, status, failure_of(failure))
        row = self._journal.one(f"SELECT {ATTEMPT} FROM attempts WHERE attempt_id = ?", (attempt.attempt_id,))
        assert row is not None, "it was there a moment ago"
        return row

    def _hand_over(self, attempt: LiveAttempt, columns: dict[str, Any]) -> LiveAttempt:
        """What follows when an attempt's worker or heartbeat was changed by hand."""
        now, before = self._clock(), attempt.worker_id
        attempt = self.get(attempt.rollout_id, attempt.attempt_id)
        if attempt.status in LIVE and {"worker_id", "last_heartbeat_time"} & columns.keys():
            self._renew(
                attempt, now, silent_at=self._silent_at(attempt, now), heard=attempt.last_heartbeat_time
            )
            if attempt.worker_id is not None:
                self._workers.busy(attempt.worker_id, now)
            if before is not None:
                self._workers.idle(before, now)
            self._rollouts.changes.queued |= (
                attempt.suspect and before != attempt.worker_id
            )  # that one may take another suspect
        return attempt

    def finish(self, rollout_id: str, attempt_id: str, values: dict[str, Any]) -> Row:
        """Decide an attempt and return its rollout; an attempt that was decided before stays as it is, and is counted.

        Raises:
            InvalidTransitionError: the status does not decide.
        """
        attempt = self.get(rollout_id, attempt_id)
        if values["status"] not in ATTEMPT_FINISHED:
            raise InvalidTransitionError(f"attempt {attempt_id}: {values['status']} does not finish it")
        if attempt.status in ATTEMPT_FINISHED:
            self._journal.count("attempts_late", by=attempt.status != values["status"])
        else:
            self.update(rollout_id, attempt_id, values)
        return self._rollouts.get(rollout_id)

    def set_status(
        self,
        attempt: LiveAttempt,
        status: AttemptStatus,
        failure: Failure | None = None,
        charged: bool = True,
    ) -> None:
        """Change an attempt's status, and let its rollout follow if it is the latest one.

        Args:
            charged: a failure of the infrastructure counts against the rollout's `infrastructure_retries`.
        """
        check_attempt(attempt.attempt_id, attempt.status, status)
        now = self._clock()
        deadline = (
            None if status in ATTEMPT_FINISHED else self._deadline(attempt._replace(status=status), now)
        )
        self._journal.execute(
            "UPDATE attempts SET status = ?, end_time = ?, failure = ?, deadline = ? WHERE attempt_id = ?",
            (
                status,
                now if status in ATTEMPT_FINISHED else None,
                failure_text(failure) if failure else None,
                deadline,
                attempt.attempt_id,
            ),
        )
        if status not in LIVE and attempt.worker_id:
            self._workers.idle(attempt.worker_id, now)
        if status in ATTEMPT_FINISHED and status != "succeeded":
            self._give_up_calls(attempt.attempt_id)
        if failure:
            self._journal.count(f"attempts_failed_{failure.kind}")
        infrastructure = failure is not None and failure.kind == "infrastructure"
        if attempt.suspect and status not in LIVE:
            self._rollouts.changes.queued = True  # its worker may take another suspect
            if not infrastructure and attempt.latest:
                self._rollouts.suspect(attempt.rollout_id, False)
        if attempt.latest:
            self._follow(attempt, status, infrastructure, charged)

    def _follow(
        self, attempt: LiveAttempt, status: AttemptStatus, infrastructure: bool, charged: bool
    ) -> None:
        """The rollout follows its latest attempt. Once that was given up (as unresponsive, or because the rollout was queued
        again or decided by hand), only its success changes the rollout, or a sign of life if it was thought unresponsive."""
        before, config, losses = self._rollouts.fate(attempt.rollout_id)
        given_up = attempt.status == "unresponsive" or before in FINISHED or before in WAITING
        revived = attempt.status == "unresponsive" and status in ("running", "succeeded")
        if given_up and not revived and not (before in WAITING and status == "succeeded"):
            return
        by = infrastructure - (revived and attempt.lost)  # what goes on after all was not lost
        if by:
            losses = Losses(max(losses.lost + by, 0), max(losses.charged + by * charged, 0))
        after = decide(status, attempt.sequence_id, infrastructure, losses, config)
        if after in ROLLOUT_TRANSITIONS[before]:
            if by:
                self._rollouts.set_losses(attempt.rollout_id, losses)
            self._rollouts.set_status(attempt.rollout_id, before, after)

    def _give_up_calls(self, attempt_id: str) -> None:
        """Calls of an attempt that ends without their records."""
        lost = self._journal.execute(
            "DELETE FROM calls WHERE attempt_id = ? AND generation IS NULL", (attempt_id,)
        ).rowcount
        self._journal.count("calls_lost", by=lost)
        self._rollouts.changes.closed |= lost > 0

    def count_open_calls(self, attempt_id: str) -> int:
        found = self._journal.one(
            "SELECT COUNT(*) FROM calls WHERE attempt_id = ? AND generation IS NULL", (attempt_id,)
        )
        return found[0] if found else 0

    # workers

    def release_worker(self, worker_id: str, why: str) -> int:
        """A worker is gone for good: all that it had is lost to the infrastructure. Returns how many attempts that were.

        One of these may have brought it down. As long as nobody knows which, none is charged for it and all are suspected; suspects
        are then leased one to a worker, and the next death charges that one alone. Whatever else the worker had then is suspected
        from now on: if it was one of these after all, it pays for the next death, and not another suspect.
        """
        self._workers.dismiss(worker_id)
        held = self._workers.held_by(worker_id)
        to_blame = [attempt for attempt in held if attempt.suspect] or held
        lost = Failure(kind="infrastructure", error=f"RunnerLost: {why}")
        for attempt in held:
            self._rollouts.suspect(attempt.rollout_id, True)
            self.set_status(attempt, "failed", lost, charged=to_blame == [attempt])
        self._rollouts.changes.queued = True  # its polls are to end
        return len(held)

    # the passing of time

    def recover(self) -> None:
        """After a restart: whoever worked meanwhile gets a whole lease, and a whole silence, to say so."""
        now = self._clock()
        for row in self._journal.execute(f"{LIVE_ATTEMPT} WHERE {WORKED_ON}").fetchall():
            attempt = LiveAttempt._make(row)
            self._renew(
                attempt, now, silent_at=self._silent_at(attempt, now), heard=attempt.last_heartbeat_time
            )

    def next_deadline(self) -> float | None:
        found = self._journal.one("SELECT MIN(deadline) FROM attempts WHERE deadline IS NOT NULL")
        return found[0] if found else None

    def expire(self) -> int:
        """End what is over its time; returns how many attempts that were."""
        now = self._clock()
        due = self._journal.execute(f"{LIVE_ATTEMPT} WHERE a.deadline <= ?", (now,)).fetchall()
        for row in due:
            attempt = LiveAttempt._make(row)
            self.set_status(attempt, *self._overdue(attempt, now))
        return len(due)

    def _overdue(self, attempt: LiveAttempt, now: float) -> tuple[AttemptStatus, Failure]:
        if attempt.timeout_at is not None and attempt.timeout_at <= now:
            error = (
                f"TimeoutError: the attempt took longer than {attempt.timeout_at - attempt.start_time:g} s"
            )
            return "timeout", Failure(kind="timeout", error=error)
        if attempt.silence is not None and attempt.silent_at is not None and attempt.silent_at <= now:
            error = f"Unresponsive: no span came for {attempt.silence:g} s"
            return "unresponsive", Failure(kind="unresponsive", error=error)
        error = f"LeaseExpired: {attempt.worker_id or 'whoever took it'} was not heard of for {self.lease_seconds:g} s"
        return "unresponsive", Failure(kind="infrastructure", error=error)
