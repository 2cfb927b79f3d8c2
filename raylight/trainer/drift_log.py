"""Log of the calls of a run whose prompts left their conversations, with advice."""

from __future__ import annotations

from collections import Counter
from typing import Any

from raylight.experience.call_relations import Drift, RelationReport

NOTED_FRACTION = 0.05
"""Fraction of drifted calls above which the end of a run shows advice."""
PAGE = "docs/serving.md#one-conversation-one-row"
ADVICE = {
    "answer_edited": "send answers back as they were received",
    "call_edited": "send tool calls back as they were received",
    "history_edited": "append new messages, and leave earlier ones as they are",
    "history_truncated": "raise the agent's limit on its history, or train on the rows that it makes",
    "system_edited": "keep times, states and other values that change out of the system message",
    "tools_changed": "offer the same tools, in the same order, in all calls of a conversation",
    "variables_changed": "send the same chat_template_kwargs and reasoning_effort in all calls",
    "template": "use a chat template that renders every message once and in order",
    "unsupported": "send images and audio in the first message only, or train on the rows that they make",
    "token_in_off": "remove the header x-raylight-token-in",
}
"""Remedies by the kind of a drift."""
SPLICING = "leave engine.token_in on, and use an engine with a tokenizer"
"""Remedy for drifts that only the tokens show."""


class DriftLog:
    """Counts drifted calls of a run, and keeps the first one of each kind."""

    def __init__(self) -> None:
        self._calls = 0
        self._counts: Counter[str] = Counter()
        self._first: dict[str, Drift] = {}

    def add(self, relations: RelationReport) -> str | None:
        """Add the calls of a step; return a note if they are the first drifts of the run."""
        noted = bool(self._first)
        self._calls += relations.calls
        for kind, drift in relations.drifts.items():
            self._counts[kind] += relations.counts[f"drifts_{kind}"]
            self._first.setdefault(kind, drift)
        if noted or not self._first:
            return None
        kind = self._counts.most_common(1)[0][0]
        drift = self._first[kind]
        place = f" ({drift.place})" if drift.place else ""
        return (
            f"{self._counts.total()} of {relations.calls} calls do not continue the tokens of their "
            f"conversations (trace/drifts_* in metrics.jsonl). Each starts a new row, for which the earlier "
            f"turns are computed again. Most frequent is {kind}: {drift.reason}{place}. `raylight trace RUN "
            f"--rollout {drift.call.rollout_id}` shows these calls"
        )

    def advice(self) -> str | None:
        """Return a remedy if many calls of the run drifted."""
        if self._counts.total() <= NOTED_FRACTION * self._calls:
            return None
        (kind, count), *_ = self._counts.most_common(1)
        return (
            f"{self._counts.total()} of {self._calls} calls started a new row although they continue a "
            f"conversation, {count} of them because {self._first[kind].reason}: "
            f"{ADVICE.get(kind, SPLICING)} ({PAGE})"
        )

    def summary(self) -> dict[str, Any]:
        """Return the number of drifted calls of each kind, with the first one."""
        return {
            kind: {
                "calls": count,
                "rollout": self._first[kind].call.rollout_id,
                "call": self._first[kind].call.call_id,
                "reason": self._first[kind].reason,
                "place": self._first[kind].place,
            }
            for kind, count in self._counts.most_common()
        }
