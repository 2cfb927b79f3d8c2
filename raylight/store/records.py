"""Tables of what attempts record: spans, and calls to the engine with their generations.

Laws:
- A span or a call that arrives twice is stored once.
- The sequence ids of an attempt's spans only grow.
- The spans of an attempt are bounded in number. Those with a reward have a bound of their own, and an attempt
  over it fails, because rewards were dropped.
- The record of a call belongs to the attempt that opened it, and to no other.
- Records for a decided attempt are counted as late, never attributed to the next attempt.
- A call or a span is stored only after its base, which then never changes.
- The tokens of a call are counted with its record, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raylight.errors import UnknownIdError
from raylight.store.attempt_state import AttemptState
from raylight.store.attempts import Attempts
from raylight.store.journal import Journal
from raylight.store.rollouts import Rollouts
from raylight.store.rows import BASE, REWARD, SPAN, SPAN_ID, Row, failure_json
from raylight.types import ATTEMPT_FINISHED, FINISHED, MAX_REWARD_SPANS, MAX_SPANS, Failure

OpenedCall = tuple[str, str, str, float, str, str]
"""`(rollout_id, attempt_id, call_id, start_time, recorder, request)`."""
ClosedCall = tuple[str, str, str, str | None, int, bytes | None, int, Row | None]
"""`(rollout_id, attempt_id, call_id, base, shared, generation, tokens, span)`; the generation is None if
nothing was sampled, the span if there is none. `tokens` is the number of sampled ones; CALL explains `base`
and `shared`."""
CallIds = tuple[str, str, str]
"""`(rollout_id, attempt_id, call_id)`."""
_ADD_SPAN = (
    f"INSERT INTO spans ({SPAN}) VALUES ({', '.join('?' * len(SPAN.split(', ')))}) ON CONFLICT "
    "(attempt_id, span_id) DO NOTHING"
)
_OPEN_WITH_BASES = (
    "WHERE attempt_id = ? AND call_id = ? AND generation IS NULL AND (? IS NULL OR EXISTS (SELECT 1 FROM "
    "calls WHERE attempt_id = ? AND call_id = ? AND generation IS NOT NULL)) AND (? IS NULL OR EXISTS ("
    "SELECT 1 FROM spans WHERE attempt_id = ? AND span_id = ? AND base IS NOT NULL))"
)
"""SQL condition of an open call whose bases are stored. The base of its span must be the span of a captured
call, because an agent may have written a span with any id."""
_CLOSE_CALL = f"UPDATE calls SET base = ?, shared = ?, generation = ? {_OPEN_WITH_BASES}"
_DELETE_OPEN_CALL = f"DELETE FROM calls {_OPEN_WITH_BASES}"
_COUNT_TOKENS = (
    "INSERT INTO sampled SELECT ?1, ?2, iif(decided, 0, ?3), iif(decided, ?3, 0) FROM (SELECT status IN "
    f"({', '.join(map(repr, sorted(FINISHED)))}) AS decided FROM rollouts WHERE rollout_id = ?1) WHERE true "
    "ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens, late = late + excluded.late"
)


@dataclass
class Room:
    """Numbers of spans without and with a reward that an attempt may still store."""

    spans: int
    rewards: int

    def fits(self, rewarded: bool) -> bool:
        """Return True if there is room for a span."""
        return (self.rewards if rewarded else self.spans) > 0

    def take(self, rewarded: bool) -> None:
        """Reduce the room by that of a stored span."""
        if rewarded:
            self.rewards -= 1
        else:
            self.spans -= 1


class Records:
    """Spans and calls in the journal."""

    def __init__(self, journal: Journal, rollouts: Rollouts, attempts: Attempts) -> None:
        self._journal = journal
        self._rollouts = rollouts
        self._attempts = attempts
        self._lost_recorders: set[str] = set()
        """Kept in memory only: after a restart of the store, the open calls of a lost recorder run into their
        time limit."""

    # spans

    def add_spans(self, spans: list[Row], bounded: bool = True) -> list[int | None]:
        """Store spans (columns SPAN); returns the sequence id of each, or None for one that is not stored: a
        duplicate, or one over the capacity of its attempt.

        Args:
            bounded: False exempts the spans of captured calls, which conversations are read from.

        Raises:
            UnknownIdError: a span names an unknown attempt; no span was stored.
        """
        attempts: dict[tuple[str, str], AttemptState] = {}
        next_ids: dict[str, int] = {}
        sequence_ids: list[int | None] = []
        rooms: dict[str, Room] = {}
        dropped = 0
        for span in spans:
            rollout_id, attempt_id, given_id = span[:3]
            if (rollout_id, attempt_id) not in attempts:
                attempt = attempts[rollout_id, attempt_id] = self._attempts.get(rollout_id, attempt_id)
                next_ids[attempt_id] = attempt.next_sequence_id
                if bounded:
                    rooms[attempt_id] = self._room(attempt, len(spans))
            rewarded = span[REWARD] is not None
            if bounded and not rooms[attempt_id].fits(rewarded):
                dropped += 1
                sequence_ids.append(None)
                continue
            sequence_id = given_id or next_ids[attempt_id]
            late = attempts[rollout_id, attempt_id].status in ATTEMPT_FINISHED
            if late:  # the reward of a decided attempt does not change
                span = (*span[:REWARD], None, *span[REWARD + 1 :])
            if self._journal.execute(_ADD_SPAN, (rollout_id, attempt_id, sequence_id, *span[3:])).rowcount:
                next_ids[attempt_id] = max(next_ids[attempt_id], sequence_id + 1)
                sequence_ids.append(sequence_id)
                if bounded:  # a duplicate takes no room
                    rooms[attempt_id].take(rewarded)
                self._journal.increment("spans_late", by=late)
            else:
                sequence_ids.append(None)
        for attempt in attempts.values():
            self._attempts.record_activity(attempt._replace(next_sequence_id=next_ids[attempt.attempt_id]))
        added = sum(sequence_id is not None for sequence_id in sequence_ids)
        self._journal.increment("total_spans", by=added)
        self._journal.increment("spans_duplicate", by=len(spans) - added - dropped)
        self._journal.increment("spans_dropped", by=dropped)
        return sequence_ids

    def _room(self, attempt: AttemptState, n_new: int) -> Room:
        """Room of an attempt for `n_new` more spans."""
        stored = attempt.next_sequence_id - 1
        rewards = self._count_rewards(attempt.attempt_id) if stored else 0
        if stored + n_new > MAX_SPANS:  # ids may have gaps; counting takes a millisecond
            row = self._journal.fetch_one(
                "SELECT COUNT(*) FROM spans WHERE rollout_id = ? AND attempt_id = ?",
                (attempt.rollout_id, attempt.attempt_id),
            )
            stored = row[0] if row else 0
        return Room(MAX_SPANS - (stored - rewards), MAX_REWARD_SPANS + 1 - rewards)

    def _count_rewards(self, attempt_id: str) -> int:
        """Number of spans with a reward. At most one more than allowed is stored, which shows the excess."""
        row = self._journal.fetch_one(
            "SELECT COUNT(*) FROM spans WHERE attempt_id = ? AND reward IS NOT NULL", (attempt_id,)
        )
        return row[0] if row else 0

    def check_rewards(self, attempt_id: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return the final values of an attempt: a failure instead of a success if rewards were dropped."""
        if values["status"] != "succeeded" or self._count_rewards(attempt_id) <= MAX_REWARD_SPANS:
            return values
        lost = Failure(
            kind="reward",
            error=f"RewardError: the attempt has more than {MAX_REWARD_SPANS} spans with a reward, and the "
            "later ones were dropped; emit fewer rewards",
        )
        return values | {"status": "failed", "failure": failure_json(lost)}

    def next_sequence_ids(self, attempts: list[tuple[str, str]]) -> list[int]:
        """Reserve the next sequence id of each attempt; an attempt that is listed twice gets two."""
        sequence_ids = []
        for rollout_id, attempt_id in attempts:
            sequence_ids.append(self._attempts.get(rollout_id, attempt_id).next_sequence_id)
            self._attempts.set_next_sequence_id(attempt_id, sequence_ids[-1] + 1)
        return sequence_ids

    # calls

    def open_calls(self, calls: list[OpenedCall]) -> list[CallIds]:
        """Record that calls to the engine began, which counts as activity of their attempts.

        Returns the calls of decided or unknown attempts, which are counted as late. A call that is announced
        again is unchanged.
        """
        rejected: list[CallIds] = []
        for rollout_id, attempt_id, call_id, start, recorder, request in calls:
            attempt = self._undecided_attempt(rollout_id, attempt_id)
            if attempt is None or recorder in self._lost_recorders:
                self._journal.increment("calls_late")
                rejected.append((rollout_id, attempt_id, call_id))
                continue
            self._journal.execute(
                "INSERT INTO calls (call_id, rollout_id, attempt_id, start_time, recorder, request) VALUES "
                "(?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (call_id, rollout_id, attempt_id, start, recorder, request),
            )
            if self._lost_recorders:
                self._drop_retried_calls("calls.attempt_id = ?", (attempt_id,))
            self._attempts.record_activity(attempt)
        return rejected

    def lose_recorder(self, recorder: str) -> None:
        """Stop waiting for the records of a recorder that is gone."""
        self._lost_recorders.add(recorder)
        self._drop_retried_calls("calls.recorder = ?", (recorder,))
        self._rollouts.events.calls_closed = True

    def count_awaited_calls(self, attempt_id: str) -> int:
        """Number of open calls of an attempt whose recorder may still record their end."""
        rows = self._journal.execute(
            "SELECT recorder FROM calls WHERE attempt_id = ? AND generation IS NULL", (attempt_id,)
        )
        return sum(recorder not in self._lost_recorders for (recorder,) in rows)

    def _drop_retried_calls(self, condition: str, values: tuple[str, ...]) -> None:
        """Delete open calls of lost recorders that the agent retried elsewhere: it never received a response
        to them."""
        lost = sorted(self._lost_recorders)
        dropped = self._journal.execute(
            f"DELETE FROM calls WHERE {condition} AND generation IS NULL AND recorder IN "
            f"({', '.join('?' * len(lost))}) AND EXISTS (SELECT 1 FROM calls AS retry WHERE retry.attempt_id "
            "= calls.attempt_id AND retry.request = calls.request AND retry.request != '' AND "
            "retry.recorder != calls.recorder AND retry.start_time >= calls.start_time)",
            (*values, *lost),
        ).rowcount
        self._journal.increment("calls_repeated", by=dropped)

    def close_calls(self, calls: list[ClosedCall]) -> tuple[list[CallIds], list[CallIds]]:
        """Record that calls ended, each with what it sampled.

        A call that is not open (any more) is counted as late. A call without tokens may have a span: it
        failed, or its model runs elsewhere.

        Returns the calls whose base is not stored, which stay open until they are sent completely, and those
        that are not open, which nothing may have as its base.
        """
        without_base: list[CallIds] = []
        ignored: list[CallIds] = []
        unusable: set[tuple[str, str | None]] = set()
        for rollout_id, attempt_id, call_id, base, shared, generation, tokens, span in calls:
            ids, key = (rollout_id, attempt_id, call_id), (attempt_id, call_id)
            span_base = span[BASE] or None if span else None
            condition = (*key, base, attempt_id, base, span_base, attempt_id, span_base)
            if not unusable.isdisjoint({(attempt_id, base), (attempt_id, span_base)}):
                closed = 0
            elif generation is None:
                closed = self._journal.execute(_DELETE_OPEN_CALL, condition).rowcount
            else:
                closed = self._journal.execute(_CLOSE_CALL, (base, shared, generation, *condition)).rowcount
            if closed:
                self._journal.increment("generations", by=generation is not None)
                if tokens:
                    self._journal.execute(_COUNT_TOKENS, (rollout_id, attempt_id, tokens))
                if span is not None:
                    self.add_spans([span], bounded=False)
            elif (is_open := self._is_open(key)) is True:
                without_base.append(ids)
                continue
            else:  # closed before, by the message that a client repeats, or late
                self._journal.increment("generations_late", by=is_open is None and generation is not None)
                ignored.append(ids)
                unusable |= {key, *([(attempt_id, span[SPAN_ID])] if span else [])}
            self._rollouts.events.calls_closed = True
        return without_base, ignored

    def _is_open(self, key: tuple[str, str]) -> bool | None:
        """Return True for an open call, False for a recorded one, and None for one that is not stored."""
        row = self._journal.fetch_one(
            "SELECT generation IS NULL FROM calls WHERE attempt_id = ? AND call_id = ?", key
        )
        return None if row is None else bool(row[0])

    def _undecided_attempt(self, rollout_id: str, attempt_id: str) -> AttemptState | None:
        """The attempt; None if it is unknown or decided."""
        try:
            attempt = self._attempts.get(rollout_id, attempt_id)
        except UnknownIdError:
            return None
        return None if attempt.status in ATTEMPT_FINISHED else attempt
