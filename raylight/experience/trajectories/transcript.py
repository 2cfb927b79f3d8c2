"""Transcript of a rollout as text or JSON: messages of each agent, calls of tools, rewards, failures, and the
relations of calls to earlier calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raylight.experience.trajectories.call_lineage import CallLineage, PromptSegment, trace_lineage
from raylight.experience.trajectories.row_rules import DEFAULT_RULES, RowRules
from raylight.images.messages import image_url_of, recorded_digest
from raylight.semconv import (
    CALL_ID,
    DIALECT,
    INPUT_MESSAGES,
    OPERATION_INPUT,
    OPERATION_NAME,
    OPERATION_OUTPUT,
    OUTPUT_MESSAGES,
    PROMPT_SOURCE,
    REWARD_AGENT,
)
from raylight.traces.attributes import agent_of, response_id_of
from raylight.traces.reward_spans import get_any_rewards
from raylight.traces.span_tree import SpanTree
from raylight.traces.trained_agents import AgentFilter
from raylight.types import TRAINABLE_AGENTS, FinishedRollout, Generation, JsonObject, Rollout, Span

MAX_VALUE_CHARS = 400
"""Characters of an attribute that a short transcript shows."""


def transcript(finished: FinishedRollout, *, full: bool = False, rules: RowRules = DEFAULT_RULES) -> str:
    """Return a transcript of all recorded spans of a rollout's latest attempt, in order.

    A call of the model shows its relation to earlier calls, the origins of its prompt's tokens, the messages
    that are new to its agent, and the answer. An operation (a tool) shows its input and output. Any other
    span shows its attributes.

    Args:
        finished: the rollout, with its spans.
        full: True for attributes in full length, and for the attributes of calls, with their tokens.
        rules: the run's choice of calls and rows to train.
    """
    return "\n".join(_Transcript(finished, full, rules).lines())


def transcript_json(
    finished: FinishedRollout, *, full: bool = False, rules: RowRules = DEFAULT_RULES
) -> JsonObject:
    """Return the calls of a rollout's latest attempt as JSON values, with its rewards and its failure.

    Args:
        finished: the rollout, with its spans.
        full: True adds the token ids and log-probs of each call.
        rules: the run's choice of calls and rows to train.
    """
    rollout = finished.rollout
    spans = {span.attributes.get(CALL_ID): span.attributes for span in finished.spans}
    calls = []
    for call, lineage in zip(finished.generations, trace_lineage(finished, rules), strict=True):
        attributes = spans.get(call.key.call_id, {})
        values = lineage.to_json() | {
            "call": call.key.call_id,
            "agent": call.agent,
            "auxiliary_model": call.auxiliary_model,
            "finish_reason": call.finish_reason,
            "prompt_source": attributes.get(PROMPT_SOURCE),
            "prompt_tokens": len(call.prompt_ids),
            "output_tokens": len(call.output_ids),
            "messages": json.loads(str(attributes.get(INPUT_MESSAGES, "[]"))),
            "answers": json.loads(str(attributes.get(OUTPUT_MESSAGES, "[]"))),
        }
        if full:
            values |= {
                name: getattr(call, name).tolist() for name in ("prompt_ids", "output_ids", "logprobs")
            }
        calls.append(values)
    failure = rollout.failure
    return {
        "rollout": rollout.rollout_id,
        "mode": rollout.mode,
        "status": rollout.status,
        "task": _json_value(rollout.input),
        "rewards": finished.rewards,
        "failure": failure.model_dump() if failure else None,
        "losses": _losses(rollout),
        "rows": max((call["row"] or 0 for call in calls), default=0),
        "calls": calls,
    }


class _Transcript:
    """Writer of one transcript; it tracks the last messages of each agent."""

    def __init__(self, finished: FinishedRollout, full: bool, rules: RowRules) -> None:
        self._finished, self._full = finished, full
        self._calls: dict[object, Generation] = {call.key.call_id: call for call in finished.generations}
        tree = SpanTree.from_spans(finished.spans)
        tree.repair_hierarchy()
        self._agents = tree.agents_of_responses()
        marked = finished.rollout.metadata.get(TRAINABLE_AGENTS, ())
        self._several_models = bool(rules.models)
        self._trained = AgentFilter(rules.trained_agents, marked)
        lineages = trace_lineage(finished, rules)
        self._lineages = {
            call.key.call_id: lineage for call, lineage in zip(finished.generations, lineages, strict=True)
        }
        self._last_messages: dict[str | None, list[object]] = {}
        """Messages of each agent's last call, with the answer."""

    def lines(self) -> Iterator[str]:
        rollout, rewards = self._finished.rollout, self._finished.rewards
        yield f"=== {rollout.rollout_id} ({rollout.mode or 'no mode'}): {rollout.status}"
        yield f"task: {_format_value(rollout.input)}"
        for span in _by_end(self._finished.spans):
            yield ""
            yield from self._span(span)
        failure = rollout.failure
        if failure is not None:
            yield f"\n{failure.kind} failed: {failure.error}"
            if failure.trace:
                yield failure.trace.rstrip()
        yield from (f"\n{name.replace('_', ' ')}: {count}" for name, count in _losses(rollout).items())
        listed = ", ".join(f"{name} {value:.4g}" for name, value in rewards.items())
        yield f"\nreward: {listed or 'none'}"

    def _span(self, span: Span) -> Iterator[str]:
        call = self._calls.get(span.attributes.get(CALL_ID))
        served = DIALECT in span.attributes
        agent = (
            (call.agent if call else None)
            or self._agents.get(response_id_of(span.attributes) or "")
            or agent_of(span)
        )
        failed = f", {span.status.status_code}" if span.status.status_code == "ERROR" else ""
        summary = self._call_summary(call, agent) if served else ""
        name = span.attributes.get(OPERATION_NAME, span.name)
        title = f"{name} of {agent}" if agent else name
        yield f"--- #{span.sequence_id} {title} ({_seconds(span)}{failed}{summary})"
        shown: set[str] = set()
        if served:
            shown = {INPUT_MESSAGES, OUTPUT_MESSAGES}
            if call is not None:
                yield from _lineage(self._lineages[call.key.call_id], span.attributes.get(PROMPT_SOURCE))
            yield from self._messages(span.attributes, agent)
        elif OPERATION_NAME in span.attributes:
            shown = {
                key
                for key in span.attributes
                if key.startswith((f"{OPERATION_INPUT}.", OPERATION_OUTPUT, OPERATION_NAME))
            }
            for key in sorted(shown - {OPERATION_NAME}):
                yield f"    {key.rpartition('operation.')[2]}: {self._value(span.attributes[key])}"
        elif rewards := get_any_rewards(span):
            agent = span.attributes.get(REWARD_AGENT)
            of = f" of {agent}" if agent is not None else ""
            yield from (f"    {reward.name}{of}: {reward.value:.4g}" for reward in rewards)
            return
        elif span.status.description:
            yield f"    {span.status.description}"
        if self._full or not shown:
            yield from (
                f"    {key}: {self._value(value)}"
                for key, value in span.attributes.items()
                if key not in shown
            )

    def _call_summary(self, call: Generation | None, agent: str | None) -> str:
        if call is None:
            return f", tokens unknown{'' if self._trained.keeps(agent) else ', not trained'}"
        trained = "" if self._lineages[call.key.call_id].trained else ", not trained"
        model = f", {call.model}" if self._several_models else ""
        return (
            f"{model}, {len(call.prompt_ids)} + {len(call.output_ids)} tokens, {call.finish_reason}{trained}"
        )

    def _messages(self, attributes: Mapping[str, object], agent: str | None) -> Iterator[str]:
        prompt, answers = (
            json.loads(str(attributes.get(key, "[]"))) for key in (INPUT_MESSAGES, OUTPUT_MESSAGES)
        )
        known = self._last_messages.get(agent, [])
        new = (
            prompt[len(known) :]
            if len(prompt) > len(known) and _is_same_conversation(prompt[: len(known)], known)
            else prompt
        )
        if len(new) < len(prompt):
            yield f"    ({len(prompt) - len(new)} messages as before)"
        yield from (_message(message, "    ") for message in new)
        yield from (_message(message, "    >>> ") for message in answers)
        self._last_messages[agent] = prompt + answers

    def _value(self, value: object) -> str:
        text = _format_value(value)
        return (
            text
            if self._full or len(text) <= MAX_VALUE_CHARS
            else f"{text[:MAX_VALUE_CHARS]}... ({len(text)} characters)"
        )


