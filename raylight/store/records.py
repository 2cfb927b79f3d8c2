"""What attempts leave behind in the journal: spans, and the calls to the engine with their generations.

Laws: a span or a call that comes twice is kept once; the sequence ids of an attempt's spans only grow; the record of a call belongs
to the attempt that opened it and to no other; what comes for an attempt that is decided is counted, never mixed into the next one.
"""

from __future__ import annotations

from raylight.errors import UnknownIdError
from raylight.store.attempts import Attempts, LiveAttempt
from raylight.store.journal import Journal
from raylight.store.rollouts import Rollouts
from raylight.store.rows import SPAN, Row
from raylight.types import ATTEMPT_FINISHED

OpenedCall = tuple[str, str, str, float, str, str]
"""`(rollout_id, attempt_id, call_id, start_time, recorder, request)`."""
ClosedCall = tuple[str, str, str, bytes | None, Row | None]
"""`(rollout_id, attempt_id, call_id, generation, span)`; None where nothing was sampled, or there is nothing to tell."""
RefusedCall = tuple[str, str, str]
"""`(rollout_id, attempt_id, call_id)`."""
REWARD = SPAN.split(", ").index("reward")
_ADD_SPAN = f"INSERT INTO spans ({SPAN}) VALUES ({', '.join('?' * len(SPAN.split(', ')))}) ON CONFLICT (attempt_id, span_id) DO NOTHING"


class Records:
    """Spans and calls."""

    def __init__(self, journal: Journal, rollouts: Rollouts, attempts: Attempts) -> None:
        self._journal = journal
        self._rollouts = rollouts
        self._attempts = attempts
        self._gone: set[str] = set()
        """Recorders that will tell nothing any more. Not in the journal: after a restart, their calls run into the time limit."""

    # spans

    def add_spans(self, spans: list[Row]) -> list[int | None]:
        """Store spans (columns SPAN); returns each one's sequence id, or None for a duplicate.

        Raises:
            UnknownIdError: a span names an attempt that is not there; none is stored then.
        """
        seen: dict[tuple[str, str], LiveAttempt] = {}
        nexts: dict[str, int] = {}
        numbers: list[int | None] = []
        for span in spans:
            rollout_id, attempt_id, wanted = span[:3]
            if (rollout_id, attempt_id) not in seen:
                attempt = seen[rollout_id, attempt_id] = self._attempts.get(rollout_id, attempt_id)
                nexts[attempt_id] = attempt.next_span
            number = wanted or nexts[attempt_id]
            late = seen[rollout_id, attempt_id].status in ATTEMPT_FINISHED
            if late:  # its reward is what it was decided with
                span = (*span[:REWARD], None, *span[REWARD + 1 :])
            if self._journal.execute(_ADD_SPAN, (rollout_id, attempt_id, number, *span[3:])).rowcount:
                nexts[attempt_id] = max(nexts[attempt_id], number + 1)
                numbers.append(number)
                self._journal.count("spans_late", by=late)
            else:
                numbers.append(None)
        for attempt in seen.values():
            if nexts[attempt.attempt_id] != attempt.next_span:
                self._set_next(attempt.attempt_id, nexts[attempt.attempt_id])
            self._attempts.sign_of_life(attempt)
        added = sum(number is not None for number in numbers)
        self._journal.count("total_spans", by=added)
        self._journal.count("spans_duplicate", by=len(spans) - added)
        return numbers

    def _set_next(self, attempt_id: str, number: int) -> None:
        self._journal.execute("UPDATE attempts SET next_span = ? WHERE attempt_id = ?", (number, attempt_id))

    def next_sequence_ids(self, attempts: list[tuple[str, str]]) -> list[int]:
        """The next sequence id of each attempt; the same attempt named twice gets two."""
        numbers = []
        for rollout_id, attempt_id in attempts:
            numbers.append(self._attempts.get(rollout_id, attempt_id).next_span)
            self._set_next(attempt_id, numbers[-1] + 1)
        return numbers

    # calls

    def open_calls(self, calls: list[OpenedCall]) -> list[RefusedCall]:
        """Calls to the engine have begun, which is a sign of life. Those of a decided or unknown attempt are counted and returned.

        One that is announced again is known already.
        """
        refused: list[RefusedCall] = []
        for rollout_id, attempt_id, call_id, start, recorder, request in calls:
            attempt = self._if_undecided(rollout_id, attempt_id)
            if attempt is None or recorder in self._gone:
                self._journal.count("calls_late")
                refused.append((rollout_id, attempt_id, call_id))
                continue
            self._journal.execute(
                "INSERT INTO calls (call_id, rollout_id, attempt_id, start_time, recorder, request) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO NOTHING",
                (call_id, rollout_id, attempt_id, start, recorder, request),
            )
            if self._gone:
                self._forget_unanswered("calls.attempt_id = ?", (attempt_id,))
            self._attempts.sign_of_life(attempt)
        return refused

    def lose_recorder(self, recorder: str) -> None:
        """A recorder will tell nothing any more; nobody waits for it."""
        self._gone.add(recorder)
        self._forget_unanswered("calls.recorder = ?", (recorder,))
        self._rollouts.changes.closed = True

    def count_awaited(self, attempt_id: str) -> int:
        """Open calls of an attempt whose end may still be told."""
        found = self._journal.execute(
            "SELECT recorder FROM calls WHERE attempt_id = ? AND generation IS NULL", (attempt_id,)
        )
        return sum(recorder not in self._gone for (recorder,) in found)

    def _forget_unanswered(self, which: str, values: tuple[str, ...]) -> None:
        """Forget open calls of recorders that are gone where another one was asked the same later: they were not answered."""
        gone = sorted(self._gone)
        forgotten = self._journal.execute(
            f"DELETE FROM calls WHERE {which} AND generation IS NULL AND recorder IN ({', '.join('?' * len(gone))}) AND EXISTS ("
            "SELECT 1 FROM calls AS again WHERE again.attempt_id = calls.attempt_id AND again.request = calls.request "
            "AND again.request != '' AND again.recorder != calls.recorder AND again.start_time >= calls.start_time)",
            (*values, *gone),
        ).rowcount
        self._journal.count("calls_repeated", by=forgotten)

    def close_calls(self, calls: list[ClosedCall]) -> None:
        """Calls have ended, each with what it sampled. One that is not open (any more) is counted: no answer of it was used.

        A call without tokens may have a span all the same: it failed, or its model runs elsewhere.
        """
        for _, attempt_id, call_id, generation, span in calls:
            key = (attempt_id, call_id)
            found = self._journal.one(
                "SELECT generation IS NULL FROM calls WHERE attempt_id = ? AND call_id = ?", key
            )
            if found == (0,):
                continue  # closed before: this is a client's second try
            if found is None:
                self._journal.count("generations_late", by=generation is not None)
            elif generation is None:
                self._journal.execute("DELETE FROM calls WHERE attempt_id = ? AND call_id = ?", key)
            else:
                self._journal.execute(
                    "UPDATE calls SET generation = ? WHERE attempt_id = ? AND call_id = ?", (generation, *key)
                )
                self._journal.count("generations")
            if found and span is not None:
                self.add_spans([span])
            self._rollouts.changes.closed = True

    def _if_undecided(self, rollout_id: str, attempt_id: str) -> LiveAttempt | None:
        try:
            attempt = self._attempts.get(rollout_id, attempt_id)
        except UnknownIdError:
            return None
        return None if attempt.status in ATTEMPT_FINISHED else attempt
