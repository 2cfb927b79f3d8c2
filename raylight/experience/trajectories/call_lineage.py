"""Lineage of the calls of an attempt: their relations to earlier calls, and the origins of their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from raylight.experience.trajectories.call_relations import find_drift
from raylight.experience.trajectories.off_policy import untrainable_parameters
from raylight.experience.trajectories.row_rules import DEFAULT_RULES, RowRules, is_masked, trained_rows
from raylight.experience.trajectories.trajectory import Relation, common_prefix
from raylight.traces.trained_agents import filter_generations
from raylight.types import CONTINUED, FinishedRollout, Generation, IntArray, JsonObject

Origin: TypeAlias = Literal["prompt", "output", "new"]


class PromptSegment(NamedTuple):
    """Consecutive tokens of a prompt with the same origin."""

    origin: Origin
    """"output": sampled in an earlier call; "prompt": new in the prompt of an earlier call; "new": rendered
    for this prompt."""
    call: int | None
    """Number of the earlier call."""
    tokens: int
    """Number of tokens."""


@dataclass(frozen=True)
class CallLineage:
    """Relation of a call to the earlier calls of its attempt. Calls are numbered from 1 on."""

    number: int
    row: int | None
    """Row of the rollout that the call is in, from 1 on; None if it is in none: it sampled nothing, was cut
    off, or is an auxiliary call or one of another agent."""
    trained: bool
    """True if the run's settings train the call: it is in a row that they select, and was sampled from the
    policy's own distribution."""
    kind: str
    """"start", "continued", "continued_KIND" (`CONTINUED`), "fork", "restart" or "drift_KIND"
    (`call_relations.Drift.kind`); "not_trained"."""
    related: int | None
    """Number of the earlier call that shares most tokens with the prompt; None if no call does."""
    shared: int
    """Number of tokens at the start of the prompt that it shares. The next token is the first one that
    differs, or is new."""
    reason: str
    """Explanation; empty if there is nothing to explain."""
    place: str
    """First difference between the messages; empty if there is none."""
    segments: list[PromptSegment]

    def to_json(self) -> JsonObject:
        values = {
            name: getattr(self, name) for name in ("number", "row", "trained", "kind", "related", "shared")
        }
        explained = {"reason": self.reason or None, "place": self.place or None}
        return values | explained | {"segments": [segment._asdict() for segment in self.segments]}


def trace_lineage(finished: FinishedRollout, rules: RowRules = DEFAULT_RULES) -> list[CallLineage]:
    """Return the lineage of each call of a rollout's latest attempt, in order.

    Args:
        finished: the rollout, with its spans.
        rules: the run's choice of calls and rows.
    """
    placed = _place_calls(finished, rules)
    sequences: list[IntArray] = []
    origins: list[list[PromptSegment]] = []
    lineages: list[CallLineage] = []
    for number, call in enumerate(finished.generations, 1):
        tokens = call.compared_ids
        prompt = tokens[: len(call.prompt_ids)]
        shared = [common_prefix(prompt, sequence) for sequence in sequences]
        best = max(range(len(shared)), key=lambda i: (shared[i], i), default=None)
        length = 0 if best is None else shared[best]
        known = [] if best is None else _take(origins[best], length)
        related = best + 1 if best is not None and length else None
        new = len(prompt) - length
        segments = [*known, PromptSegment("new", None, new)] if new else known
        call_place = placed[id(call)]
        kind, reason, place = _explain(call, call_place.relation)
        reason = "; ".join(filter(None, (reason, call_place.untrained)))
        trained = not call_place.untrained
        row = call_place.row
        lineages.append(CallLineage(number, row, trained, kind, related, length, reason, place, segments))
        sequences.append(tokens)
        own = [PromptSegment("prompt", number, new), PromptSegment("output", number, len(call.output_ids))]
        origins.append(known + [segment for segment in own if segment.tokens])
    return lineages


class _CallPlace(NamedTuple):
    """Row of a call, and the reason why it is not trained."""

    relation: Relation | None
    row: int | None
    """Number of the row, from 1 on."""
    untrained: str
    """Empty if the call is trained."""


def _place_calls(finished: FinishedRollout, rules: RowRules) -> dict[int, _CallPlace]:
    """Return the place of each call, by its identity."""
    trajectories, chosen = trained_rows(finished, rules)
    positions = {
        id(call): (relation, position.row)
        for call, relation, position in zip(
            trajectories.calls, trajectories.relations, trajectories.positions, strict=True
        )
    }
    of_trained_agents = set(map(id, filter_generations(finished, rules.trained_agents)))
    unselected = (
        "the rollout was truncated, and its rule leaves its tokens out of the loss"
        if is_masked(finished)
        else f"its row is not trained: trajectory_selection={rules.trajectory_selection!r} trains row "
        f"{chosen.start + 1}"
    )
    places = {}
    for call in finished.generations:
        relation, row = positions.get(id(call), (None, None))
        if id(call) not in of_trained_agents:
            reason = "its agent is not trained"
        elif call.auxiliary_model is not None and not rules.train_auxiliary_calls:
            reason = (
                f"it asked for the model {call.auxiliary_model!r:.200}: an auxiliary call, trained only with "
                "train_auxiliary_calls=True"
            )
        elif row is None:
            reason = "its response was cut off" if len(call.output_ids) else "it sampled nothing"
        elif row not in chosen:
            reason = unselected
        elif parameters := untrainable_parameters(call, rules.replays_sampling):
            reason = f"it was not sampled from the policy's own distribution: {', '.join(parameters)}"
        else:
            reason = ""
        places[id(call)] = _CallPlace(relation, None if row is None else row + 1, reason)
    return places


def _explain(call: Generation, relation: Relation | None) -> tuple[str, str, str]:
    """Return the kind of a call's relation, its reason and its place."""
    if relation is None:
        return "not_trained", "", ""
    if drift := find_drift(call.key, relation, call.history):
        return f"drift_{drift.kind}", drift.reason, drift.place
    if relation != "extension":
        return relation, "", ""
    note = call.history
    if note is None or note.kind not in CONTINUED or note.kind == "continued":
        return "continued", "", ""
    return f"continued_{note.kind}", note.reason, note.place


def _take(segments: Sequence[PromptSegment], tokens: int) -> list[PromptSegment]:
    """Return the first segments, cut to a number of tokens."""
    taken: list[PromptSegment] = []
    for segment in segments:
        if tokens <= 0:
            break
        taken.append(segment._replace(tokens=min(segment.tokens, tokens)))
        tokens -= segment.tokens
    return taken
