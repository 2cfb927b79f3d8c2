"""A few rollouts of an evaluation, as trackers show them in a table."""

from __future__ import annotations

import json

from raylight._utils.plain_json import plain
from raylight.traces.messages import TraceToMessages
from raylight.trainer.output.loggers import SampledRollout
from raylight.types import FinishedRollout, JsonObject

MAX_EXAMPLES = 8
"""Rollouts of an evaluation in a table."""
MAX_TEXT = 2_000
"""Characters of a task or an answer in a table."""


def example_ids(finished: list[FinishedRollout]) -> list[str]:
    """Return the ids of a few rollouts, evenly spaced, so that each evaluation shows the same tasks."""
    count = min(MAX_EXAMPLES, len(finished))
    return [finished[index * len(finished) // count].rollout.rollout_id for index in range(count)]


def sampled_rollout(item: FinishedRollout) -> SampledRollout:
    """Return a rollout with its spans as a row of a table.

    The answer is the last message that the model sent, or the error of a rollout that failed without one.
    """
    failure = item.rollout.failure
    calls = TraceToMessages().adapt(item.spans)
    answer = _message_text(calls[-1]["messages"][-1]) if calls else failure.error if failure else ""
    return SampledRollout(
        task=_cut(
            item.rollout.input if isinstance(item.rollout.input, str) else _as_json(item.rollout.input)
        ),
        answer=_cut(answer),
        reward=item.reward,
        rewards=_as_json(item.rewards),
        status=item.rollout.status,
        tokens=sum(len(call.output_ids) for call in item.generations),
        mode=item.rollout.mode or "",
        rollout_id=item.rollout.rollout_id,
    )


def _message_text(message: JsonObject) -> str:
    content = message.get("content") or message.get("tool_calls") or ""
    return content if isinstance(content, str) else _as_json(content)


def _as_json(value: object) -> str:
    return json.dumps(plain(value), ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
