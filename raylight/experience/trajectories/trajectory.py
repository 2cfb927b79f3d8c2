"""Trajectories from generations: a tree over token prefixes.

A call whose prompt continues the tokens of an earlier call (its prompt and its whole output) extends that
conversation. The tokens between the two are an observation and are masked. Tokens of images are equal only
where the images are (`Generation.compared_ids`). Any other call starts a new branch, in which the
tokens shared with earlier calls are context. The relation of each call to the earlier ones is reported with
the rows.

Laws: every sampled response is trained exactly once, unless it was aborted; the tokens of a trajectory equal
`prompt_ids + output_ids` of its last call. Forced tokens are masked, because the model had no choice. No row
depends on how a call is classified.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import astuple, dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from raylight.types import Generation, IntArray, PenalisedRange, Penalties, RouteArray, TokenSets, Trajectory
from raylight.types.token_sets import NO_TOKEN_SETS

Relation: TypeAlias = Literal[
    "start", "extension", "fork", "drift_ending", "drift_response", "drift_header", "restart"
]
"""Relation of a call, with prompt P, to the earlier calls. The related call that shares the most tokens with
P decides.

- start: the first call.
- extension: P begins with all tokens of a conversation (of the same model and temperature), which grows.
- fork: P contains all tokens of an earlier call, but that conversation has already continued, or has another
  temperature or model; or P was sampled from before (parallel samples), or is such a prompt plus a part of
  its response.
- drift_ending: P renders an earlier response as sampled, except for its last token: an end token is missing
  or differs.
- drift_response: P renders an earlier response differently, such as without its reasoning or with another
  tokenization.
- drift_header: P contains an earlier response (or its end), but not after the tokens that preceded it when it
  was sampled, such as an empty thought that the chat template inserts before new responses only.
- restart: a new context: another agent, or a history that was truncated or summarized.

