"""Outages of serving: while a model's ingress or every replica is away, no rollout is dequeued or charged.

No Ray, no network, no wall clock.

Laws:
- While a source is away, no attempt begins.
- Every leased attempt that overlaps an outage is lost to the infrastructure, however it ended. An agent may
  have swallowed a connection error and returned a reward of 0.
- A loss to an outage is never charged, and the rollout returns to the queue without delay.
- What a user decided by hand or cancelled stays.
"""

from __future__ import annotations

import functools

from raylight.store.rows import failure_json
from raylight.store.tables.attempts import Attempts
from raylight.store.tables.journal import Journal
from raylight.store.tables.rollouts import Rollouts
from raylight.store.tables.run_clock import RunClock
from raylight.store.tables.transitions import IS_LIVE, AttemptState, InfrastructureLosses
from raylight.types import AttemptStatus, Failure, RolloutStatus

UNDONE: dict[AttemptStatus, frozenset[RolloutStatus]] = {
    "succeeded": frozenset({"succeeded"}),
    "failed": frozenset({"failed", "requeuing"}),
    "timeout": frozenset({"failed", "requeuing"}),
    "unresponsive": frozenset({"failed", "requeuing"}),
}
"""Statuses of a rollout that its latest attempt decided; a rollout in another one was decided by hand."""
LOST_IN_OUTAGE = "ServingAway"
"""First word of the failure of an attempt that overlapped an outage."""


class Outages:
    """The sources that are away, such as the served model of a run.

    They are kept in memory only: the reporter repeats each report while the outage lasts. A report whose
    transaction is undone leaves no trace, so that its repetition has the effect.
    """

    def __init__(self, journal: Journal, rollouts: Rollouts, attempts: Attempts, clock: RunClock) -> None:
        self._journal = journal
        self._rollouts = rollouts
        self._attempts = attempts
        self._clock = clock
        self._since: dict[str, float] = {}
        """Begin of the outage of each source that is away, in seconds that the run has lived."""

    @property
    def is_away(self) -> bool:
        """True while any source is away."""
        return bool(self._since)

    def report(self, source: str, since: float | None, reason: str) -> int:
        """Record that a source is away or back; returns the number of attempts that are lost to it.

        A report that repeats the last one changes nothing.

        Args:
            since: monotonic time of this machine at which the source was last known to be reachable; None if
                it is back.
        """
        if since is None:
            if (began := self._since.get(source)) is not None:
                self._set_since({name: at for name, at in self._since.items() if name != source})
                self._journal.increment("outage_seconds", by=round(self._clock.lived() - began))
                self._rollouts.events.queued = True
            return 0
        if source in self._since:
            return 0
        began = max(self._clock.lived_at(since), self._clock.resumed_at)
        self._set_since(self._since | {source: began})
        self._journal.increment("outages")
        return self._lose_attempts(began, f"{LOST_IN_OUTAGE}: {reason}")

    def _set_since(self, since: dict[str, float]) -> None:
        self._journal.on_undo(functools.partial(setattr, self, "_since", self._since))
        self._since = since

    def _lose_attempts(self, since: float, error: str) -> int:
        """Give up the attempts that ran after `since`, and queue their rollouts again."""
        failure = Failure(kind="infrastructure", error=error)
        running = self._attempts.select(f"a.request_id IS NOT NULL AND {IS_LIVE} ORDER BY a.rowid")
        ended = self._attempts.select(
            "a.request_id IS NOT NULL AND (a.ended >= ? OR (a.status = 'unresponsive' AND a.silent_at >= "
            "?)) ORDER BY a.rowid",
            since,
            since,
        )
        lost = [attempt for attempt in ended if self._lose_ended(attempt, failure)]
        for attempt in running:
            self._attempts.set_status(attempt, "failed", failure, charged=False)
        self._journal.increment("attempts_lost_in_outages", by=len(running) + len(lost))
        return len(running) + len(lost)

    def _lose_ended(self, attempt: AttemptState, failure: Failure) -> bool:
        """Undo the end of an attempt; False if there is nothing to undo."""
        status, _, losses = self._rollouts.decision_inputs(attempt.rollout_id)
        if attempt.lost and not attempt.charged:
            return False
        if attempt.latest and status not in UNDONE[attempt.status]:
            return False
        if attempt.status == "unresponsive":
            self._attempts.set_status(attempt, "failed", failure, charged=False)
        else:
            self._journal.execute(
                "UPDATE attempts SET status = 'failed', failure = ? WHERE attempt_id = ?",
                (failure_json(failure), attempt.attempt_id),
            )
            self._journal.increment("attempts_failed_infrastructure", by=not attempt.lost)
        self._journal.execute("UPDATE attempts SET charged = 0 WHERE attempt_id = ?", (attempt.attempt_id,))
        self._rollouts.set_losses(
            attempt.rollout_id,
            InfrastructureLosses(losses.lost + (not attempt.lost), max(losses.charged - attempt.charged, 0)),
        )
        if attempt.latest:
            self._rollouts.set_status(attempt.rollout_id, status, "requeuing", self._clock())
        return True
