"""Trajectories from generations: a tree over token prefixes.

A call whose prompt continues the tokens of an earlier call (its prompt and its whole output) extends that conversation; what lies
between is an observation and is masked. Any other call begins a branch of its own, in which what it shares with earlier calls is
context; how it relates to them is told beside the rows.

Laws: every sampled response is trained exactly once, unless it was cut off; the tokens of a trajectory equal
`prompt_ids + output_ids` of its last call. No row depends on how a call is classified.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raylight.types import Generation, Trajectory

Tokens: TypeAlias = NDArray[np.int64]

Relation: TypeAlias = Literal[
    "start", "extension", "fork", "drift_ending", "drift_response", "drift_header", "restart"
]
"""How a call relates to the calls before it, by the one that shares most tokens with its prompt P, of those to which it relates.

- start: the first call.
- extension: P begins with all tokens of a conversation (at the same temperature); it grows.
- fork: P has all tokens of an earlier call, but that conversation went on already, or at another temperature; or P was sampled
  from before (parallel samples), or is such a prompt with a part of the response to it.
- drift_ending: P renders an earlier response as it was sampled, except for its last token: an end token is missing or another.
- drift_response: P renders an earlier response differently, such as without its reasoning, or tokenised otherwise.
- drift_header: P has an earlier response (or its end), but not after the tokens with which the response had been asked for, such as
  an empty thought that the chat template puts in front of new responses only.
- restart: a new context: another agent, or a history that was truncated or summarised.

Drift costs: the whole past is computed again, and a response lies in a context that is not quite the one it was sampled in.
"""

CLOSER: tuple[Relation, ...] = ("restart", "drift_header", "drift_response", "drift_ending", "fork")
"""Of calls that share equally many tokens, the one with the later relation counts."""
LONGEST_HEADER = 16
"""Tokens that chat templates put between the last message and the response, at most."""


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Where a call that is trained is."""

    row: int
    last: int
    """Index of its last token in the row."""
    end_time: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Trajectories:
    """What the calls of one attempt became."""

    rows: list[Trajectory]
    relations: list[Relation]
    """One per call that is trained, in the order of the calls."""
    places: list[CallPlace] = field(default_factory=list)
    """The same."""


@dataclass(slots=True, eq=False)
class _Placed:
    """A call in the tree, stored from where it leaves an earlier one."""

    call: Generation
    branch: list[Generation]
    """The calls of its row, this one among them."""
    base: int
    """Index of the earlier call that it shares most tokens with; -1 for none."""
    kept: int
    """How many tokens it shares with that one."""
    rest: Tokens
    """Its tokens from there on."""
    next: int = field(init=False)
    """The first of them; -1 for none. Most calls differ there, and telling so needs no array."""
    prompt: int = field(init=False)
    total: int = field(init=False)
    """Lengths of its prompt, and of prompt and output."""

    def __post_init__(self) -> None:
        self.next = int(self.rest[0]) if len(self.rest) else -1
        self.prompt = len(self.call.prompt_ids)
        self.total = self.prompt + len(self.call.output_ids)

    def may_grow_by(self, call: Generation) -> bool:
        """Whether it is the end of its row, and the call was sampled at the same temperature (a trajectory has one)."""
        return self.branch[-1] is self.call and self.call.temperature == call.temperature