Drift is costly: the whole history is computed again, and a response is trained in a context that differs
slightly from the one it was sampled in.
"""

TrajectorySelection: TypeAlias = Literal["all", "longest"]
"""Rows of a rollout that are trained: all of them, or the one with most trained tokens."""

RELATION_PRIORITY: tuple[Relation, ...] = (
    "restart",
    "drift_header",
    "drift_response",
    "drift_ending",
    "fork",
)
"""Tie-break between earlier calls that share equally many tokens: the later relation in this tuple wins."""
MAX_HEADER_TOKENS = 16
"""Upper bound of the tokens that a chat template puts between the last message and the response."""


@dataclass(frozen=True, slots=True)
class CallPosition:
    """Position of a trained call in the rows of its attempt."""

    row: int
    last_token: int
    """Index of the call's last token in the row."""
    call_id: str


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Counts of the sampled tokens of trained calls; two of them can be added."""

    sampled: int = 0
    forced: int = 0
    """Tokens that were the only ones a constraint allowed. They are not trained."""
    constrained: int = 0
    """Tokens that a constraint left a choice of."""
    allowed_mass: float = 0.0
    """Sum over constrained tokens of the probability that the policy itself gives to the allowed tokens."""
    off_policy: int = 0
    """Tokens of calls that are masked because they were not sampled from the policy's own distribution."""
    replayed: int = 0
    """Tokens whose truncation and penalties the learner replays."""

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Rows built from the calls of one attempt."""

    rows: list[Trajectory]
    relations: list[Relation]
    """One entry per trained call, in call order."""
    positions: list[CallPosition] = field(default_factory=list)
    """One entry per trained call, in call order."""
    tokens: TokenCounts = field(default_factory=lambda: TokenCounts())
    calls: list[Generation] = field(default_factory=list)
    """The trained calls."""


@dataclass(slots=True, eq=False)
class _CallNode:
    """A call in the prefix tree. It stores only the tokens that it does not share with its parent."""

    call: Generation
    branch: list[Generation]
    """The calls of the same row, this one included."""
    parent: int
    """Index of the earlier call that shares the most tokens with this one; -1 for none."""
    shared: int
    """Number of tokens shared with the parent."""
    suffix: IntArray
    """The tokens after the shared ones."""
    first_suffix_token: int = field(init=False)
    """-1 if the suffix is empty. Most calls differ at this token, and comparing it needs no array."""
    prompt_length: int = field(init=False)
    length: int = field(init=False)
    """Tokens of prompt and output."""

    def __post_init__(self) -> None:
        self.first_suffix_token = int(self.suffix[0]) if len(self.suffix) else -1
        self.prompt_length = len(self.call.prompt_ids)
        self.length = self.prompt_length + len(self.call.output_ids)

    def can_be_extended_by(self, call: Generation) -> bool:
        """True if this is the last call of its branch and has the model and temperature of `call`: a
        trajectory has one of each."""
        own = self.call
        return self.branch[-1] is own and (own.model, own.temperature) == (call.model, call.temperature)


def build_trajectories(generations: list[Generation], masked: Collection[str] = frozenset()) -> Trajectories:
    """Build the trajectories of one attempt.

    Time and memory grow with the tokens of the tree, not with the tokens of all prompts together.

    Args:
        generations: calls of one attempt, in the order of their starts. Calls that sampled nothing or were
            aborted are left out, because the agent did not receive the whole response.
        masked: ids of calls whose responses are context only.
    """
    nodes: list[_CallNode] = []
    rows: list[list[Generation]] = []
    relations: list[Relation] = []
    for call in generations:
        if not len(call.output_ids) or call.finish_reason == "aborted":
            continue
        tokens = call.compared_ids
        shared = _shared_lengths(tokens, nodes)
        in_prompt = [min(length, len(call.prompt_ids)) for length in shared]
        extendable = [
            node
            for node, length in zip(nodes, in_prompt, strict=True)
            if length == node.length and node.can_be_extended_by(call)
        ]
        if extendable:
            branch = max(extendable, key=lambda node: node.length).branch
            relations.append("extension")
        else:
            branch = []
            rows.append(branch)
            relations.append(_classify(tokens[: len(call.prompt_ids)], nodes, in_prompt))
        branch.append(call)
        parent = int(np.argmax(shared)) if shared else -1
        shared_length = shared[parent] if shared else 0
        nodes.append(_CallNode(call, branch, parent, shared_length, tokens[shared_length:]))
    row_of = {id(branch): row for row, branch in enumerate(rows)}
    positions = [CallPosition(row_of[id(n.branch)], n.length - 1, n.call.key.call_id) for n in nodes]
    counts = sum((_count_tokens(node.call, masked) for node in nodes), TokenCounts())
    calls = [node.call for node in nodes]
    return Trajectories([_join_calls(branch, masked) for branch in rows], relations, positions, counts, calls)


def select_rows(rows: list[Trajectory], selection: TrajectorySelection) -> range:
    """Return the indices of the rows of a rollout that are trained.

    The longest row is the one with most trained tokens; of several, the one with most tokens, then the first.
    """
    if selection == "all" or len(rows) < 2:
        return range(len(rows))
    longest = max(range(len(rows)), key=lambda i: (rows[i].trained_tokens, len(rows[i].token_ids), -i))
    return range(longest, longest + 1)


def _count_tokens(call: Generation, masked: Collection[str]) -> TokenCounts:
    sampled = len(call.output_ids)
    if call.key.call_id in masked:
        return TokenCounts(sampled, off_policy=sampled)
    if call.is_replayed:
        return TokenCounts(sampled, replayed=sampled)
    if not len(call.allowed):
        return TokenCounts(sampled)
    chosen = call.allowed > 1
    log_mass = (call.policy_logprobs.astype(np.float64) - call.logprobs)[chosen]
    mass = float(np.exp(np.minimum(log_mass, 0.0)).sum())  # rounding may make a log mass positive
    return TokenCounts(sampled, int((call.allowed == 1).sum()), int(chosen.sum()), mass)


def _shared_lengths(tokens: IntArray, nodes: list[_CallNode]) -> list[int]:
    """Return the length of the common prefix of a call's tokens with each node.

    Tokens are compared only with a node's suffix, and only if the call shares all tokens before that suffix.
    """
    lengths: list[int] = []
    for node in nodes:
        with_parent = lengths[node.parent] if node.parent >= 0 else 0
        reaches_suffix = with_parent == node.shared and with_parent < len(tokens)
        if reaches_suffix and tokens[with_parent] == node.first_suffix_token:
            lengths.append(with_parent + common_prefix(tokens[with_parent:], node.suffix))
        else:
            lengths.append(min(with_parent, node.shared))
    return lengths


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Return the length of two arrays' common prefix; shapes (tokens,). Chunks grow: most differ early."""
    end, start, size = min(len(a), len(b)), 0, 64
    while start < end:
        stop = min(start + size, end)
        differs = a[start:stop] != b[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, size = stop, size * 8
    return end


def _classify(prompt: IntArray, nodes: list[_CallNode], shared: list[int]) -> Relation:
    """Classify a call that extends no conversation and shares `shared[i]` prompt tokens with node i.

    Args:
        prompt: ids by which its prompt is compared.
    """
    if not nodes:
        return "start"
    relations = [_relation_to(n, prompt, length) for n, length in zip(nodes, shared, strict=True)]
    related = [
        (length, RELATION_PRIORITY.index(relation))
        for relation, length in zip(relations, shared, strict=True)
        if relation != "restart"
    ]
    return RELATION_PRIORITY[max(related, default=(0, 0))[1]]


def _relation_to(node: _CallNode, prompt: IntArray, shared: int) -> Relation:
    """Return the relation to one earlier call, from the length of the shared prefix."""
    if shared == node.length or node.prompt_length <= shared == len(prompt):
        return "fork"
    if shared >= node.prompt_length:
        return "drift_ending" if node.prompt_length < shared == node.length - 1 else "drift_response"
    return "drift_header" if _renders_response_of(node, prompt, shared) else "restart"


def _renders_response_of(node: _CallNode, prompt: IntArray, start: int) -> bool:
    """True if the prompt leaves the node's near its end (at `start`) and continues with the node's response.

    The end of the response suffices. Its last token is not evidence, as it may be an end token. If that token
    occurs between the two, the prompt diverged at an earlier message.
    """
    output = node.call.output_ids
    header = node.prompt_length - start
    if header > MAX_HEADER_TOKENS or start == len(prompt) or output[-1] in node.call.prompt_ids[start:]:
        return False
    body = output[:-1] if len(output) > 1 else output
    rest = prompt[start : start + len(body)]
    candidates = np.flatnonzero(body == rest[0])
    return any(np.array_equal(body[first:], rest[: len(body) - first]) for first in candidates)


def _join_calls(branch: list[Generation], masked: Collection[str]) -> Trajectory:
    """Join the calls of a branch into one row, with one entry per token."""
    first, tokens = branch[0], branch[-1].token_ids
    mask = np.zeros(len(tokens), np.int8)
    logprobs = np.zeros(len(tokens), np.float32)
    versions = np.full(len(tokens), -1, np.int64)
    replayed: list[Generation] = []
    observed = np.ones(len(tokens), np.int8)
    observed[: len(first.prompt_ids)] = 0
    for image in branch[-1].images:  # tokens that stand for it, which say nothing of it
        observed[image.start : image.stop] = 0
    for call in branch:
        observed[len(call.prompt_ids) : len(call.prompt_ids) + len(call.output_ids)] = 0
        if call.key.call_id in masked:
            continue
        start = len(call.prompt_ids)
        output = slice(start, start + len(call.output_ids))
        if call.is_replayed:
            replayed.append(call)
        if call.is_replayed or not len(call.allowed):
            mask[output], logprobs[output], versions[output] = 1, call.logprobs, call.weight_versions
            continue
        free = call.allowed != 1
        mask[output] = free
        logprobs[output] = np.where(free, call.policy_logprobs, 0)
        versions[output] = np.where(free, call.weight_versions, -1)
    return Trajectory(
        first.key.rollout_id,
        tokens,
        mask,
        logprobs,
        versions,
        first.temperature,
        _join_candidates(replayed, len(tokens)),
        tuple(_penalised_ranges(replayed)),
        observed,
        _join_routes(branch),
        branch[-1].images,
    )


def _join_candidates(replayed: list[Generation], tokens: int) -> TokenSets:
    """Return the candidates of a row; none if no call excluded a token."""
    if not any(len(call.candidates.values) for call in replayed):
        return NO_TOKEN_SETS
    parts, end = list[TokenSets](), 0
    for call in replayed:
        parts += [TokenSets.unrestricted(len(call.prompt_ids) - end), call.candidates]
        end = len(call.prompt_ids) + len(call.output_ids)
    return TokenSets.join([*parts, TokenSets.unrestricted(tokens - end)])


def _penalised_ranges(replayed: list[Generation]) -> Iterator[PenalisedRange]:
    for call in replayed:
        if call.penalties != Penalties():
            start = len(call.prompt_ids)
            yield PenalisedRange(start, start + len(call.output_ids), call.penalties)


def _join_routes(branch: list[Generation]) -> RouteArray | None:
    """Return the routes of a row: of each token the first call's that computed it, on whose keys and
    values the later ones rest. None if a call has none."""
    parts: list[RouteArray] = []
    known = 0
    for call in branch:
        if call.routed_experts is None:
            return None
        parts.append(call.routed_experts[known:])
        known = len(call.routed_experts)
    return np.concatenate(parts)
