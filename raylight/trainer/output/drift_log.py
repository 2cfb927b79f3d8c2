"""Log of the calls of a run whose prompts left their conversations."""

from __future__ import annotations

from collections import Counter

from raylight.experience.trajectories.call_relations import Drift, RelationReport
from raylight.types import JsonObject


class DriftLog:
    """Counts drifted calls of a run, and keeps the first one of each kind."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, Drift] = {}

    def add(self, relations: RelationReport) -> None:
        """Add the calls of a step."""
        for kind, drift in relations.drifts.items():
            self._counts[kind] += relations.counts[f"drifts_{kind}"]
            self._first.setdefault(kind, drift)

    def detail(self) -> str:
        """Return a sentence about the most frequent kind; empty if no call drifted."""
        if not self._counts:
            return ""
        ((kind, count),) = self._counts.most_common(1)
        drift = self._first[kind]
        place = f" ({drift.place})" if drift.place else ""
        return (
            f"In {count} of {self._counts.total()} such calls {drift.reason}{place}: `raylight trace RUN "
            f"--rollout {drift.call.rollout_id}` shows the first one"
        )

    def summary(self) -> JsonObject:
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
