"""Leases: how workers take attempts from the queue, keep them by heartbeats, and lose them.

No Ray, no network, no wall clock.

Laws:
- A dequeue is a lease: an attempt whose worker sends no heartbeat, span or call in time goes back to the
  queue.
- A client that lost a response and repeats a dequeue gets the same rollouts.
- Nothing is leased while serving is away.
- A worker leases one crash suspect at a time, so that its next crash identifies the rollout that caused it.
- A planned departure of a worker makes no suspect and charges no rollout.
- An attempt whose worker is gone is lost to the infrastructure, even if its timeout passed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from raylight.errors import WorkerGoneError
from raylight.store.rows import Row, new_id
from raylight.store.tables.attempts import Attempts
from raylight.store.tables.journal import Journal
from raylight.store.tables.outages import Outages
from raylight.store.tables.rollouts import Rollouts
from raylight.store.tables.run_clock import RunClock
from raylight.store.tables.transitions import IS_LIVE, AttemptState
from raylight.store.tables.workers import Workers
from raylight.types import ATTEMPT_FINISHED, FINISHED, LIVE, AttemptStatus, Failure


@dataclass(eq=False)
class Leases:
    """Leases of attempts, and their deadlines."""

    _journal: Journal
    _rollouts: Rollouts
    _attempts: Attempts
    _workers: Workers
    _outages: Outages
    _clock: RunClock

    # dequeuing

    def dequeue(self, worker_id: str | None, limit: int, request_id: str) -> list[Row]:
        """Lease up to `limit` waiting rollouts, oldest first, each with a new attempt; none while serving is
        away. Returns columns ROLLOUT_WITH_INPUT.

        Raises:
            WorkerGoneError: the worker was released.
        """
        if repeated := self.leased_by(request_id):
            return [self._rollouts.with_input(rollout_id) for rollout_id in repeated]
        if worker_id is not None and not self._workers.record_dequeue(worker_id):
            raise WorkerGoneError(
                f"the store has released {worker_id}, and its attempts went back to the queue; start another "
                "worker"
            )
        if self._outages.is_away:
            return []
        leased = self._rollouts.oldest_waiting(1, suspect=True)
        if leased and not self._may_lease_suspect(worker_id):  # this reads all attempts of the worker
            leased = []
        leased += self._rollouts.oldest_waiting(limit - len(leased))
        if leased and worker_id is not None:
            self._workers.mark_busy(worker_id, self._clock())
        return [
            self._attempts.begin(rollout_id, status, new_id("at"), worker_id, request_id)
            for rollout_id, status in leased
        ]

    def _may_lease_suspect(self, worker_id: str | None) -> bool:
        return worker_id is None or not any(attempt.suspect for attempt in self._held_by(worker_id))

    def can_dequeue(self, worker_id: str | None) -> bool:
        """True if a dequeue of this worker would return a rollout or raise."""
        if not self._rollouts.n_waiting or self._outages.is_away:
            return self._workers.is_released(worker_id)
        if self._rollouts.oldest_waiting(1) or self._workers.is_released(worker_id):
            return True
        return bool(self._rollouts.oldest_waiting(1, suspect=True)) and self._may_lease_suspect(worker_id)

    def leased_by(self, request_id: str) -> list[str]:
        """Rollouts that a dequeue request has leased and still holds."""
        rows = self._journal.execute(
            "SELECT a.rollout_id FROM attempts a JOIN rollouts r ON r.rollout_id = a.rollout_id WHERE "
            f"a.request_id = ? AND {IS_LIVE} AND a.sequence_id = r.n_attempts ORDER BY a.rowid",
            (request_id,),
        )
        return [rollout_id for (rollout_id,) in rows.fetchall()]

    def _held_by(self, worker_id: str) -> list[AttemptState]:
        """Attempts that a worker executes, oldest first."""
        return self._attempts.select(f"a.worker_id = ? AND {IS_LIVE} ORDER BY a.start_time", worker_id)

    # heartbeats

    def record_heartbeat(
        self, worker_id: str, stats: str | None, attempt_ids: list[str] | None
    ) -> tuple[Row, list[str]]:
        """Record a heartbeat; returns the worker and its obsolete attempts."""
        obsolete = self.renew_leases(worker_id, attempt_ids)
        return self._workers.record_heartbeat(worker_id, stats), obsolete

    def renew_leases(self, worker_id: str, attempt_ids: list[str] | None) -> list[str]:
        """Renew the leases of the attempts that a worker executes (None: of all that it holds).

        Returns the obsolete ones, which the worker should cancel.
        """
        now, obsolete = self._clock(), []
        if attempt_ids is None:
            attempt_ids = [attempt.attempt_id for attempt in self._held_by(worker_id)]
        for attempt_id in attempt_ids:
            found = self._attempts.select("a.attempt_id = ?", attempt_id)
            attempt = found[0] if found else None
            if attempt is None or self._is_obsolete(attempt):
                obsolete.append(attempt_id)
            elif attempt.status in LIVE:
                self._attempts.renew(attempt._replace(last_heartbeat_time=now))
        return obsolete

    def _is_obsolete(self, attempt: AttemptState) -> bool:
        """True if the attempt cannot affect its rollout.

        A rollout that failed because it was unresponsive may still recover.
        """
        if attempt.status in ATTEMPT_FINISHED or not attempt.latest:
            return True
        status = self._rollouts.status(attempt.rollout_id)
        return status in FINISHED and not (status == "failed" and attempt.status == "unresponsive")

    def retire_worker(self, worker_id: str) -> None:
        """Lease nothing more to a worker, and end its polls. It keeps the attempts that it executes."""
        self._workers.mark_released(worker_id)
        self._rollouts.events.queued = True  # ends the polls of this worker

    def release_worker(self, worker_id: str, reason: str, planned: bool = False) -> int:
        """Mark all attempts of a worker that is gone as lost to the infrastructure; returns their number.

        No rollout is charged for the planned departure of a worker. After a death:
        One of them may have crashed the worker. As long as it is unknown which, none is charged and all
        become suspects. A worker leases one suspect at a time, and its next crash charges that suspect alone.
        The other attempts of that worker become suspects too: if one of them was the cause after all, it pays
        for the next crash, not another suspect.
        """
        self.retire_worker(worker_id)
        held = self._held_by(worker_id)
        possible_causes = [] if planned else [attempt for attempt in held if attempt.suspect] or held
        name = "RunnerRemoved" if planned else "RunnerLost"
        lost = Failure(kind="infrastructure", error=f"{name}: {reason}")
        for attempt in held:
            if not planned:
                self._rollouts.set_suspect(attempt.rollout_id, True)
            self._attempts.set_status(attempt, "failed", lost, charged=possible_causes == [attempt])
        return len(held)

    # deadlines

    def renew_all(self) -> None:
        """Restart the leases of all live attempts.

        After a restart of the store, workers need time to send heartbeats again.
        """
        for attempt in self._attempts.select(IS_LIVE):
            self._attempts.renew_after_absence(attempt)

    def stop_time(self) -> None:
        """Stop the time of all deadlines, and restart the leases, because nothing can renew them."""
        self.renew_all()
        self._clock.stop()

    def continue_time(self) -> None:
        """Let the time of all deadlines go on."""
        self._clock.go_on()
        self._rollouts.events.add_deadline(self._clock.lived())  # the timer reads the deadlines again

    def next_deadline(self) -> float | None:
        """The earliest deadline of any attempt, or end of a rollout's delay, in seconds that the run has
        lived; None too while this time stands still."""
        if self._clock.is_stopped:
            return None
        row = self._journal.fetch_one("SELECT MIN(deadline) FROM attempts WHERE deadline IS NOT NULL")
        times = (row[0] if row else None, self._rollouts.next_release())
        return min((time for time in times if time is not None), default=None)

    def expire(self) -> int:
        """End the attempts whose deadline has passed, and the delays that are over; returns the number of
        attempts."""
        self._rollouts.release_held_back()
        now, ended = self._clock.lived(), 0
        for attempt in self._attempts.select("a.deadline <= ?", now):
            status, failure = self._expiry(attempt, now)
            is_over = status != "timeout" or self._is_obsolete(attempt)
            if is_over or not self._attempts.postpone_timeout(attempt):
                self._attempts.set_status(attempt, status, failure)
                ended += 1
        return ended

    def _expiry(self, attempt: AttemptState, now: float) -> tuple[AttemptStatus, Failure]:
        """Status and failure of an attempt whose deadline has passed.

        It is lost to the infrastructure if its lease ended first. Otherwise the most severe limit counts.
        """
        is_over = attempt.timeout_at is not None and attempt.timeout_at <= now
        if attempt.lost or attempt.deadline not in (attempt.timeout_at, attempt.unresponsive_at):
            worker = attempt.worker_id or "its worker"
            error = f"LeaseExpired: {worker} sent no heartbeat for {self._attempts.lease_s:g} s"
            return "failed" if is_over else "unresponsive", Failure(kind="infrastructure", error=error)
        if is_over:
            seconds = self._rollouts.config(attempt.rollout_id).timeout_seconds
            error = f"TimeoutError: the attempt took longer than {seconds:g} s"
            return "timeout", Failure(kind="timeout", error=error)
        error = f"Unresponsive: no span or call arrived for {attempt.unresponsive_seconds:g} s"
        return "unresponsive", Failure(kind="unresponsive", error=error)
