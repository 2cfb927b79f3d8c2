"""Sessions: attempts that agents outside the run execute. No Ray, no network, no wall clock.

A run offers places for sessions: rollouts in the queue whose task is not known yet. A session takes the
oldest place, and brings the task.

Laws:
- A place is taken by one session. A client that lost a response and repeats the request gets the same one.
- The sessions of a named group have the same task, and the places of one of the run's groups. A name that is
  used again when all its places are taken names another group.
- Nothing else takes over a session: it has no lease of a worker, and its own calls and heartbeats keep it.
"""

from __future__ import annotations

from raylight.errors import InvalidTransitionError, UnknownIdError
from raylight.store.payloads import decode_payload
from raylight.store.rows import ROLLOUT_STATE, Row
from raylight.store.tables.attempts import Attempts
from raylight.store.tables.journal import Journal
from raylight.store.tables.rollouts import Rollouts
from raylight.store.tables.run_clock import RunClock
from raylight.store.tables.transitions import AttemptState
from raylight.types import ATTEMPT_FINISHED, RolloutStatus

NAMED = "session:"
"""Beginning of the group id of places that a named group has taken; the id that they had before follows, then
a colon and the name."""
_NAME = f"substr(group_id, {len(NAMED) + 1} + instr(substr(group_id, {len(NAMED) + 1}), ':'))"
"""SQL expression of a named group's name."""


class Sessions:
    """Sessions in the journal."""

    def __init__(self, journal: Journal, rollouts: Rollouts, attempts: Attempts, clock: RunClock) -> None:
        self._journal = journal
        self._rollouts = rollouts
        self._attempts = attempts
        self._clock = clock

    def begin(self, session_id: str, task: bytes, group: str | None) -> Row | None:
        """Take the oldest free place for a session; None if there is none. Returns as `state` does.

        Args:
            session_id: id of the attempt, which the client generates.
            task: the encoded task.
            group: name of the session's group; None: it forms a group by itself.

        Raises:
            InvalidTransitionError: the group has another task.
        """
        if self._attempts.select("a.attempt_id = ?", session_id):
            return self.state(session_id)
        place = self._find_place(task, group)
        self._journal.increment("sessions_refused" if place is None else "sessions_begun")
        if place is None:
            return None
        self._attempts.begin(*place, session_id, None, None)
        return self.state(session_id)

    def _find_place(self, task: bytes, group: str | None) -> tuple[str, RolloutStatus] | None:
        named = f"group_id LIKE '{NAMED}%' AND {_NAME} = ?"
        if group is not None and (place := self._waiting(named, group)) is not None:
            rollout_id, status, _, known = place
            if decode_payload(known) != decode_payload(task):
                raise InvalidTransitionError(
                    f"the group {group!r} has another task; its sessions are compared with one another, so "
                    "give all of them the same task, or another group"
                )
            return rollout_id, status
        if (place := self._waiting("group_id NOT LIKE ?", f"{NAMED}%")) is None:
            return None
        rollout_id, status, group_id, _ = place
        if group is None:
            self._journal.execute("UPDATE rollouts SET input = ? WHERE rollout_id = ?", (task, rollout_id))
        else:
            self._journal.execute(
                "UPDATE rollouts SET input = ?, group_id = ? WHERE group_id = ? AND queue IS NOT NULL",
                (task, f"{NAMED}{group_id}:{group}", group_id),
            )
        return rollout_id, status

    def _waiting(self, condition: str, value: str) -> tuple[str, RolloutStatus, str, bytes] | None:
        """Id, status, group id and task of the oldest place in the queue that a condition selects."""
        return self._journal.fetch_one(
            "SELECT rollout_id, status, group_id, input FROM rollouts WHERE queue IS NOT NULL AND not_before "
            f"IS NULL AND suspect = 0 AND {condition} ORDER BY queue LIMIT 1",
            (value,),
        )

    def state(self, session_id: str) -> Row:
        """Columns ROLLOUT_STATE of a session's rollout with the session's own attempt, then the rollout's
        config and input, the time at which the session expires, and the numbers of its recorded calls and of
        the tokens that they sampled.

        Raises:
            UnknownIdError: the session does not exist.
        """
        row = self._journal.fetch_one(
            f"SELECT {ROLLOUT_STATE}, r.config, r.input, a.silent_at + ?, (SELECT COUNT(*) FROM calls c "
            "WHERE c.attempt_id = a.attempt_id AND c.generation IS NOT NULL), COALESCE((SELECT s.tokens + "
            "s.late FROM sampled s WHERE s.rollout_id = a.rollout_id AND s.attempt_id = a.attempt_id), 0) "
            "FROM attempts a JOIN rollouts r ON r.rollout_id = a.rollout_id WHERE a.attempt_id = ?",
            (self._clock() - self._clock.lived(), session_id),
        )
        if row is None:
            raise UnknownIdError(f"there is no session {session_id!r}")
        return row

    def renew(self, session_id: str) -> Row:
        """Renew a session that has not ended, also one that has expired. Returns as `state` does."""
        attempt = self._get(session_id)
        if attempt.status not in ATTEMPT_FINISHED:
            self._attempts.record_activity(attempt)
        return self.state(session_id)

    def _get(self, session_id: str) -> AttemptState:
        found = self._attempts.select("a.attempt_id = ?", session_id)
        if not found:
            raise UnknownIdError(f"there is no session {session_id!r}")
        return found[0]
