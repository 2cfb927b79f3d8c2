"""Table of the attempts: how they begin, change, end and decide their rollouts.

It has no Ray, no network and no wall clock. Laws:
- The latest attempt alone decides its rollout, and what a user decided by hand stays.
- An attempt succeeds only when every call that was opened for it has been closed.
- A client that lost a response and repeats the request gets the same response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raylight.errors import InvalidTransitionError, UnknownIdError
from raylight.store.rows import (
    ATTEMPT,
    N_STATE,
    ROLLOUT_METADATA,
    Row,
    config_from_json,
    failure_from_json,
    failure_json,
)
from raylight.store.tables.journal import Journal
from raylight.store.tables.rollouts import Rollouts
from raylight.store.tables.run_clock import RunClock
from raylight.store.tables.transitions import (
    HOLD,
    SELECT_STATE,
    AttemptState,
    InfrastructureLosses,
    backoff_seconds,
    check_attempt_transition,
    decide,
)
from raylight.store.tables.workers import Workers
from raylight.types import (
    ATTEMPT_FINISHED,
    FINISHED,
    LIVE,
    ROLLOUT_TRANSITIONS,
    WAITING,
    AttemptStatus,
    Failure,
    FailureKind,
    RolloutStatus,
)

TIMEOUT_GRACE_S = 10.0
"""Time after a timeout in which a runner, which may have to wait for its agent to stop, reports it."""


@dataclass(eq=False)
class Attempts:
    """Attempts in the journal."""

    _journal: Journal
    _rollouts: Rollouts
    _workers: Workers
    _clock: RunClock
    lease_s: float
    """Time that a dequeued attempt may go without a heartbeat, a span or a call."""

    # beginning

    def start_rollout(self, request: Row, attempt_id: str, worker_id: str | None) -> Row:
        """Add a rollout with a first attempt that the caller executes; the rollout is never queued.

        Raises:
            InvalidTransitionError: another rollout has this id.
        """
        if self._rollouts.insert(request, "preparing", self._rollouts.latest_resources()):
            return self._begin_by_hand(request[0], "preparing", attempt_id, worker_id)
        if self.find(request[0], attempt_id) is None:
            message = f"rollout {request[0]} exists; begin another attempt of it with start_attempt"
            raise InvalidTransitionError(message)
        return self._rollouts.state(request[0])

    def start_attempt(self, rollout_id: str, attempt_id: str, worker_id: str | None) -> Row:
        """Begin another attempt that the caller executes. The previous attempt no longer affects the rollout.

        Raises:
            InvalidTransitionError: the rollout is cancelled.
        """
        if self._journal.fetch_one("SELECT 1 FROM attempts WHERE attempt_id = ?", (attempt_id,)):
            return self._rollouts.state(rollout_id)
        if (before := self._rollouts.status(rollout_id)) == "cancelled":
            raise InvalidTransitionError(
                f"rollout {rollout_id} is cancelled; queue it again by update_rollout(status='requeuing')"
            )
        return self._begin_by_hand(rollout_id, before, attempt_id, worker_id)

    def _begin_by_hand(
        self, rollout_id: str, before: RolloutStatus, attempt_id: str, worker_id: str | None
    ) -> Row:
        """Add an attempt that was not dequeued; returns columns ROLLOUT_STATE."""
        if worker_id is not None:
            self._workers.mark_busy(worker_id, self._clock())
        return self.begin(rollout_id, before, attempt_id, worker_id, None)[:N_STATE]

    def begin(
        self,
        rollout_id: str,
        before: RolloutStatus,
        attempt_id: str,
        worker_id: str | None,
        request_id: str | None,
    ) -> Row:
        """Add an attempt of a rollout that had the status `before`; returns columns ROLLOUT_WITH_INPUT.

        Args:
            request_id: the dequeue that leases the attempt; None for an attempt that was started by hand,
                which has no lease because no other worker may take it over.
        """
        state, rest, sequence_id = self._rollouts.begin_attempt(rollout_id, before)
        start_time, now, config = self._clock(), self._clock.lived(), config_from_json(rest[0])
        own: tuple[str, str, int, AttemptStatus, str | None]
        own = (attempt_id, rollout_id, sequence_id, "preparing", worker_id)
        silence, timeout_s = config.unresponsive_seconds, config.timeout_seconds
        limits = (silence, timeout_s and now + timeout_s, silence and now + silence)
        attempt = AttemptState(*own, now, None, request_id is not None, *limits, None)
        self._journal.execute(
            "INSERT INTO attempts (attempt_id, rollout_id, sequence_id, status, worker_id, start_time, "
            "began, request_id, silence, timeout_at, silent_at, deadline) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, "
            "?, ?, ?)",
            (*own, start_time, now, request_id, *limits, self._deadline(attempt, now)),
        )
        self._journal.increment("total_attempts")
        return *state, *own, start_time, None, None, None, None, *rest

    # reading

    def get(self, rollout_id: str, attempt_id: str) -> AttemptState:
        """State of an attempt.

        Raises:
            UnknownIdError: the rollout does not exist, or has no such attempt.
        """
        attempt = self.find(rollout_id, attempt_id)
        if attempt is None:
            self._rollouts.status(rollout_id)  # raises if the rollout itself is unknown
            raise UnknownIdError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
        return attempt

    def get_or_latest(self, rollout_id: str, attempt_id: str) -> AttemptState:
        """State of an attempt, or of the "latest"; raises as `get` does."""
        latest = self.latest(rollout_id) if attempt_id == "latest" else None
        return latest or self.get(rollout_id, attempt_id)

    def find(self, rollout_id: str, attempt_id: str) -> AttemptState | None:
        """State of an attempt; None if the rollout has no such attempt."""
        return next(iter(self.select("a.attempt_id = ? AND a.rollout_id = ?", attempt_id, rollout_id)), None)

    def latest(self, rollout_id: str) -> AttemptState | None:
        """State of a rollout's latest attempt; None if it has had none."""
        return next(iter(self.select("r.rollout_id = ? AND a.sequence_id = r.n_attempts", rollout_id)), None)

    def select(self, condition: str, *values: object) -> list[AttemptState]:
        """States of the attempts that an SQL condition selects."""
        rows = self._journal.execute(f"{SELECT_STATE} WHERE {condition}", values).fetchall()
        return [AttemptState._make(row) for row in rows]

    def count_open_calls(self, attempt_id: str) -> int:
        """Number of the attempt's calls whose end has not been recorded."""
        is_open = "SELECT COUNT(*) FROM calls WHERE attempt_id = ? AND generation IS NULL"
        row = self._journal.fetch_one(is_open, (attempt_id,))
        return row[0] if row else 0

    # liveness

    def record_activity(self, attempt: AttemptState) -> None:
        """Renew an attempt's lease because a span or a call arrived, and store its next sequence id; it is
        running, even if it was considered unresponsive."""
        if attempt.status in ATTEMPT_FINISHED:
            self.set_next_sequence_id(attempt.attempt_id, attempt.next_sequence_id)
            return
        if attempt.status != "running":
            self._journal.increment("attempts_revived", by=attempt.status == "unresponsive")
            self.set_status(attempt, "running")
        self.renew_fully(attempt._replace(status="running", last_heartbeat_time=self._clock()))

    def apply_config(self, rollout_id: str) -> None:
        """Apply the changed limits of a rollout to its latest attempt."""
        attempt, config = self.latest(rollout_id), self._rollouts.config(rollout_id)
        if attempt is None or attempt.status in ATTEMPT_FINISHED:
            return
        timeout_at = attempt.began + config.timeout_seconds if config.timeout_seconds else None
        attempt = attempt._replace(unresponsive_seconds=config.unresponsive_seconds, timeout_at=timeout_at)
        self.renew_fully(attempt)

    def renew_fully(self, attempt: AttemptState) -> None:
        """Restart both clocks of an attempt: its lease and its time until it is unresponsive."""
        silent_at = attempt.unresponsive_seconds and self._clock.lived() + attempt.unresponsive_seconds
        self.renew(attempt._replace(unresponsive_at=silent_at))

    def renew(self, attempt: AttemptState) -> None:
        """Restart the lease of an attempt, and store its limits, its heartbeat and its next sequence id."""
        self._journal.execute(
            "UPDATE attempts SET last_heartbeat_time = ?, silence = ?, timeout_at = ?, silent_at = ?, "
            "deadline = ?, next_span = ? WHERE attempt_id = ?",
            (
                attempt.last_heartbeat_time,
                attempt.unresponsive_seconds,
                attempt.timeout_at,
                attempt.unresponsive_at,
                self._deadline(attempt, self._clock.lived()),
                attempt.next_sequence_id,
                attempt.attempt_id,
            ),
        )

    def renew_after_absence(self, attempt: AttemptState) -> None:
        """Restart both clocks of an attempt after a time in which nothing could renew them.

        Of a leased attempt the lease ends first: if its worker is gone, the infrastructure has lost it. A
        worker that is alive reports a timeout itself.
        """
        if not attempt.leased:
            self.renew_fully(attempt)
            return
        now = self._clock.lived()
        ends = (attempt.timeout_at, attempt.unresponsive_seconds and now + attempt.unresponsive_seconds)
        timeout_at, silent_at = (end and max(end, now + 2 * self.lease_s) for end in ends)
        self.renew(attempt._replace(timeout_at=timeout_at, unresponsive_at=silent_at))

    def postpone_timeout(self, attempt: AttemptState) -> bool:
        """Give the runner of a leased attempt TIMEOUT_GRACE_S to report a timeout; False if it had them.

        Its report has the last spans and rewards, and the rollout's metadata.
        """
        seconds = self._rollouts.config(attempt.rollout_id).timeout_seconds or 0
        is_first = attempt.timeout_at == attempt.began + seconds
        if not (attempt.leased and is_first and self._workers.is_runner(attempt.worker_id)):
            return False
        end, silent_at = self._clock.lived() + TIMEOUT_GRACE_S, attempt.unresponsive_at
        if attempt.status in LIVE:
            silent_at = silent_at and max(silent_at, end)
        self.renew(attempt._replace(timeout_at=end, unresponsive_at=silent_at))
        return True

    def set_next_sequence_id(self, attempt_id: str, sequence_id: int) -> None:
        """Store the sequence id of an attempt's next span."""
        self._journal.execute(
            "UPDATE attempts SET next_span = ? WHERE attempt_id = ?", (sequence_id, attempt_id)
        )

    def _deadline(self, attempt: AttemptState, now: float) -> float | None:
        """Time at which the attempt ends unless activity or a heartbeat renews it."""
        ends = [attempt.timeout_at]
        if attempt.status != "unresponsive":
            ends += [attempt.unresponsive_at, now + self.lease_s if attempt.leased else None]
        deadline = min((end for end in ends if end is not None), default=None)
        self._rollouts.events.add_deadline(deadline)
        return deadline

    # changing and ending

    def update(self, rollout_id: str, attempt_id: str, values: dict[str, Any]) -> Row:
        """Change columns of an attempt (or of the "latest"); a status changes as ATTEMPT_TRANSITIONS allows.

        Raises:
            InvalidTransitionError: the table does not allow the change, or calls are open at a success.
        """
        attempt = self.get_or_latest(rollout_id, attempt_id)
        self._change(attempt, values)
        row = self._journal.fetch_one(
            f"SELECT {ATTEMPT} FROM attempts WHERE attempt_id = ?", (attempt.attempt_id,)
        )
        assert row is not None, "the attempt was read above"
        return row

    def _change(self, attempt: AttemptState, values: dict[str, Any]) -> None:
        """Change columns of an attempt as `update` does."""
        others = ("status", "failure", ROLLOUT_METADATA)
        columns = {name: value for name, value in values.items() if name not in others}
        if columns:
            changes = ", ".join(f"{name} = ?" for name in columns)
            self._journal.execute(
                f"UPDATE attempts SET {changes} WHERE attempt_id = ?", (*columns.values(), attempt.attempt_id)
            )
            attempt = self._apply_worker_change(attempt, columns)
        status, failure = values.get("status", attempt.status), values.get("failure")
        if failure is not None and status not in ("failed", "unresponsive", "timeout"):
            raise InvalidTransitionError(
                f"attempt {attempt.attempt_id}: a failure requires the status failed, unresponsive or "
                f"timeout, not {status}"
            )
        if status != attempt.status:
            if status == "succeeded" and (n := self.count_open_calls(attempt.attempt_id)):
                raise InvalidTransitionError(
                    f"attempt {attempt.attempt_id} cannot succeed while {n} calls are open; finish_attempt "
                    "waits for them"
                )
            self.set_status(attempt, status, failure_from_json(failure), reported=True)

    def _apply_worker_change(self, attempt: AttemptState, columns: dict[str, Any]) -> AttemptState:
        """Renew the lease and update both workers after a user changed an attempt's worker or heartbeat."""
        now, previous_worker = self._clock(), attempt.worker_id
        attempt = self.get(attempt.rollout_id, attempt.attempt_id)
        if attempt.status in LIVE and {"worker_id", "last_heartbeat_time"} & columns.keys():
            self.renew_fully(attempt)
            if attempt.worker_id is not None:
                self._workers.mark_busy(attempt.worker_id, now)
            if previous_worker is not None:
                self._workers.mark_idle(previous_worker, now)
            # the previous worker may lease another suspect now
            self._rollouts.events.queued |= attempt.suspect and previous_worker != attempt.worker_id
        return attempt

    def finish(self, attempt: AttemptState, values: dict[str, Any]) -> Row:
        """Decide an attempt and return its rollout.

        An attempt that was decided before is unchanged, and counted as late.

        Raises:
            InvalidTransitionError: the status is not final.
        """
        if values["status"] not in ATTEMPT_FINISHED:
            allowed, which = ", ".join(sorted(ATTEMPT_FINISHED)), f"attempt {attempt.attempt_id}"
            raise InvalidTransitionError(
                f"{which}: {values['status']} does not finish it; use one of {allowed}"
            )
        before = self._rollouts.status(attempt.rollout_id)
        if attempt.status in ATTEMPT_FINISHED:
            self._journal.increment("attempts_late", by=attempt.status != values["status"])
            decides = self._has_decided_by_timeout(attempt)
        else:
            self._change(attempt, values)
            unresponsive = before == "failed" and attempt.status == "unresponsive"
            ends = self._rollouts.status(attempt.rollout_id) in FINISHED
            decides = attempt.latest and ends and (before not in FINISHED or unresponsive)
        if decides and ROLLOUT_METADATA in values:
            self._rollouts.update(attempt.rollout_id, {"metadata": values[ROLLOUT_METADATA]})
        return self._rollouts.state(attempt.rollout_id)

    def _has_decided_by_timeout(self, attempt: AttemptState) -> bool:
        """True if the rollout failed at the very moment at which the attempt timed out."""
        if attempt.status != "timeout" or not attempt.latest:
            return False
        row = self._journal.fetch_one(
            "SELECT r.end_time = a.end_time FROM attempts a JOIN rollouts r USING (rollout_id) WHERE "
            "a.attempt_id = ? AND r.status = 'failed'",
            (attempt.attempt_id,),
        )
        return row == (1,)

    def set_status(
        self,
        attempt: AttemptState,
        status: AttemptStatus,
        failure: Failure | None = None,
        charged: bool = True,
        reported: bool = False,
    ) -> None:
        """Change the status of an attempt, and of its rollout if this is the latest attempt; store its next
        sequence id and its last heartbeat.

        Args:
            charged: a failure of the infrastructure counts against the rollout's `infrastructure_retries`.
            reported: the attempt itself reports its end. If a service failed, its rollout is held back for a
                while; a rollout whose worker was lost can go to another worker at once.
        """
        check_attempt_transition(attempt.attempt_id, attempt.status, status)
        now, lived, finished = self._clock(), self._clock.lived(), status in ATTEMPT_FINISHED
        self._journal.execute(
            "UPDATE attempts SET status = ?, end_time = ?, ended = ?, failure = ?, deadline = ?, "
            "next_span = ?, last_heartbeat_time = ? WHERE attempt_id = ?",
            (
                status,
                now if finished else None,
                lived if finished else None,
                failure_json(failure) if failure else None,
                None if finished else self._deadline(attempt._replace(status=status), lived),
                attempt.next_sequence_id,
                attempt.last_heartbeat_time,
                attempt.attempt_id,
            ),
        )
        if status not in LIVE and attempt.worker_id:
            self._workers.mark_idle(attempt.worker_id, now)
        if finished and status != "succeeded":
            self._drop_open_calls(attempt.attempt_id)
        if failure and not (attempt.lost and failure.kind == "infrastructure"):  # counted before
            self._journal.increment(f"attempts_failed_{failure.kind}")
        kind = failure.kind if failure else None
        if attempt.suspect and status not in LIVE:
            self._rollouts.events.queued = True  # its worker may lease another suspect
            if kind != "infrastructure" and attempt.latest:
                self._rollouts.set_suspect(attempt.rollout_id, False)
        if attempt.latest:
            self._update_rollout(attempt, status, kind, charged, reported, now)

    def _update_rollout(
        self,
        attempt: AttemptState,
        status: AttemptStatus,
        failure: FailureKind | None,
        charged: bool,
        reported: bool,
        now: float,
    ) -> None:
        """Let a rollout follow its latest attempt.

        An attempt that was given up (it is unresponsive, or the rollout was queued again or decided by hand)
        changes the rollout only by its success, or by activity if it was unresponsive.
        """
        before, config, losses = self._rollouts.decision_inputs(attempt.rollout_id)
        given_up = attempt.status == "unresponsive" or before in FINISHED or before in WAITING
        revived = attempt.status == "unresponsive" and status in ("running", "succeeded")
        if given_up and not revived and not (before in WAITING and status == "succeeded"):
            if before in FINISHED and status in ATTEMPT_FINISHED:  # nothing revives it any more
                self._rollouts.events.decided.add(attempt.rollout_id)
            return
        infrastructure = failure == "infrastructure"
        change = infrastructure - (revived and attempt.lost)  # a revived attempt was not lost
        if change:
            losses = InfrastructureLosses(
                max(losses.lost + change, 0), max(losses.charged + change * charged, 0)
            )
        after = decide(status, attempt.sequence_id, failure, losses, config)
        if after in ROLLOUT_TRANSITIONS[before]:
            if change:
                self._rollouts.set_losses(attempt.rollout_id, losses)
                self._journal.execute(
                    "UPDATE attempts SET charged = ? WHERE attempt_id = ?",
                    (change > 0 and charged, attempt.attempt_id),
                )
            delay = 0.0
            if infrastructure and reported and after == "requeuing":
                delay = backoff_seconds(losses.charged, attempt.attempt_id)
            self._rollouts.set_status(attempt.rollout_id, before, after, now, delay)

    def _drop_open_calls(self, attempt_id: str) -> None:
        """Delete the open calls of an attempt that ended without their records."""
        dropped = self._journal.execute(
            "DELETE FROM calls WHERE attempt_id = ? AND generation IS NULL RETURNING call_id", (attempt_id,)
        ).fetchall()
        lost = sum(not call_id.startswith(HOLD) for (call_id,) in dropped)
        self._journal.increment("calls_lost", by=lost)
        self._rollouts.events.calls_closed |= bool(dropped)
