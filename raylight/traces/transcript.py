"""A rollout as text for people: what each agent was told and said, what its tools did, and what it got for
it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from raylight.semconv import (
    CALL_ID,
    DIALECT,
    INPUT_MESSAGES,
    OPERATION_INPUT,
    OPERATION_NAME,
    OPERATION_OUTPUT,
    OUTPUT_MESSAGES,
)
from raylight.traces.attributes import agent_of, response_id_of
from raylight.traces.rewards import get_rewards_from_span
from raylight.traces.span_tree import SpanTree
from raylight.traces.trained_agents import AgentFilter
from raylight.types import TRAINABLE_AGENTS, FinishedRollout, Generation, Span

SHORT = 400
"""Characters of an attribute, where not all is wanted."""


def transcript(finished: FinishedRollout, *, full: bool = False) -> str:
    """All that was recorded of a rollout's latest attempt, in its order.

    Of a call of the model it shows the messages that the same agent had not been told before, the answer, and
    how many tokens were recorded; of an operation (a tool) its input and output; of any other span its
    attributes.

    Args:
        finished: with its spans.
        full: show attributes whole, and those of calls too, with their tokens.
    """
    return "\n".join(_Transcript(finished, full).lines())


class _Transcript:
    def __init__(self, finished: FinishedRollout, full: bool) -> None:
        self._finished, self._full = finished, full
        self._calls: dict[Any, Generation] = {call.key.call_id: call for call in finished.generations}
        tree = SpanTree.from_spans(finished.spans)
        tree.repair_hierarchy()
        self._agents = tree.agents_of_responses()
        self._trained = AgentFilter(marked=finished.rollout.metadata.get(TRAINABLE_AGENTS, ()))
        self._told: dict[str | None, list[Any]] = {}
        """What each agent was told and said in its last call."""

    def lines(self) -> Iterator[str]:
        rollout, rewards = self._finished.rollout, self._finished.rewards
        yield f"=== {rollout.rollout_id} ({rollout.mode or 'no mode'}): {rollout.status}"
        yield f"task: {_legible(rollout.input)}"
        for span in self._finished.spans:
            yield ""
            yield from self._span(span)
        failure = rollout.attempt.failure if rollout.attempt else None
        if failure is not None:
            yield f"\n{failure.kind} failed: {failure.error}"
            if failure.trace:
                yield failure.trace.rstrip()
        told = ", ".join(f"{name} {value:.4g}" for name, value in rewards.items())
        yield f"\nreward: {told or 'none'}"

    def _span(self, span: Span) -> Iterator[str]:
        call = self._calls.get(span.attributes.get(CALL_ID))
        served = DIALECT in span.attributes
        agent = (
            (call.agent if call else None)
            or self._agents.get(response_id_of(span.attributes) or "")
            or agent_of(span)
        )
        failed = f", {span.status.status_code}" if span.status.status_code == "ERROR" else ""
        told = self._of_call(call, agent) if served else ""
        name = span.attributes.get(OPERATION_NAME, span.name)
        yield f"--- #{span.sequence_id} {name}{f' of {agent}' if agent else ''} ({_seconds(span)}{failed}{told})"
        shown: set[str] = set()
        if served:
            shown = {INPUT_MESSAGES, OUTPUT_MESSAGES}
            yield from self._messages(span.attributes, agent)
        elif OPERATION_NAME in span.attributes:
            shown = {
                key
                for key in span.attributes
                if key.startswith((f"{OPERATION_INPUT}.", OPERATION_OUTPUT, OPERATION_NAME))
            }
            for key in sorted(shown - {OPERATION_NAME}):
                yield f"    {key.rpartition('operation.')[2]}: {self._value(span.attributes[key])}"
        elif rewards := get_rewards_from_span(span):
            yield from (f"    {reward.name}: {reward.value:.4g}" for reward in rewards)
            return
        elif span.status.description:
            yield f"    {span.status.description}"
        if self._full or not shown:
            yield from (
                f"    {key}: {self._value(value)}"
                for key, value in span.attributes.items()
                if key not in shown
            )

    def _of_call(self, call: Generation | None, agent: str | None) -> str:
        trained = "" if self._trained.keeps(agent) else ", not trained"
        if call is None:
            return f", tokens unknown{trained}"
        return f", {len(call.prompt_ids)} + {len(call.output_ids)} tokens, {call.finish_reason}{trained}"

    def _messages(self, attributes: Mapping[str, Any], agent: str | None) -> Iterator[str]:
        asked, answered = (
            json.loads(str(attributes.get(key, "[]"))) for key in (INPUT_MESSAGES, OUTPUT_MESSAGES)
        )
        before = self._told.get(agent, [])
        new = (
            asked[len(before) :]
            if len(asked) > len(before) and _same(asked[: len(before)], before)
            else asked
        )
        if len(new) < len(asked):
            yield f"    ({len(asked) - len(new)} messages as before)"
        yield from (_message(message, "    ") for message in new)
        yield from (_message(message, "    >>> ") for message in answered)
        self._told[agent] = asked + answered

    def _value(self, value: Any) -> str:
        text = _legible(value)
        return text if self._full or len(text) <= SHORT else f"{text[:SHORT]}... ({len(text)} characters)"


def _same(some: list[Any], others: list[Any]) -> bool:
    """Whether they are the same conversation; a client may send an answer back with other fields, but not
    what was asked."""
    return all(
        one.get("role") == other.get("role")
        and (one.get("role") == "assistant" or one.get("content") == other.get("content"))
        for one, other in zip(some, others, strict=True)
    )


def _message(message: dict[str, Any], indent: str) -> str:
    content = message.get("content")
    said = (
        content
        if isinstance(content, str)
        else ""
        if content is None
        else json.dumps(content, ensure_ascii=False)
    )
    lines = f"[{message.get('role')}] {said}".rstrip().split("\n")
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        lines.append(f"  calls {function.get('name')}({function.get('arguments')})")
    return "\n".join([indent + lines[0], *(" " * len(indent) + line for line in lines[1:])])


def _legible(value: Any) -> str:
    """A value as text; JSON is laid out where it does not fit on a line."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    if isinstance(value, str):
        return value
    try:
        line = json.dumps(value, ensure_ascii=False)
        nested = isinstance(value, dict) or (
            isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
        )
        return (
            line
            if len(line) <= 100 or not nested
            else json.dumps(value, ensure_ascii=False, indent=2).replace("\n", "\n    ")
        )
    except (TypeError, ValueError):
        return repr(value)


def _seconds(span: Span) -> str:
    return (
        "no time"
        if span.start_time is None or span.end_time is None
        else f"{span.end_time - span.start_time:.3f} s"
    )
