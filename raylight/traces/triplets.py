"""Triplets from spans: each call to a model with its prompt, its response, and the reward that came for
it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from raylight.errors import ConfigError
from raylight.semconv import (
    OPERATION,
    OPERATION_NAME,
    PROMPT_TOKEN_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_TOKEN_IDS,
    REWARD_PREFIX,
    WEIGHT_VERSIONS,
)
from raylight.traces.adapters import TraceAdapter
from raylight.traces.attributes import (
    WEAVE_INPUT,
    WEAVE_OUTPUT,
    agent_of,
    call_key_of,
    parse_literal,
    raw_field,
    response_id_of,
    unflatten,
)
from raylight.traces.messages import image_urls, read_call
from raylight.traces.rewards import get_reward_value
from raylight.traces.span_tree import SpanNode, SpanTree
from raylight.traces.trained_agents import AgentFilter
from raylight.types import Span, Triplet

logger = logging.getLogger(__name__)

LLM_CALL_MATCH = (
    r"^openai\.(chat|completion|response)|^anthropic\.(chat|completion|message)|^raw_gen_ai_request$"
)
"""Spans of calls: those that raylight captures, those of AgentOps and OpenLLMetry, and those of
agent-lightning's LLM proxy."""

CHOICE = f"{WEAVE_OUTPUT}.choices.0"
PROMPT_KEYS = (PROMPT_TOKEN_IDS, f"{WEAVE_OUTPUT}.prompt_token_ids")
RESPONSE_KEYS = (
    RESPONSE_TOKEN_IDS,
    f"{WEAVE_OUTPUT}.response_token_ids.0",
    f"{CHOICE}.token_ids",
    f"{CHOICE}.provider_specific_fields.token_ids",
)


class RewardMatchPolicy(StrEnum):
    """Which call a reward is for: always the last one that had ended before it and has none yet, among
    these."""

    FIRST_OCCURRENCE = "first_occurrence"
    """All calls."""
    FIRST_SIBLING = "first_sibling"
    """The calls below the same span."""


