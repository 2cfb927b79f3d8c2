"""What attempts leave behind in the journal: spans, and the calls to the engine with their generations.

Laws: a span or a call that comes twice is kept once; the sequence ids of an attempt's spans only grow; the record of a call belongs
to the attempt that opened it and to no other; what comes for an attempt that is decided is counted, never mixed into the next one.
"""

from __future__ import annotations

from typing import Any

from raylight.errors import UnknownIdError
from raylight.store.attempts import Attempts, LiveAttempt
from raylight.store.journal import Journal
from raylight.store.rollouts import Rollouts
from raylight.store.rows import SPAN, Row
from raylight.types import ATTEMPT_FINISHED

OpenedCall = tuple[str, str, str, float]
"""`(rollout_id, attempt_id, call_id, start_time)`."""
ClosedCall = tuple[str, str, str, bytes | None, Row | None]
"""`(rollout_id, attempt_id, call_id, generation, span)`; None where nothing was sampled."""


class Records:
    """Spans and calls."""

    def __init__(self, journal: Journal, rollouts: Rollouts, attempts: Attempts) -> None:
        self._journal = journal
        self._rollouts = rollouts
        self._attempts = attempts

    # spans

    def add_spans(self, spans: list[Row]) -> list[int | None]:
        """Store spans (columns SPAN); returns each one's sequence id, or None for a duplicate.

        Raises:
            UnknownIdError: a span names an attempt that is not there; none is stored then.
        """
        seen: dict[tuple[str, str], LiveAttempt] = {}
        numbers: list[int | None] = []
        for span in spans:
            key = (span[0], span[1])
            if key not in seen:
                seen[key] = self._attempts.get(*key)
            numbers.append(self._add_span(span))
        for attempt in seen.values():
            self._attempts.sign_of_life(attempt)
        added = sum(number is not None for number in numbers)
        self._journal.count("total_spans", by=added)
        self._journal.count("spans_duplicate", by=len(spans) - added)
        return numbers

    def _add_span(self, span: Row) -> int | None:
        rollout_id, attempt_id, sequence_id, trace_id, span_id, *rest = span
        if self._journal.one("SELECT 1 FROM spans WHERE attempt_id = ? AND span_id = ?", (attempt_id, span_id)):
            return None
        number = self._number(attempt_id, sequence_id)
        values = (rollout_id, attempt_id, number, trace_id, span_id, *rest)
        self._journal.execute(f"INSERT INTO spans ({SPAN}) VALUES ({', '.join('?' * len(values))})", values)
        return number

    def _number(self, attempt_id: str, wanted: int) -> int:
        """The sequence id that was asked for, or the next one; numbers given from now on are higher."""
        if wanted:
            self._journal.execute(
                "UPDATE attempts SET next_span = MAX(next_span, ?) WHERE attempt_id = ?", (wanted + 1, attempt_id)
            )  # fmt: skip
            return wanted
        found = self._journal.one(
            "UPDATE attempts SET next_span = next_span + 1 WHERE attempt_id = ? RETURNING next_span - 1", (attempt_id,)
        )
        assert found is not None, "the attempt was looked up before"
        return found[0]

    def next_sequence_ids(self, attempts: list[tuple[str, str]]) -> list[int]:
        """The next sequence id of each attempt; the same attempt named twice gets two."""
        for rollout_id, attempt_id in dict.fromkeys(attempts):
            self._attempts.get(rollout_id, attempt_id)
        return [self._number(attempt_id, 0) for _, attempt_id in attempts]

    # calls

    def open_calls(self, calls: list[OpenedCall]) -> None:
        """Calls to the engine have begun, which is a sign of life. One of a decided attempt is counted."""
        for rollout_id, attempt_id, call_id, start in calls:
            attempt = self._if_undecided(rollout_id, attempt_id)
            if attempt is None:
                self._journal.count("calls_late")
                continue
            self._journal.execute(
                "INSERT OR IGNORE INTO calls (call_id, rollout_id, attempt_id, start_time) VALUES (?, ?, ?, ?)",
                (call_id, rollout_id, attempt_id, start),
            )
            self._attempts.sign_of_life(attempt)

    def close_calls(self, calls: list[ClosedCall]) -> None:
        """Calls have ended, each with what it sampled."""
        for rollout_id, attempt_id, call_id, generation, span in calls:
            found = self._journal.one("SELECT generation IS NULL FROM calls WHERE call_id = ?", (call_id,))
            if found == (0,):
                continue  # closed before: this is a client's second try
            attempt = self._if_undecided(rollout_id, attempt_id)
            if found is None or attempt is None:
                self._journal.count("generations_late", by=generation is not None)
                continue
            if generation is None:
                self._journal.execute("DELETE FROM calls WHERE call_id = ?", (call_id,))
            else:
                self._journal.execute("UPDATE calls SET generation = ? WHERE call_id = ?", (generation, call_id))
                self._journal.count("generations")
            if span is not None:
                self.add_spans([span])
            self._rollouts.changes.closed.add(attempt_id)

    def give_up_calls(self, attempt_id: str) -> None:
        """Calls of an attempt that fails without having waited for their records."""
        lost = self._journal.execute("DELETE FROM calls WHERE attempt_id = ? AND generation IS NULL", (attempt_id,)).rowcount
        self._journal.count("calls_lost", by=lost)

    def _if_undecided(self, rollout_id: str, attempt_id: str) -> LiveAttempt | None:
        try:
            attempt = self._attempts.get(rollout_id, attempt_id)
        except UnknownIdError:
            return None
        return None if attempt.status in ATTEMPT_FINISHED else attempt

    # reading

    def collect(self, rollout_ids: list[str], with_spans: bool) -> list[Any]:
        """`(rollout, reward, calls, spans)` of each rollout's latest attempt: calls in the order in which they began."""
        return [self._collect(rollout_id, with_spans) for rollout_id in rollout_ids]

    def _collect(self, rollout_id: str, with_spans: bool) -> tuple[Row, float | None, list[Row], list[Row]]:
        rollout = self._rollouts.get(rollout_id)
        if not self._rollouts.column(rollout_id, "n_attempts"):
            return rollout, None, [], []
        attempt_id = self._attempts.get(rollout_id, "latest").attempt_id
        reward = self._journal.one(
            "SELECT reward FROM spans WHERE attempt_id = ? AND reward IS NOT NULL ORDER BY sequence_id DESC LIMIT 1", (attempt_id,)
        )
        calls = self._journal.execute(
            "SELECT call_id, rollout_id, attempt_id, generation FROM calls WHERE attempt_id = ? AND generation IS NOT NULL"
            " ORDER BY start_time",
            (attempt_id,),
        ).fetchall()
        spans: list[Row] = []
        if with_spans:
            ordered = f"SELECT {SPAN} FROM spans WHERE rollout_id = ? AND attempt_id = ? ORDER BY sequence_id"
            spans = self._journal.execute(ordered, (rollout_id, attempt_id)).fetchall()
        return rollout, reward[0] if reward else None, calls, spans
