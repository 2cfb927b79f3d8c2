"""A rollout's trace in full, for people."""

from __future__ import annotations

import json

from raylight.semconv import INPUT_MESSAGES, OPERATION_INPUT, OPERATION_NAME, OPERATION_OUTPUT, OUTPUT_MESSAGES
from raylight.types import FinishedRollout, Span


def print_trace(item: FinishedRollout) -> None:
    """Print everything that went between the model and the tools, in its order, and the rewards."""
    print(f"=== {item.rollout.input['id']}: {item.rollout.status}")
    print(item.rollout.input["text"])
    for span in item.spans:
        print(_title(span))
        for line in _body(span):
            print(f"    {line}")
    print("rewards: " + ", ".join(f"{name} {value:.3f}" for name, value in item.rewards.items()))


def _title(span: Span) -> str:
    seconds = (span.end_time or 0.0) - (span.start_time or 0.0)
    return f"--- #{span.sequence_id} {span.attributes.get(OPERATION_NAME, span.name)} ({seconds:.3f} s, {span.status.status_code})"


def _body(span: Span) -> list[str]:
    if OUTPUT_MESSAGES in span.attributes:
        asked = json.loads(str(span.attributes.get(INPUT_MESSAGES, "[]")))
        answered = json.loads(str(span.attributes[OUTPUT_MESSAGES]))
        return [json.dumps(message) for message in asked[-1:] + answered]
    if OPERATION_NAME in span.attributes:
        return [str(span.attributes[key]) for key in (f"{OPERATION_INPUT}.arguments", OPERATION_OUTPUT) if key in span.attributes]
    return [f"{key} = {value}" for key, value in span.attributes.items()]