@dataclass(eq=False, slots=True)
class _Call:
    """One call, by the spans that tell of it."""

    nodes: list[SpanNode]

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of all its spans; the first one that has something to say counts."""
        merged: dict[str, Any] = {}
        for node in self.nodes:
            merged |= {
                k: v
                for k, v in node.span.attributes.items()
                if k not in merged or merged[k] in (None, "", [], ())
            }
        return merged

    @property
    def ids(self) -> set[str | None]:
        """Its own and that of the response, of which it may be one choice of several."""
        return {of(node.span.attributes) for node in self.nodes for of in (call_key_of, response_id_of)}

    @property
    def start(self) -> float:
        return min(node.span.start_time or 0.0 for node in self.nodes)

    @property
    def end(self) -> float:
        """When the first of its spans had ended: the innermost knows best."""
        return min(node.span.end_time or node.span.start_time or 0.0 for node in self.nodes)


class TracerTraceToTriplet(TraceAdapter[list[Triplet]]):
    """Triplets of an attempt's calls in the order in which they began, by the tree of its spans.

    Several spans may tell of one call (`call_key_of`). A span that does not say which, above or below another
    one of a call, tells of that call.

    Args:
        repair_hierarchy: put spans that lost their parent under the tightest span that encloses them in time.
        llm_call_match: regular expression for the names of spans that are calls.
        agent_match: regular expression for the names of agents; the calls of others, and of agents without a
            name, are left out.
        exclude_llm_call_in_reward: leave out the calls that were made to compute a reward, such as those of a
            judge.
        reward_match: which call a reward is for.
        _skip_empty_token_spans: leave out calls without token ids, before rewards are matched.

    Raises:
        ConfigError: a pattern is not a regular expression, or there is no such reward matching.
    """

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str = LLM_CALL_MATCH,
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: RewardMatchPolicy | str = RewardMatchPolicy.FIRST_OCCURRENCE,
        _skip_empty_token_spans: bool = False,
    ) -> None:
        self.repair_hierarchy = repair_hierarchy
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward
        self.skip_empty_token_spans = _skip_empty_token_spans
        self.agent_match = agent_match
        self._agents = AgentFilter(agent_match)
        try:
            self._is_call = re.compile(llm_call_match).search
            self.reward_match = RewardMatchPolicy(
                getattr(reward_match, "value", reward_match)
            )  # also agent-lightning's enum
        except re.error as error:
            raise ConfigError(
                f"llm_call_match={llm_call_match!r} is not a regular expression: {error}"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"reward_match={reward_match!r}; give one of {', '.join(RewardMatchPolicy)}"
            ) from error

    def tree(self, spans: Sequence[Span]) -> SpanTree:
        """The tree that calls, agents and rewards are looked up in; `print(adapter.tree(spans).render())`
        shows it."""
        tree = SpanTree.from_spans(spans)
        if self.repair_hierarchy:
            tree.repair_hierarchy()
        return tree

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        tree = self.tree(source)
        agents = tree.agents_of_responses()
        found: list[tuple[_Call, Triplet]] = []
        for call in self._calls(tree):
            attributes = call.attributes
            response = response_id_of(attributes)
            agent = call.nodes[0].agent if response is None else agents[response]
            triplet = read_triplet(
                attributes, agent, [child.span for node in call.nodes for child in node.children]
            )
            if self._agents.keeps(agent) and (has_tokens(triplet) or not self.skip_empty_token_spans):
                found.append((call, triplet))
        found.sort(key=lambda pair: pair[0].start)
        rewards = self._rewards(tree, [call for call, _ in found])
        return [
            triplet.model_copy(update={"reward": reward})
            for (_, triplet), reward in zip(found, rewards, strict=True)
        ]

    def _calls(self, tree: SpanTree) -> list[_Call]:
        """Calls, by their spans; not those of which a span lies within a reward."""
        named: dict[str, _Call] = {}
        unnamed: list[SpanNode] = []
        judging: set[str] = set()
        stack = [(tree.root, False, False)]
        while stack:
            node, in_reward, in_call = stack.pop()
            key = call_key_of(node.span.attributes)
            is_call = self._is_call(node.span.name) is not None
            if in_reward and key is not None:
                judging |= {key, response_id_of(node.span.attributes) or key}
            elif is_call and key is not None:
                named.setdefault(key, _Call([])).nodes.append(node)
            elif is_call and not in_reward and not in_call:
                unnamed.append(node)
            in_reward = in_reward or (self.exclude_llm_call_in_reward and _is_reward(node.span))
            stack.extend((child, in_reward, in_call or is_call) for child in reversed(node.children))
        calls = [call for call in named.values() if judging.isdisjoint(call.ids)]
        told = {id(node) for call in named.values() for node in call.nodes}
        return calls + [
            _Call([node]) for node in unnamed if not any(id(below) in told for below in node.walk())
        ]

    def _rewards(self, tree: SpanTree, calls: list[_Call]) -> list[float | None]:
        """The reward of each call."""
        rewards = {
            id(node): value for node in tree.walk() if (value := get_reward_value(node.span)) is not None
        }
        if self.reward_match == RewardMatchPolicy.FIRST_OCCURRENCE:
            families = [list(tree.walk())]
        else:
            families = [node.children for node in tree.walk()]
        index_of = {id(node): index for index, call in enumerate(calls) for node in call.nodes}
        given: dict[int, float] = {}
        for family in families:
            here = sorted({index_of[id(node)] for node in family if id(node) in index_of} - given.keys())
            times = [(calls[index].start, calls[index].end) for index in here]
            values = [
                (node.span.start_time or 0.0, rewards[id(node)]) for node in family if id(node) in rewards
            ]
            values.sort(key=lambda pair: pair[0])
            given |= {here[place]: value for place, value in match_rewards(times, values).items()}
        return [given.get(index) for index in range(len(calls))]


TraceToTriplet = TracerTraceToTriplet


class LlmProxyTraceToTriplet(TraceAdapter[list[Triplet]]):
    """Triplets of the calls whose spans carry token ids, by sequence ids alone: clocks of several machines
    need not agree.

    A reward is for the last call before it that has none yet.
    """

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        calls: list[tuple[float, float]] = []
        triplets: list[Triplet] = []
        rewards: list[tuple[float, float]] = []
        seen: set[str] = set()
        for span in sorted(source, key=lambda span: span.sequence_id):
            value = get_reward_value(span)
            if value is not None:
                rewards.append((span.sequence_id, value))
            key = call_key_of(span.attributes) or span.span_id
            if key in seen:
                continue
            triplet = read_triplet(span.attributes, agent_of(span))
            if has_tokens(triplet):
                seen.add(key)
                triplets.append(triplet)
                calls.append((span.sequence_id, span.sequence_id + 1))  # a reward comes with a later number
        given = match_rewards(calls, rewards)
        return [
            triplet.model_copy(update={"reward": given.get(place)}) for place, triplet in enumerate(triplets)
        ]


def match_rewards(
    calls: Sequence[tuple[float, float]], rewards: Sequence[tuple[float, float]]
) -> dict[int, float]:
    """Give each reward to the call that began last, of those that had ended by then and have none yet.

    Args:
        calls: start and end of each, sorted by start.
        rewards: time and value of each, sorted by time.

    Returns:
        Rewards by the index of their call.
    """
    given: dict[int, float] = {}
    waiting: list[int] = []
    begun = 0
    for time, value in rewards:
        while begun < len(calls) and calls[begun][0] <= time:
            waiting.append(begun)
            begun += 1
        ended = next(
            (place for place in reversed(range(len(waiting))) if calls[waiting[place]][1] <= time), None
        )
        if ended is not None:
            given[waiting.pop(ended)] = value
    return given


def read_triplet(attributes: Mapping[str, Any], agent: str | None, below: Sequence[Span] = ()) -> Triplet:
    """Triplet of a call without its reward.

    `prompt` has `token_ids`, `raw_content` (messages in OpenAI's shape, or None) and `image_urls`; `response`
    has `token_ids` and `raw_content`, and one entry per token in `logprobs` and `weight_versions` where the
    span carries them.
    """
    call = read_call(attributes, below)
    prompt_ids = _numbers(*map(attributes.get, PROMPT_KEYS), raw_field(attributes, "prompt_token_ids"))
    response_ids = _numbers(*map(attributes.get, RESPONSE_KEYS), *_raw_response_ids(attributes))
    response: dict[str, Any] = {"token_ids": response_ids, "raw_content": call.answers or None}
    columns = {
        "logprobs": _logprobs(attributes),
        "weight_versions": _numbers(attributes.get(WEIGHT_VERSIONS)),
    }
    for name, column in columns.items():
        if column and len(column) == len(response_ids):
            response[name] = column
        elif column and response_ids:
            logger.warning(
                "a call has %d tokens but %d %s, which are left out", len(response_ids), len(column), name
            )
    return Triplet(
        prompt={
            "token_ids": prompt_ids,
            "raw_content": call.prompt or None,
            "image_urls": image_urls(call.prompt),
        },
        response=response,
        metadata={
            "response_id": response_id_of(attributes),
            "agent_name": agent,
            "request": _described(attributes, "gen_ai.request", WEAVE_INPUT, {"messages"}),
            "response": _described(
                attributes,
                "gen_ai.response",
                WEAVE_OUTPUT,
                {"choices", "prompt_token_ids", "response_token_ids"},
            ),
        },
    )


def has_tokens(triplet: Triplet) -> bool:
    return bool(triplet.prompt["token_ids"] and triplet.response["token_ids"])


def _is_reward(span: Span) -> bool:
    """Whether a span is a reward, or an operation that computes one."""
    computes = span.name == OPERATION and span.attributes.get(OPERATION_NAME) == REWARD_PREFIX
    return computes or get_reward_value(span) is not None


def _described(attributes: Mapping[str, Any], prefix: str, weave: str, elsewhere: set[str]) -> Any:
    """What a span says of the request or response beside messages and tokens."""
    found = unflatten(attributes, prefix) or unflatten(attributes, weave)
    return (
        {key: value for key, value in found.items() if key not in elsewhere}
        if isinstance(found, dict)
        else found
    )


def _numbers(*recorded: Any) -> list[Any]:
    """The first of these that is a list of numbers; empty if none is."""
    for value in map(parse_literal, recorded):
        if isinstance(value, list) and value and all(isinstance(number, int | float) for number in value):
            return value
        if value not in (None, []):
            logger.warning("a span should carry a list of numbers here, but it is %.80r", value)
    return []


def _logprobs(attributes: Mapping[str, Any]) -> list[float]:
    """Log-probability of each response token: raylight's own, or OpenAI's `logprobs.content`."""
    entries = parse_literal(attributes.get("logprobs.content"))
    openai = (
        [entry.get("logprob") for entry in entries if isinstance(entry, dict)]
        if isinstance(entries, list)
        else None
    )
    return _numbers(attributes.get(RESPONSE_LOGPROBS), openai)


def _raw_response_ids(attributes: Mapping[str, Any]) -> tuple[Any, Any]:
    """Tokens of the first choice in a raw response of vLLM, where older and newer versions put them."""
    older, choices = raw_field(attributes, "response_token_ids"), raw_field(attributes, "choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return older[0] if isinstance(older, list) and older else None, choice.get("token_ids") if isinstance(
        choice, dict
    ) else None