def build_trajectories(generations: list[Generation]) -> Trajectories:
    """Trajectories of one attempt. Time and memory grow with the tokens of the tree, not with those of all prompts together.

    Args:
        generations: of one attempt, in the order in which the calls began. Calls that sampled nothing or were aborted are left
            out: nobody saw the whole response, if any of it.
    """
    placed: list[_Placed] = []
    rows: list[list[Generation]] = []
    relations: list[Relation] = []
    for call in generations:
        if not call.output_ids or call.finish_reason == "aborted":
            continue
        ids = call.prompt_ids + call.output_ids
        tokens = np.array(ids, dtype=np.int64)
        shared = _shared_with(ids, tokens, placed)
        in_prompt = [min(length, len(call.prompt_ids)) for length in shared]
        grows = [
            p
            for p, length in zip(placed, in_prompt, strict=True)
            if length == p.total and p.may_grow_by(call)
        ]
        if grows:
            branch = max(grows, key=lambda p: p.total).branch
            relations.append("extension")
        else:
            branch = []
            rows.append(branch)
            relations.append(_relation(call, placed, in_prompt))
        branch.append(call)
        base = int(np.argmax(shared)) if shared else -1
        kept = shared[base] if shared else 0
        placed.append(_Placed(call, branch, base, kept, tokens[kept:]))
    row_of = {id(branch): row for row, branch in enumerate(rows)}
    places = [CallPlace(row_of[id(p.branch)], p.total - 1, p.call.end_time) for p in placed]
    return Trajectories([_trajectory(branch) for branch in rows], relations, places)


def _shared_with(ids: list[int], tokens: Tokens, placed: list[_Placed]) -> list[int]:
    """Length of the common prefix of a call's tokens (given twice) with those of each placed call.

    Only what a call does not share with its base is compared, and only if all that they share is in these tokens too.
    """
    found: list[int] = []
    for p in placed:
        with_base = found[p.base] if p.base >= 0 else 0
        if with_base == p.kept and with_base < len(ids) and ids[with_base] == p.next:
            found.append(with_base + _common_prefix(tokens[with_base:], p.rest))
        else:
            found.append(min(with_base, p.kept))
    return found


def _common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix, in steps that grow, since most pairs differ early."""
    end, start, size = min(len(a), len(b)), 0, 64
    while start < end:
        stop = min(start + size, end)
        differs = a[start:stop] != b[start:stop]
        where = int(differs.argmax())
        if differs[where]:
            return start + where
        start, size = stop, size * 8
    return end


def _relation(call: Generation, placed: list[_Placed], shared: list[int]) -> Relation:
    """Relation of a call that extends nothing; `shared[i]` tokens of its prompt are also those of call i."""
    if not placed:
        return "start"
    relations = [_relation_to(p, call.prompt_ids, length) for p, length in zip(placed, shared, strict=True)]
    related = [
        (length, CLOSER.index(r)) for r, length in zip(relations, shared, strict=True) if r != "restart"
    ]
    return CLOSER[max(related, default=(0, 0))[1]]


def _relation_to(p: _Placed, prompt: list[int], shared: int) -> Relation:
    """Relation to one earlier call, of which nothing is known but where the prompt leaves it."""
    if shared == p.total or p.prompt <= shared == len(prompt):
        return "fork"
    if shared >= p.prompt:
        return "drift_ending" if p.prompt < shared == p.total - 1 else "drift_response"
    return "drift_header" if _renders_response_of(p, prompt, shared) else "restart"


def _renders_response_of(p: _Placed, prompt: list[int], at: int) -> bool:
    """Whether the prompt leaves the other call's prompt just before its end, and goes on with the response or its end.

    The response's last token is no evidence, as it may be an end token. Where it lies between, the prompt left an earlier message.
    """
    output = p.call.output_ids
    if p.prompt - at > LONGEST_HEADER or at == len(prompt) or output[-1] in p.call.prompt_ids[at:]:
        return False
    body = np.array(output[:-1] or output)
    rest = np.array(prompt[at : at + len(body)])
    starts = np.flatnonzero(body == rest[0])
    return any(np.array_equal(body[start:], rest[: len(body) - start]) for start in starts)


def _trajectory(branch: list[Generation]) -> Trajectory:
    """Lay a branch's calls out, one entry per token."""
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for call in branch:
        gap = len(call.prompt_ids) - len(mask)  # the first prompt, or an observation between two calls
        mask += [0] * gap + [1] * len(call.output_ids)
        logprobs += [0.0] * gap + call.logprobs
        versions += [-1] * gap + call.weight_versions
    first, last = branch[0], branch[-1]
    return Trajectory(
        first.key.rollout_id, last.prompt_ids + last.output_ids, mask, logprobs, versions, first.temperature
    )
