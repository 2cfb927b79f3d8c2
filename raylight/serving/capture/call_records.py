"""Records of a request's calls: one generation and one span for each choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raylight.engines.capture_context import OVERRIDDEN, CaptureContext, Sample
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
from raylight.serving.capture.recorder import ClosedCall
from raylight.serving.dialects.answers import Answer, Choice
from raylight.serving.dialects.registry import DIALECTS
from raylight.store.payloads import json_text
from raylight.types import AUXILIARY, Attributes, CallKey, Generation, Span
from raylight.types.spans import TraceStatus

OWN_ATTRIBUTES = frozenset({"messages", "prompt", "tools"})
"""Fields of a request that have attributes of their own; the others share `REQUEST_PARAMETERS`."""

SAMPLED = ("output_ids", "logprobs", "weight_versions", "policy_logprobs", "allowed")
"""Lists of a sample, which become arrays of the generation."""
_OK = TraceStatus(status_code="OK")


def model_of(body: Mapping[str, Any], default: str) -> str:
    """Return the model that a request asks for; engines reject the names that they do not know."""
    return name if isinstance(name := body.get("model"), str) and name else default


def records_of(
    context: CaptureContext,
    answer: Answer,
    model: str,
    end_time: float,
    first_piece_time: float | None,
    delivered: bool,
) -> list[ClosedCall]:
    """Return one record for each call of an answered request.

    A call without a sample has no generation: its model runs elsewhere, or sampling never began.

    Args:
        first_piece_time: time of a streamed answer's first piece, in seconds since the epoch.
        delivered: True if the answer is complete. Otherwise no agent used it, and its samples count as
            aborted.
    """
    choices = {choice.index: choice for choice in answer.choices}
    common = _common_attributes(context, answer, first_piece_time)
    records: list[ClosedCall] = []
    for index, key in enumerate(context.keys):
        sample, choice = context.samples.get(index), choices.get(index)
        if sample is None and choice is None:
            records.append((key, None, None))
            continue
        generation = _generation(context, key, sample, model, end_time, delivered) if sample else None
        reason = generation.finish_reason if generation else choice.finish_reason if choice else None
        # without tokens, the answer's id identifies the only choice
        call_id = {CALL_ID: key.call_id} if generation or index else {}
        span = Span(
            status=_OK,
            name=DIALECTS[context.dialect].span_name,
            attributes=common | call_id | _choice_attributes(choice, reason),
            rollout_id=key.rollout_id,
            attempt_id=key.attempt_id,
            span_id=key.call_id[:16],
            trace_id=key.call_id,
            start_time=context.start_time,
            end_time=end_time,
        )
        records.append((key, generation, span))
    return records


def _generation(
    context: CaptureContext, key: CallKey, sample: Sample, model: str, end_time: float, delivered: bool
) -> Generation:
    notes: dict[str, Any] = {OVERRIDDEN: dict(context.overridden)} if context.overridden else {}
    if context.requested_model is not None:
        notes[AUXILIARY] = context.requested_model
    lists: dict[str, Any] = {name: getattr(sample, name) for name in SAMPLED}
    return Generation(
        key=key,
        model=model,
        prompt_ids=sample.prompt_ids,
        finish_reason=sample.finish_reason if delivered else "aborted",
        start_time=context.start_time,
        end_time=end_time,
        sampling=dict(sample.sampling) | notes,
        agent=context.scope.agent,
        history=context.history,
        **lists,
    )


def _common_attributes(context: CaptureContext, answer: Answer, first_piece_time: float | None) -> Attributes:
    """Return the attributes that the spans of all choices share."""
    body, dialect = context.body, DIALECTS[context.dialect]
    messages = body["messages"] if "messages" in body else [{"role": "user", "content": body.get("prompt")}]
    parameters = {name: value for name, value in body.items() if name not in OWN_ATTRIBUTES}
    attributes: Attributes = {
        REQUEST_MODEL: context.requested_model or str(body.get("model", "")),
        INPUT_MESSAGES: json_text(messages),
        REQUEST_PARAMETERS: json_text(parameters),
        DIALECT: dialect.name,
        PROMPT_SOURCE: context.prompt,
    }
    if tools := body.get("tools"):
        attributes[TOOL_DEFINITIONS] = json_text(tools)
    if answer.id is not None and dialect.id_prefix is not None:
        attributes[RESPONSE_ID] = dialect.id_prefix + answer.id.removeprefix("chatcmpl-")
    elif answer.id is not None:
        attributes[RESPONSE_ID] = answer.id
    if context.scope.agent:
        attributes[AGENT_NAME] = context.scope.agent
    if first_piece_time is not None:
        attributes[TIME_TO_FIRST_TOKEN] = first_piece_time - context.start_time
    return attributes


def _choice_attributes(choice: Choice | None, reason: str | None) -> Attributes:
    """Return the attributes of one choice's span."""
    message = choice.message if choice and choice.message is not None else None
    if message is None:
        message = {"role": "assistant", "content": choice.text if choice else None}
    attributes: Attributes = {OUTPUT_MESSAGES: json_text([message])}
    return attributes | ({FINISH_REASONS: [reason]} if reason else {})
