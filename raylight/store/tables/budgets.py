"""Budgets of attempts: what each has used, and which one it has spent.

No Ray, no network, no wall clock.

The replicas that serve an attempt ask before each call. Calls that they have sampled and the store has not
recorded yet come with the question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cachetools import LRUCache

from raylight.errors import UnknownIdError
from raylight.store.call_rows import sampled_tokens
from raylight.store.payloads import decode_payload, encode_payload
from raylight.store.tables.attempts import Attempts
from raylight.store.tables.journal import Journal
from raylight.store.tables.rollouts import Rollouts
from raylight.store.tables.run_clock import RunClock
from raylight.types import ATTEMPT_FINISHED, TRUNCATED, Budget, FinishReason

REMEMBERED = 10_000
"""Attempts whose recorded calls are not read again."""

Allowance = tuple[Budget | None, int | None, list[str]]
"""The budget that is spent, the tokens that are left (None: no limit), and the asked calls that are
recorded."""


@dataclass
class _Used:
    """Recorded calls of an attempt."""

    tokens: dict[str, int] = field(default_factory=dict)
    """Number of sampled tokens of each call."""
    turns: set[float] = field(default_factory=set)
    """Starts of the requests that were answered; the choices of a request share it."""
    reached_limit: bool = False
    """True if a call ended because it had sampled as many tokens as it might."""


class Budgets:
    """Budgets of the attempts in the journal; the copy in memory is read from it."""

    def __init__(self, journal: Journal, rollouts: Rollouts, attempts: Attempts, clock: RunClock) -> None:
        self._journal, self._rollouts, self._attempts, self._clock = journal, rollouts, attempts, clock
        self._used: LRUCache[str, _Used] = LRUCache(REMEMBERED)

    def check(self, rollout_id: str, attempt_id: str, unrecorded: Mapping[str, int]) -> Allowance:
        """Return what an attempt may still use. If a budget is spent, the attempt is marked as truncated.

        Nothing is limited for an attempt that is unknown or decided: its calls are rejected as such.

        Args:
            unrecorded: sampled tokens by id of the calls of the asking replica that may not be recorded.
        """
        try:
            attempt = self._attempts.get(rollout_id, attempt_id)
        except UnknownIdError:
            return None, None, []
        if attempt.status in ATTEMPT_FINISHED:
            return None, None, []
        config, used = self._rollouts.config(rollout_id), self._read(attempt_id)
        recorded = [call_id for call_id in unrecorded if call_id in used.tokens]
        tokens = sum(used.tokens.values()) + sum(
            count for call_id, count in unrecorded.items() if call_id not in used.tokens
        )
        left = None if config.max_tokens is None else config.max_tokens - tokens
        spent: Budget | None = None
        if config.max_seconds is not None and self._clock.lived() - attempt.began >= config.max_seconds:
            spent = "max_seconds"
        elif config.max_turns is not None and self._count_turns(attempt_id, used) >= config.max_turns:
            spent = "max_turns"
        elif left is not None and left <= 0:
            spent = "max_tokens"
        if spent is not None and self._mark(attempt_id) is None:
            self._journal.execute(
                "UPDATE attempts SET metadata = ? WHERE attempt_id = ?",
                (encode_payload(self._metadata(attempt_id) | {TRUNCATED: spent}), attempt_id),
            )
        return spent, left, recorded

    def truncation(self, rollout_id: str, attempt_id: str) -> Budget | None:
        """Return the budget that has truncated an attempt whose calls are recorded: one of its calls was
        rejected, or ended with the last token of `max_tokens`."""
        config, used = self._rollouts.config(rollout_id), self._read(attempt_id)
        if (mark := self._mark(attempt_id)) is not None:
            return mark
        is_cut = used.reached_limit and sum(used.tokens.values()) >= (config.max_tokens or float("inf"))
        return "max_tokens" if is_cut else None

    def _read(self, attempt_id: str) -> _Used:
        """Return the recorded calls of an attempt; reads those that were recorded since the last time."""
        used = self._used.setdefault(attempt_id, _Used())
        rows = self._journal.execute(
            "SELECT call_id FROM calls WHERE attempt_id = ? AND generation IS NOT NULL", (attempt_id,)
        ).fetchall()
        for (call_id,) in rows:
            if call_id in used.tokens:
                continue
            row = self._journal.fetch_one(
                "SELECT start_time, generation FROM calls WHERE attempt_id = ? AND call_id = ?",
                (attempt_id, call_id),
            )
            assert row is not None, "its id was read above"
            reason: FinishReason
            used.tokens[call_id], reason = sampled_tokens(row[1])
            if reason != "aborted":
                used.turns.add(row[0])
            used.reached_limit |= reason == "length"
        return used

    def _count_turns(self, attempt_id: str, used: _Used) -> int:
        """Return the number of requests that were answered or are being answered."""
        rows = self._journal.execute(
            "SELECT DISTINCT start_time FROM calls WHERE attempt_id = ? AND generation IS NULL", (attempt_id,)
        )
        return len(used.turns | {start for (start,) in rows.fetchall()})

    def _mark(self, attempt_id: str) -> Budget | None:
        return self._metadata(attempt_id).get(TRUNCATED)

    def _metadata(self, attempt_id: str) -> dict[str, Budget]:
        row = self._journal.fetch_one("SELECT metadata FROM attempts WHERE attempt_id = ?", (attempt_id,))
        return (row and row[0] and decode_payload(row[0])) or {}