def _by_end(spans: Sequence[Span]) -> list[Span]:
    """Return spans in the order of their ends. Several served models send theirs to the store in any order. A
    span without times follows the one before it."""
    ends: list[float] = []
    for span in spans:
        ends.append(span.end_time or (ends[-1] if ends else 0.0))
    return [spans[index] for index in sorted(range(len(spans)), key=ends.__getitem__)]


def _losses(rollout: Rollout) -> JsonObject:
    """Return the counts of spans and rewards that the latest attempt recorded and that were not kept."""
    return (rollout.attempt.metadata if rollout.attempt else None) or {}


def _lineage(lineage: CallLineage, source: object) -> Iterator[str]:
    """Yield a call's relation to earlier calls, and the origins of its prompt; nothing for a first call."""
    if lineage.kind == "start":
        yield f"    call {lineage.number}, row {lineage.row}"
        if lineage.reason:
            yield f"      {lineage.reason}"
        return
    row = f"row {lineage.row}" if lineage.row is not None else "no row"
    related = "no tokens shared" if lineage.related is None else f"after call {lineage.related}"
    if lineage.related is not None and not lineage.kind.startswith("continued"):
        related += f", tokens differ from token {lineage.shared} on"
    yield f"    call {lineage.number}, {row}: {lineage.kind} ({related})"
    for detail in (lineage.reason, lineage.place):
        if detail:
            yield f"      {detail}"
    origins = ", ".join(map(_origin, lineage.segments))
    yield f"      prompt{f' ({source})' if source else ''}: {origins or 'empty'}"


