"""Relations of a batch's calls to earlier calls: how many rows a rollout became, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from raylight.experience.trajectories.trajectory import Relation, Trajectories
from raylight.types import CONTINUED, DRIFTS, CallKey, HistoryNote

UNCERTAIN = frozenset({"unsupported", "token_in_off"})
"""Kinds of notes on requests that were not compared with earlier ones: only their tokens show a drift."""
TOKEN_DRIFTS: dict[Relation, str] = {
    "drift_ending": "the prompt renders the end of an earlier answer to other tokens",
    "drift_response": "the prompt renders an earlier answer to other tokens, such as without its reasoning",
    "drift_header": "the prompt has other tokens before an earlier answer than when it was sampled",
}
"""Drifts that only the tokens show, with their meanings."""


@dataclass(frozen=True)
class Drift:
    """A call whose prompt is not the continuation of the conversation that its agent continues."""

    kind: str
    """A key of `DRIFTS`, or "ending", "response" or "header" if only the tokens show it."""
    call: CallKey
    reason: str
    place: str
    """First difference; empty if it is not known."""


@dataclass(frozen=True)
class RelationReport:
    """Relations of the trained calls of a batch, without the first call of each rollout."""

    calls: int = 0
    """Trained calls, with the first ones."""
    counts: Counter[str] = field(default_factory=Counter)
    """Numbers of calls by name: `extensions`, `forks`, `restarts` and `drifts`, and of these
    `extensions_KIND` and `drifts_KIND`."""
    rows_per_rollout: float = 0.0
    """Mean number of rows of a rollout."""
    max_rows: int = 0
    """Most rows of a rollout."""
    drifts: dict[str, Drift] = field(default_factory=dict)
    """First drift of each kind."""


COUNTED = (
    "extensions",
    *(f"extensions_{kind}" for kind in CONTINUED if kind != "continued"),
    "forks",
    "restarts",
    "drifts",
    *(f"drifts_{kind}" for kind in DRIFTS),
    *(relation.replace("drift", "drifts") for relation in TOKEN_DRIFTS),
)
"""Names of the counts, all of which are metrics of every step."""
_PLURALS: dict[Relation, str] = {"extension": "extensions", "fork": "forks", "restart": "restarts"}


def report_relations(rollouts: Iterable[Trajectories]) -> RelationReport:
    counts: Counter[str] = Counter()
    drifts: dict[str, Drift] = {}
    rows: list[int] = []
    calls = 0
    for trajectories in rollouts:
        rows.append(len(trajectories.rows))
        calls += len(trajectories.calls)
        for call, relation in zip(trajectories.calls, trajectories.relations, strict=True):
            if relation == "start":
                continue
            if drift := find_drift(call.key, relation, call.history):
                counts.update(("drifts", f"drifts_{drift.kind}"))
                drifts.setdefault(drift.kind, drift)
                continue
            counts[_PLURALS[relation]] += 1
            if relation == "extension" and call.history and call.history.kind in CONTINUED:
                counts[f"extensions_{call.history.kind}"] += 1
    mean = sum(rows) / len(rows) if rows else 0.0
    return RelationReport(calls, counts, mean, max(rows, default=0), drifts)


def find_drift(call: CallKey, relation: Relation, note: HistoryNote | None) -> Drift | None:
    """Return the drift of a call; None if it continues a conversation, branches off, or begins one.

    The request's messages tell more than its tokens, if serving compared them.

    Args:
        relation: relation of the call's tokens to earlier calls.
        note: relation of its messages.
    """
    if relation in ("start", "extension"):
        return None
    by_tokens = TOKEN_DRIFTS.get(relation)
    if note is not None and note.kind in DRIFTS and (by_tokens or note.kind not in UNCERTAIN):
        return Drift(note.kind, call, note.reason, note.place)
    return Drift(relation.removeprefix("drift_"), call, by_tokens, "") if by_tokens else None
