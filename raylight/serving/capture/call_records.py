"""The records of an exchange's calls: what the store gets once an answer is over, one generation and one span a choice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raylight.engines.capture_context import CaptureContext, Sample
from raylight.semconv import (
    AGENT_NAME,
    CALL_ID,
    DIALECT,
    FINISH_REASONS,
    INPUT_MESSAGES,
    OUTPUT_MESSAGES,
    PROMPT_SOURCE,
    REQUEST_MODEL,
    REQUEST_PARAMETERS,
    RESPONSE_ID,
    TIME_TO_FIRST_TOKEN,
    TOOL_DEFINITIONS,
)
from raylight.serving.capture.recorder import Closed
from raylight.serving.dialects.answers import Answer, Choice
from raylight.serving.dialects.registry import DIALECTS
from raylight.types import Attributes, CallKey, Generation, Span

APART = frozenset({"messages", "prompt", "tools"})
"""Fields of a request that its span has attributes for."""


def model_of(body: Mapping[str, Any], default: str) -> str:
    """The model that a request asks for; an engine has refused the names that it does not know."""
    return name if isinstance(name := body.get("model"), str) and name else default


def records_of(
    exchange: CaptureContext,
    answer: Answer,
    model: str,
    end_time: float,
    first_piece: float | None,
    delivered: bool,
) -> list[Closed]:
    """One record for each call of an answered exchange.

    A call without a sample has no generation: its model runs elsewhere, or it never began.

    Args:
        first_piece: when a streamed answer's first piece came.
        delivered: the answer came to its end; otherwise nobody used it, and what was sampled is aborted.
    """
    choices = {choice.index: choice for choice in answer.choices}
    common = _common(exchange, answer, first_piece)
    records: list[Closed] = []
    for index, key in enumerate(exchange.keys):
        sample, choice = exchange.samples.get(index), choices.get(index)
        if sample is None and choice is None:
            records.append((key, None, None))
            continue
        generation = _generation(exchange, key, sample, model, end_time, delivered) if sample else None
        reason = generation.finish_reason if generation else choice.finish_reason if choice else None
        named = (
            {CALL_ID: key.call_id} if generation or index else {}
        )  # without tokens, the answer's id says all
        attributes = common | named | _own(choice, reason)
        span = Span.from_attributes(
            name=DIALECTS[exchange.dialect].span_name,
            attributes=attributes,
            rollout_id=key.rollout_id,
            attempt_id=key.attempt_id,
            span_id=key.call_id[:16],
            trace_id=key.call_id,
            start_time=exchange.start_time,
            end_time=end_time,
        )
        records.append((key, generation, span))
    return records


def _generation(
    exchange: CaptureContext, key: CallKey, sample: Sample, model: str, end_time: float, delivered: bool
) -> Generation:
    return Generation(
        key=key,
        model=model,
        prompt_ids=list(sample.prompt_ids),
        output_ids=list(sample.output_ids),
        logprobs=list(sample.logprobs),
        weight_versions=list(sample.weight_versions),
        finish_reason=sample.finish_reason if delivered else "aborted",
        start_time=exchange.start_time,
        end_time=end_time,
        sampling=dict(sample.sampling),
        agent=exchange.scope.agent,
    )


def _common(exchange: CaptureContext, answer: Answer, first_piece: float | None) -> Attributes:
    """What the spans of all choices say."""
    body, dialect = exchange.body, exchange.dialect
    messages = body["messages"] if "messages" in body else [{"role": "user", "content": body.get("prompt")}]
    found: Attributes = {
        REQUEST_MODEL: str(body.get("model", "")),
        INPUT_MESSAGES: json.dumps(messages),
        REQUEST_PARAMETERS: json.dumps({name: value for name, value in body.items() if name not in APART}),
        DIALECT: dialect,
        PROMPT_SOURCE: exchange.prompt,
    }
    if tools := body.get("tools"):
        found[TOOL_DEFINITIONS] = json.dumps(tools)
    if answer.id is not None:
        prefix = DIALECTS[dialect].id_prefix
        found[RESPONSE_ID] = answer.id if prefix is None else prefix + answer.id.removeprefix("chatcmpl-")
    if exchange.scope.agent:
        found[AGENT_NAME] = exchange.scope.agent
    if first_piece is not None:
        found[TIME_TO_FIRST_TOKEN] = first_piece - exchange.start_time
    return found


def _own(choice: Choice | None, reason: str | None) -> Attributes:
    """What the span of one choice says."""
    message = choice.message if choice and choice.message is not None else None
    if message is None:
        message = {"role": "assistant", "content": choice.text if choice else None}
    own: Attributes = {OUTPUT_MESSAGES: json.dumps([message])}
    return own | ({FINISH_REASONS: [reason]} if reason else {})
