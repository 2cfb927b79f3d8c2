"""Conversion of spans to triplets: the prompt, the response and the reward of each model call."""

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
from raylight.traces.messages import image_urls, read_call, recorded_messages
from raylight.traces.reward_spans import get_reward_value
from raylight.traces.span_tree import SpanNode, SpanTree
from raylight.traces.trace_adapter import TraceAdapter
from raylight.traces.trained_agents import AgentFilter
from raylight.types import JsonObject, Span, Triplet

logger = logging.getLogger(__name__)

LLM_CALL_MATCH = (
    r"^openai\.(chat|completion|response)|^anthropic\.(chat|completion|message)|^raw_gen_ai_request$"
)
"""Names of spans of calls by raylight, AgentOps, OpenLLMetry and agent-lightning's LLM proxy."""

CHOICE = f"{WEAVE_OUTPUT}.choices.0"
PROMPT_KEYS = (PROMPT_TOKEN_IDS, f"{WEAVE_OUTPUT}.prompt_token_ids")
RESPONSE_KEYS = (
    RESPONSE_TOKEN_IDS,
    f"{WEAVE_OUTPUT}.response_token_ids.0",
    f"{CHOICE}.token_ids",
    f"{CHOICE}.provider_specific_fields.token_ids",
)


class RewardMatchPolicy(StrEnum):
    """Calls among which a reward goes to the last that had ended before it and has no reward yet."""

    FIRST_OCCURRENCE = "first_occurrence"
    """All calls."""
    FIRST_SIBLING = "first_sibling"
    """The calls with the same parent span."""


@dataclass(eq=False, slots=True)
class _Call:
    """A call with all the spans that record it."""

    nodes: list[SpanNode]

    @property
    def attributes(self) -> JsonObject:
        """Attributes of all its spans; the first value that is not empty counts."""
        merged: JsonObject = {}
        for node in self.nodes:
            merged |= {
                k: v
                for k, v in node.span.attributes.items()
                if k not in merged or merged[k] in (None, "", [], ())
            }
        return merged

    @property
    def ids(self) -> set[str | None]:
        """Ids of the call and of its response, which may have several choices and so several calls."""
        return {read(node.span.attributes) for node in self.nodes for read in (call_key_of, response_id_of)}

    @property
    def start(self) -> float:
        """Start of the first of its spans, in seconds."""
        return min(node.span.start_time or 0.0 for node in self.nodes)

    @property
    def end(self) -> float:
        """End of the first of its spans to end, in seconds: the innermost span is the most precise."""
        return min(node.span.end_time or node.span.start_time or 0.0 for node in self.nodes)


class TraceToTripletBase(TraceAdapter[list[Triplet]]):
    """Base of the adapters to triplets."""


class TracerTraceToTriplet(TraceToTripletBase):
    """Adapter to the triplets of an attempt's calls, in order of their starts, from the tree of spans.

    Several spans may record one call (`call_key_of`). A span without a key belongs to the call of a span
    above or below it.

    Args:
        repair_hierarchy: put spans that lost their parent under the tightest span that encloses them in time.
        llm_call_match: regular expression for the names of spans that are calls.
        agent_match: regular expression for the names of agents. Calls of other and of unnamed agents are
            dropped.
        exclude_llm_call_in_reward: drop the calls made to compute a reward, such as a judge's.
        reward_match: policy that decides to which call a reward belongs.
        _skip_empty_token_spans: drop calls without token ids before rewards are matched.

    Raises:
        ConfigError: a pattern is not a regular expression, or `reward_match` is unknown.
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
            # .value, so that agent-lightning's enum is accepted too
            self.reward_match = RewardMatchPolicy(getattr(reward_match, "value", reward_match))
        except re.error as error:
            raise ConfigError(
                f"llm_call_match={llm_call_match!r} is not a regular expression: {error}"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"reward_match={reward_match!r}; give one of {', '.join(RewardMatchPolicy)}"
            ) from error

    def tree(self, spans: Sequence[Span]) -> SpanTree:
        """Build the tree of spans; `print(adapter.tree(spans).render())` shows it."""
        tree = SpanTree.from_spans(spans)
        if self.repair_hierarchy:
            tree.repair_hierarchy()
        return tree

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        tree = self.tree(source)
        agents = tree.agents_of_responses()
        pairs: list[tuple[_Call, Triplet]] = []
        for call in self._calls(tree):
            attributes = call.attributes
            response = response_id_of(attributes)
            agent = call.nodes[0].agent if response is None else agents[response]
            triplet = read_triplet(attributes, agent)
            if self._agents.keeps(agent) and (has_tokens(triplet) or not self.skip_empty_token_spans):
                pairs.append((call, triplet))
        pairs.sort(key=lambda pair: pair[0].start)
        rewards = self._rewards(tree, [call for call, _ in pairs])
        return [
            triplet.model_copy(update={"reward": reward})
            for (_, triplet), reward in zip(pairs, rewards, strict=True)
        ]

    def _calls(self, tree: SpanTree) -> list[_Call]:
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
        recorded = {id(node) for call in named.values() for node in call.nodes}
        return calls + [
            _Call([node]) for node in unnamed if not any(id(inner) in recorded for inner in node.walk())
        ]

    def _rewards(self, tree: SpanTree, calls: list[_Call]) -> list[float | None]:
        """Return the reward of each call; None for calls without a reward."""
        rewards = {
            id(node): value for node in tree.walk() if (value := get_reward_value(node.span)) is not None
        }
        if self.reward_match == RewardMatchPolicy.FIRST_OCCURRENCE:
            groups = [list(tree.walk())]
        else:
            groups = [node.children for node in tree.walk()]
        index_of = {id(node): index for index, call in enumerate(calls) for node in call.nodes}
        matched: dict[int, float] = {}
        for group in groups:
            indices = sorted({index_of[id(node)] for node in group if id(node) in index_of} - matched.keys())
            times = [(calls[index].start, calls[index].end) for index in indices]
            values = [
                (node.span.start_time or 0.0, rewards[id(node)]) for node in group if id(node) in rewards
            ]
            values.sort(key=lambda pair: pair[0])
            matched |= {indices[position]: value for position, value in match_rewards(times, values).items()}
        return [matched.get(index) for index in range(len(calls))]


TraceToTriplet = TracerTraceToTriplet


class LlmProxyTraceToTriplet(TraceToTripletBase):
    """Adapter to the triplets of calls with token ids.

    It orders spans by sequence ids only, as the clocks of several machines may differ.

    A reward belongs to the last call before it that has none yet.
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
        matched = match_rewards(calls, rewards)
        return [
            triplet.model_copy(update={"reward": matched.get(position)})
            for position, triplet in enumerate(triplets)
        ]


