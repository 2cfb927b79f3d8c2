"""Tables of what attempts record: spans, and calls to the engine with their generations.

Laws:
- A span or a call that arrives twice is stored once.
- The sequence ids of an attempt's spans only grow.
- The spans of agents are bounded in number, spans of captured calls are not: conversations are read from
  them. Spans with a reward have a separate bound, and an attempt over it fails, because rewards were
  dropped.
- The record of a call belongs to the attempt that opened it, and to no other.
- Records for a decided attempt are counted as late, never attributed to the next attempt.
- A call or a span is stored only after its base, which then never changes.
- The tokens of a call are counted with its record, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from raylight.semconv import GRADE_SPAN_ID
from raylight.store.call_rows import ClosedCall
from raylight.store.rows import BASE, REWARD, SPAN, SPAN_ID, Row, failure_json
from raylight.store.tables.attempts import Attempts
from raylight.store.tables.journal import Journal
from raylight.store.tables.rollouts import Rollouts
from raylight.store.tables.transitions import HOLD, AttemptState
from raylight.types import ATTEMPT_FINISHED, FINISHED, LIVE, MAX_REWARD_SPANS, MAX_SPANS, REPEATED, Failure

OpenedCall = tuple[str, str, str, float, str, str]
"""`(rollout_id, attempt_id, call_id, start_time, recorder, request)`."""
CallIds = tuple[str, str, str]
"""`(rollout_id, attempt_id, call_id)`."""
_ADD_SPAN = (
    f"INSERT INTO spans ({SPAN}) VALUES ({', '.join('?' * len(SPAN.split(', ')))}) ON CONFLICT "
    "(attempt_id, span_id) DO NOTHING"
)
_DROP_EMPTY_GRADE = "DELETE FROM spans WHERE attempt_id = ? AND span_id = ? AND reward IS NULL"
_WITH_BASES = (
    "(? IS NULL OR EXISTS (SELECT 1 FROM calls WHERE attempt_id = ? AND call_id = ? AND generation IS NOT "
    "NULL)) AND (? IS NULL OR EXISTS (SELECT 1 FROM spans WHERE attempt_id = ? AND span_id = ? AND base IS "
    "NOT NULL))"
)
"""SQL condition of a call whose bases are stored. The base of its span must be the span of a captured call,
because an agent may have written a span with any id."""
_OPEN_WITH_BASES = f"WHERE attempt_id = ? AND call_id = ? AND generation IS NULL AND {_WITH_BASES}"
_OPEN_COLUMNS = "call_id, rollout_id, attempt_id, start_time, recorder, request"
_OPEN_CALL = f"INSERT INTO calls ({_OPEN_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
_ADD_CALL = (
    f"INSERT INTO calls ({_OPEN_COLUMNS}, base, shared, generation) SELECT ?, ?, ?, ?, ?, ?, ?, ?, ? WHERE "
    f"{_WITH_BASES} ON CONFLICT DO NOTHING"
)
_CLOSE_CALL = f"UPDATE calls SET base = ?, shared = ?, generation = ? {_OPEN_WITH_BASES}"
_DELETE_OPEN_CALL = f"DELETE FROM calls {_OPEN_WITH_BASES}"
_COUNT_TOKENS = (
    "INSERT INTO sampled SELECT :rollout, :attempt, iif(decided, 0, :tokens), iif(decided, :tokens, 0) FROM "
    f"(SELECT status IN ({', '.join(map(repr, sorted(FINISHED)))}) AS decided FROM rollouts WHERE "
    "rollout_id = :rollout) WHERE true "
    "ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens, late = late + excluded.late"
)
_USE_REPETITION = (
    "UPDATE calls SET request = ? WHERE rowid = (SELECT rowid FROM calls WHERE request = ? AND "
    "attempt_id = ? AND recorder != ? AND start_time >= ? LIMIT 1)"
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
        """Take the place of one span."""
        if rewarded:
            self.rewards -= 1
        else:
            self.spans -= 1


class _Message:
    """Changes by a message of captured calls, which are stored once for all its calls.

    Attributes:
        attempts: the attempts of its calls.
        begun: calls that began and are not stored yet, by attempt and id.
        active: attempts with activity.
        next_spans: sequence id of each attempt's next span.
        tokens: sampled tokens by rollout and attempt.
    """

    def __init__(self, attempts: Attempts) -> None:
        self._table = attempts
        self.attempts: dict[str, AttemptState] = {}
        self.begun: dict[tuple[str, str], OpenedCall] = {}
        self.active: set[str] = set()
        self.next_spans: dict[str, int] = {}
        self.tokens: Counter[tuple[str, str]] = Counter()

    def attempt(self, row: Row) -> AttemptState | None:
        """Return the attempt of a row that begins with its rollout and its attempt; None if it is unknown."""
        rollout_id, attempt_id = row[:2]
        if attempt_id not in self.attempts:
            if (found := self._table.find(rollout_id, attempt_id)) is None:
                return None
            self.attempts[attempt_id] = found
            self.next_spans[attempt_id] = found.next_sequence_id
        attempt = self.attempts[attempt_id]
        return attempt if attempt.rollout_id == rollout_id else None


class Records:
    """Spans and calls in the journal.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(
        self, journal: Journal, rollouts: Rollouts, attempts: Attempts, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._journal = journal
        self._rollouts = rollouts
        self._attempts = attempts
        self._lost = LostRecorders(journal)

    # spans

    def add_spans(self, spans: list[Row], finishing: AttemptState | None = None) -> list[int | None]:
        """Store spans of agents (columns SPAN); returns the sequence id of each, or None for one that is not
        stored: a duplicate, or one over the capacity of its attempt.

        Args:
            finishing: a live attempt that the caller decides now; it is not changed here.

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
            key = (rollout_id, attempt_id)
            if key not in attempts:
                if finishing is not None and key == (finishing.rollout_id, finishing.attempt_id):
                    attempt = finishing
                else:
                    attempt = self._attempts.get(rollout_id, attempt_id)
                attempts[key] = attempt
                next_ids[attempt_id] = attempt.next_sequence_id
                rooms[attempt_id] = self._room(attempt, len(spans))
            rewarded = span[REWARD] is not None
            if not rooms[attempt_id].fits(rewarded):
                dropped += 1
                sequence_ids.append(None)
                continue
            sequence_id = given_id or next_ids[attempt_id]
            late = attempts[key].status in ATTEMPT_FINISHED
            if late:  # the reward of a decided attempt does not change
                span = (*span[:REWARD], None, *span[REWARD + 1 :])
            if self._journal.execute(_ADD_SPAN, (rollout_id, attempt_id, sequence_id, *span[3:])).rowcount:
                next_ids[attempt_id] = max(next_ids[attempt_id], sequence_id + 1)
                sequence_ids.append(sequence_id)
                rooms[attempt_id].take(rewarded)  # a duplicate takes none
                self._journal.increment("spans_late", by=late)
            else:
                sequence_ids.append(None)
        for attempt in attempts.values():
            if attempt is finishing:
                continue
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

    def finish_attempt(
        self, rollout_id: str, attempt_id: str, values: dict[str, object], spans: list[Row]
    ) -> Row:
        """Store an attempt's last spans and decide it as `Attempts.finish` does.

        An attempt whose rewards were dropped fails. A late end whose spans are stored already is reported
        again, and not counted again.
        """
        attempt = self._attempts.get(rollout_id, attempt_id)
        finishing = attempt if attempt.status in LIVE else None
        stored = [number for number in self.add_spans(spans, finishing) if number is not None]
        if finishing is not None:
            next_id = max([attempt.next_sequence_id, *(number + 1 for number in stored)])
            heartbeat = self._clock() if spans else attempt.last_heartbeat_time
            attempt = attempt._replace(next_sequence_id=next_id, last_heartbeat_time=heartbeat)
        elif attempt.status in ATTEMPT_FINISHED and spans and not stored:
            values = values | {"status": attempt.status}
        else:
            attempt = self._attempts.get(rollout_id, attempt_id)  # the spans may have revived it
        if values["status"] == "succeeded" and self._count_rewards(attempt_id) > MAX_REWARD_SPANS:
            lost = Failure(
                kind="reward",
                error=f"RewardError: the attempt has more than {MAX_REWARD_SPANS} spans with a reward, and "
                "the later ones were dropped; emit fewer rewards",
            )
            values = values | {"status": "failed", "failure": failure_json(lost)}
        return self._attempts.finish(attempt, values)

    def grade(self, spans: list[Row]) -> None:
        """Store spans of a group reward for decided attempts; a grade without a reward is replaced."""
        for span in spans:
            attempt = self._attempts.get(span[0], span[1])
            if span[SPAN_ID] == GRADE_SPAN_ID:
                self._journal.execute(_DROP_EMPTY_GRADE, (attempt.attempt_id, GRADE_SPAN_ID))
            sequence_id = attempt.next_sequence_id
            if self._journal.execute(_ADD_SPAN, (*span[:2], sequence_id, *span[3:])).rowcount:
                self._attempts.set_next_sequence_id(attempt.attempt_id, sequence_id + 1)
                self._journal.increment("total_spans")

    def next_sequence_ids(self, attempts: list[tuple[str, str]]) -> list[int]:
        """Reserve the next sequence id of each attempt (or of the "latest"); an attempt that is listed twice
        gets two."""
        sequence_ids = []
        for rollout_id, attempt_id in attempts:
            attempt = self._attempts.get_or_latest(rollout_id, attempt_id)
            sequence_ids.append(attempt.next_sequence_id)
            self._attempts.set_next_sequence_id(attempt.attempt_id, sequence_ids[-1] + 1)
        return sequence_ids

    # calls

    def capture(
        self, opened: list[OpenedCall], closed: list[ClosedCall]
    ) -> tuple[list[CallIds], list[CallIds], list[CallIds]]:
        """Record that calls to the engine began, which counts as activity of their attempts, and that calls
        ended, each with what it sampled.

        A call that is announced again is unchanged. A call that is not open (any more) is counted as late. A
        call without tokens may have a span: it failed, or its model runs elsewhere.

        Returns the calls that must not begin, because their attempts are decided or unknown; those whose base
        is not stored, which stay open until they are sent completely; and those that are not open, which
        nothing may have as its base.
        """
        message = _Message(self._attempts)
        rejected: list[CallIds] = []
        for call in opened:
            recorder, call_id = call[4], call[2]
            attempt = message.attempt(call)
            if attempt is None or attempt.status in ATTEMPT_FINISHED or recorder in self._lost:
                self._journal.increment("calls_late", by=not call_id.startswith(HOLD))
                rejected.append(call[:3])
                continue
            message.active.add(attempt.attempt_id)
            message.begun[attempt.attempt_id, call_id] = call
        if self._lost or not closed:
            self._store_begun(message)
        without_base, ignored = self._close_calls(message, closed)
        self._store_begun(message)
        self._end(message)
        return rejected, without_base, ignored

    def _store_begun(self, message: _Message) -> None:
        """Store the open calls of a message."""
        for attempt_id, call_id in list(message.begun):
            self._open(message.begun.pop((attempt_id, call_id)))
            self._lost.forget_repeated_calls(attempt_id)

    def _open(self, call: OpenedCall) -> None:
        rollout_id, attempt_id, call_id, *rest = call
        self._journal.execute(_OPEN_CALL, (call_id, rollout_id, attempt_id, *rest))

    def _end(self, message: _Message) -> None:
        """Store what the calls of a message change in their attempts."""
        for attempt_id in message.active:
            attempt = message.attempts[attempt_id]
            self._attempts.record_activity(attempt._replace(next_sequence_id=message.next_spans[attempt_id]))
        for (rollout_id, attempt_id), tokens in message.tokens.items():
            counted = {"rollout": rollout_id, "attempt": attempt_id, "tokens": tokens}
            self._journal.execute(_COUNT_TOKENS, counted)

    def lose_recorder(self, recorder: str) -> None:
        """Stop waiting for the records of a recorder that is gone."""
        self._lost.add(recorder)
        self._rollouts.events.calls_closed = True

    def count_awaited_calls(self, attempt_id: str) -> int:
        """Number of open calls of an attempt whose recorder may still record their end."""
        rows = self._journal.execute(
            "SELECT recorder FROM calls WHERE attempt_id = ? AND generation IS NULL", (attempt_id,)
        )
        return sum(recorder not in self._lost for (recorder,) in rows)

    def _close_calls(self, message: _Message, calls: list[ClosedCall]) -> tuple[list[CallIds], list[CallIds]]:
        """Record ends of calls; returns the last two results of `capture`."""
        without_base: list[CallIds] = []
        ignored: list[CallIds] = []
        unusable: set[tuple[str, str | None]] = set()
        for call in calls:
            rollout_id, attempt_id, call_id, base, _, generation, tokens, span = call
            key = (attempt_id, call_id)
            if call_id.startswith(HOLD) and self._lost.opened(*key):
                continue  # it may have answered calls that were rejected
            span_base = span[BASE] or None if span else None
            is_usable = unusable.isdisjoint({(attempt_id, base), (attempt_id, span_base)})
            if is_usable and self._close(message, call, span_base):
                self._journal.increment("generations", by=generation is not None)
                if tokens:
                    message.tokens[rollout_id, attempt_id] += tokens
                if span is not None:
                    self._add_call_span(message, span)
            elif (is_open := self._is_open(key)) is True:
                without_base.append(call[:3])
                continue
            else:  # closed before, by the message that a client repeats, or late
                self._journal.increment("generations_late", by=is_open is None and generation is not None)
                ignored.append(call[:3])
                unusable |= {key, *([(attempt_id, span[SPAN_ID])] if span else [])}
            self._rollouts.events.calls_closed = True
        return without_base, ignored

    def _close(self, message: _Message, call: ClosedCall, span_base: str | None) -> bool:
        """Record the end of a call; False if it is not open, or its bases are not stored."""
        _, attempt_id, call_id, base, shared, generation, _, _ = call
        bases = (base, attempt_id, base, span_base, attempt_id, span_base)
        begun = message.begun.pop((attempt_id, call_id), None)
        if begun is not None and generation is not None:  # begun and ended in one message
            row = (call_id, *begun[:2], *begun[3:], base, shared, generation)
            if self._journal.execute(_ADD_CALL, (*row, *bases)).rowcount:
                return True
        if begun is not None:
            self._open(begun)
        key = (attempt_id, call_id)
        if generation is None:
            return self._journal.execute(_DELETE_OPEN_CALL, (*key, *bases)).rowcount > 0
        return self._journal.execute(_CLOSE_CALL, (base, shared, generation, *key, *bases)).rowcount > 0

    def _add_call_span(self, message: _Message, span: Row) -> None:
        attempt = message.attempt(span)
        assert attempt is not None, "it had an open call"
        attempt_id = attempt.attempt_id
        message.active.add(attempt_id)
        sequence_id = span[2] or message.next_spans[attempt_id]
        added = self._journal.execute(_ADD_SPAN, (*span[:2], sequence_id, *span[3:])).rowcount
        if added:
            message.next_spans[attempt_id] = max(message.next_spans[attempt_id], sequence_id + 1)
            self._journal.increment("spans_late", by=attempt.status in ATTEMPT_FINISHED)
        self._journal.increment("total_spans" if added else "spans_duplicate")

    def _is_open(self, key: tuple[str, str]) -> bool | None:
        """Return True for an open call, False for a recorded one, and None for one that is not stored."""
        row = self._journal.fetch_one(
            "SELECT generation IS NULL FROM calls WHERE attempt_id = ? AND call_id = ?", key
        )
        return None if row is None else bool(row[0])


class LostRecorders:
    """The recorders that are gone.

    A call that was open in one may have been answered. It is forgotten only if its client says that it sent
    the request again, to another recorder; otherwise its attempt cannot succeed.

    Kept in memory only: after a restart of the store, the open calls of a lost recorder run into their time
    limit.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, recorder: str) -> bool:
        return recorder in self._names

    def add(self, recorder: str) -> None:
        self._names.add(recorder)
        self._forget_repeated("recorder = ?", (recorder,))

    def opened(self, attempt_id: str, call_id: str) -> bool:
        """Return True if one of them opened a call."""
        if not self._names:
            return False
        row = self._journal.fetch_one(
            "SELECT recorder FROM calls WHERE attempt_id = ? AND call_id = ?", (attempt_id, call_id)
        )
        return row is not None and row[0] in self._names

    def forget_repeated_calls(self, attempt_id: str) -> None:
        """Delete the open calls of an attempt that were sent again elsewhere."""
        if self._names:
            self._forget_repeated("attempt_id = ?", (attempt_id,))

    def _forget_repeated(self, condition: str, values: tuple[str, ...]) -> None:
        """Delete open calls that were sent again; each repetition takes the place of one of them."""
        names = sorted(self._names)
        calls = self._journal.execute(
            f"SELECT rowid, request, attempt_id, recorder, start_time FROM calls WHERE {condition} AND "
            f"generation IS NULL AND request != '' AND recorder IN ({', '.join('?' * len(names))})",
            (*values, *names),
        ).fetchall()
        for row, request, *others in calls:
            repetition = request.removesuffix(REPEATED) + REPEATED
            if self._journal.execute(_USE_REPETITION, (request, repetition, *others)).rowcount:
                self._journal.execute("DELETE FROM calls WHERE rowid = ?", (row,))
                self._journal.increment("calls_repeated")