def _origin(segment: PromptSegment) -> str:
    if segment.origin == "new":
        return f"{segment.tokens} new"
    verb = "sampled in" if segment.origin == "output" else "from the prompt of"
    return f"{segment.tokens} {verb} call {segment.call}"


def _json_value(value: object) -> object:
    """Return a value if it can be written as JSON; else its representation."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
    return value


def _is_same_conversation(some: list[Any], others: list[Any]) -> bool:
    """Return True if messages agree in role and content, except in answers, which clients may change."""
    return all(
        one.get("role") == other.get("role")
        and (one.get("role") == "assistant" or one.get("content") == other.get("content"))
        for one, other in zip(some, others, strict=True)
    )


def _message(message: JsonObject, indent: str) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else _parts(content)
    lines = f"[{message.get('role')}] {text}".rstrip().split("\n")
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        lines.append(f"  calls {function.get('name')}({function.get('arguments')})")
    return "\n".join([indent + lines[0], *(" " * len(indent) + line for line in lines[1:])])


def _parts(content: object) -> str:
    """Return the parts of a message's content, each on a line if some are images."""
    parts = content if isinstance(content, list) else [content]
    digests = [recorded_digest(image_url_of(part)) for part in parts]
    if not any(digests):
        return json.dumps(content, ensure_ascii=False)
    return "\n".join(
        f"[image {digest[:12]}]" if digest else str(part.get("text") or json.dumps(part, ensure_ascii=False))
        for part, digest in zip(parts, digests, strict=True)
    )


def _format_value(value: Any) -> str:
    """Return a value as text. JSON that is too long for one line is indented."""
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