def match_rewards(
    calls: Sequence[tuple[float, float]], rewards: Sequence[tuple[float, float]]
) -> dict[int, float]:
    """Match each reward with the call that began last, among those that had ended by then and have no reward.

    Args:
        calls: start and end of each call, sorted by start.
        rewards: time and value of each reward, sorted by time.

    Returns:
        Rewards by index of their call.
    """
    matched: dict[int, float] = {}
    waiting: list[int] = []
    begun = 0
    for time, value in rewards:
        while begun < len(calls) and calls[begun][0] <= time:
            waiting.append(begun)
            begun += 1
        ended = next(
            (position for position in reversed(range(len(waiting))) if calls[waiting[position]][1] <= time),
            None,
        )
        if ended is not None:
            matched[waiting.pop(ended)] = value
    return matched


def read_triplet(attributes: Mapping[str, object], agent: str | None) -> Triplet:
    """Build the triplet of a call, without its reward.

    `prompt` has `token_ids`, `raw_content` (the messages as the span records them, or None) and `image_urls`.
    A URL of `raylight-image:` and a digest names a file that `StoreClient.read_images` returns.
    `response` has `token_ids` and `raw_content`, and `logprobs` and `weight_versions` if the span has one
    entry per token. `TraceToMessages` converts messages to OpenAI's shape.
    """
    raw_prompt, raw_answers = recorded_messages(attributes)
    prompt_ids = _numbers(*map(attributes.get, PROMPT_KEYS), raw_field(attributes, "prompt_token_ids"))
    response_ids = _numbers(*map(attributes.get, RESPONSE_KEYS), *_raw_response_ids(attributes))
    response: JsonObject = {"token_ids": response_ids, "raw_content": raw_answers}
    columns = {
        "logprobs": _logprobs(attributes),
        "weight_versions": _numbers(attributes.get(WEIGHT_VERSIONS)),
    }
    for name, column in columns.items():
        if column and len(column) == len(response_ids):
            response[name] = column
        elif column and response_ids:
            logger.warning(
                "a call has %d tokens but %d %s; the latter are dropped", len(response_ids), len(column), name
            )
    return Triplet(
        prompt={
            "token_ids": prompt_ids,
            "raw_content": raw_prompt,
            "image_urls": image_urls(read_call(attributes).prompt),
        },
        response=response,
        metadata={
            "response_id": response_id_of(attributes),
            "agent_name": agent,
            "request": _request_fields(attributes, "gen_ai.request", WEAVE_INPUT, {"messages"}),
            "response": _request_fields(
                attributes,
                "gen_ai.response",
                WEAVE_OUTPUT,
                {"choices", "prompt_token_ids", "response_token_ids"},
            ),
        },
    )


def has_tokens(triplet: Triplet) -> bool:
    """Return True if both prompt and response have token ids."""
    return bool(triplet.prompt["token_ids"] and triplet.response["token_ids"])


def _is_reward(span: Span) -> bool:
    """Return True if a span is a reward, or an operation that computes one."""
    computes = span.name == OPERATION and span.attributes.get(OPERATION_NAME) == REWARD_PREFIX
    return computes or get_reward_value(span) is not None


def _request_fields(attributes: Mapping[str, object], prefix: str, weave: str, exclude: set[str]) -> object:
    """Return the fields of the request or response other than messages and tokens."""
    fields = unflatten(attributes, prefix) or unflatten(attributes, weave)
    return (
        {key: value for key, value in fields.items() if key not in exclude}
        if isinstance(fields, dict)
        else fields
    )


def _numbers(*recorded: object) -> list[Any]:
    """Return the first value that is a list of numbers; an empty list if there is none."""
    for value in map(parse_literal, recorded):
        if isinstance(value, list) and value and all(isinstance(number, int | float) for number in value):
            return value
        if value not in (None, []):
            logger.warning("a span has %.80r instead of a list of numbers, which is ignored", value)
    return []


def _logprobs(attributes: Mapping[str, object]) -> list[float]:
    """Return the response tokens' log-probs, from raylight's attribute or OpenAI's `logprobs.content`."""
    entries = parse_literal(attributes.get("logprobs.content"))
    openai = (
        [entry.get("logprob") for entry in entries if isinstance(entry, dict)]
        if isinstance(entries, list)
        else None
    )
    return _numbers(attributes.get(RESPONSE_LOGPROBS), openai)


def _raw_response_ids(attributes: Mapping[str, object]) -> tuple[object, object]:
    """Return the tokens of the first choice in a raw response of vLLM, from its older and its newer field."""
    older, choices = raw_field(attributes, "response_token_ids"), raw_field(attributes, "choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return older[0] if isinstance(older, list) and older else None, choice.get("token_ids") if isinstance(
        choice, dict
    ) else None
