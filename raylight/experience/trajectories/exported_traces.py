"""Recorded rollouts as training data for other programs: conversations, pairs of them, and token rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from raylight.experience.trajectories.row_rules import DEFAULT_RULES, RowRules, learned_branches, learned_rows
from raylight.experience.trajectories.trajectory import select_rows
from raylight.semconv import CALL_ID, DIALECT, INPUT_MESSAGES, OUTPUT_MESSAGES, TOOL_DEFINITIONS
from raylight.types import FinishedRollout, JsonObject, Trajectory

Record = JsonObject
"""A line of an export."""


@dataclass(frozen=True)
class Conversation:
    """The calls of a row of a rollout as messages.

    Attributes:
        messages: the row's last call, with its answer. `"weight": 0` marks an answer that was not
            sampled in the row, such as an example in the prompt.
        sampled: positions of the answers that were sampled in the row.
        tools: tools that the last call offered.
        row: tokens of the row.
    """

    messages: list[JsonObject]
    sampled: list[int]
    tools: list[JsonObject]
    row: Trajectory

    def to_json(self) -> Record:
        """Return the conversation in the form of OpenAI's and TRL's conversational data."""
        return {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})


def conversations(finished: FinishedRollout, rules: RowRules = DEFAULT_RULES) -> list[Conversation]:
    """Return a conversation for each trained row of a rollout whose calls were all chat calls.

    Args:
        finished: the rollout, with its spans.
        rules: the run's choice of calls and rows.
    """
    attributes = {span.attributes.get(CALL_ID): span.attributes for span in finished.spans}
    found = []
    for calls, row in learned_branches(finished, rules):
        spans = [attributes.get(call.key.call_id, {}) for call in calls]
        if all(_is_chat(span) for span in spans):
            found.append(_conversation(row, spans))
    return found


def main_conversation(finished: FinishedRollout, rules: RowRules) -> Conversation | None:
    """Return the conversation with most trained tokens; None if there is none."""
    found = conversations(finished, rules)
    return found[select_rows([item.row for item in found], "longest")[0]] if found else None


def token_record(finished: FinishedRollout, rules: RowRules) -> Record:
    """Return a rollout's facts, its calls with messages, and its token rows."""
    return _facts(finished) | {
        "task": finished.rollout.input,
        "rewards": finished.rewards,
        "conversations": [found.to_json() for found in conversations(finished, rules)],
        "rows": [
            {
                "token_ids": row.token_ids.tolist(),
                "mask": row.mask.tolist(),
                "logprobs": [round(float(value), 6) for value in row.logprobs],
                "weight_versions": row.weight_versions.tolist(),
                "temperature": row.temperature,
            }
            | ({"images": [image._asdict() for image in row.images]} if row.images else {})
            for row in learned_rows(finished, rules)
        ],
    }


def dpo_record(
    chosen: FinishedRollout, rejected: FinishedRollout, rules: RowRules = DEFAULT_RULES
) -> Record | None:
    """Return a record `{"prompt", "chosen", "rejected", "tools"}` of two rollouts of a task; None if one has
    no conversation, or both gave the same answers.

    The prompt is what both conversations have in common before their first sampled answers.
    """
    better, worse = main_conversation(chosen, rules), main_conversation(rejected, rules)
    if better is None or worse is None:
        return None
    limit = min(better.sampled[0], worse.sampled[0])
    same = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(better.messages[:limit], worse.messages[:limit], strict=True)
    )
    prompt = [message for message, _ in same]
    answers = [found.messages[len(prompt) :] for found in (better, worse)]
    if not prompt or answers[0] == answers[1]:
        return None
    tools = {"tools": better.tools} if better.tools else {}
    return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1], **tools}


def _conversation(row: Trajectory, spans: Sequence[Mapping[str, object]]) -> Conversation:
    """Return the conversation of a row, given the attributes of its calls."""
    last = spans[-1]
    prompts = [json.loads(str(span[INPUT_MESSAGES])) for span in spans]
    (answer,) = json.loads(str(last[OUTPUT_MESSAGES]))[:1]
    messages = [*prompts[-1], answer]
    answers = {place for place, message in enumerate(messages) if message.get("role") == "assistant"}
    # each call's answer follows its prompt; all other answers were given
    sampled = sorted(answers & set(map(len, prompts)))
    marked = [
        {**message, "weight": 0} if place in answers and place not in sampled else message
        for place, message in enumerate(messages)
    ]
    return Conversation(marked, sampled, json.loads(str(last.get(TOOL_DEFINITIONS) or "[]")), row)


def _is_chat(span: Mapping[str, object]) -> bool:
    """True for the attributes of a chat call that has an answer."""
    has_messages = bool(span.get(INPUT_MESSAGES)) and bool(span.get(OUTPUT_MESSAGES))
    return has_messages and span.get(DIALECT, "completions") != "completions"


def _facts(finished: FinishedRollout) -> Record:
    rollout = finished.rollout
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "mode": rollout.mode,
        "reward": finished.reward,
    }


FORMATS: dict[str, Callable[[FinishedRollout, RowRules], list[Record]]] = {
    "sft": lambda item, rules: [found.to_json() for found in conversations(item, rules)],
    "messages": lambda item, rules: [_facts(item) | found.to_json() for found in conversations(item, rules)],
    "jsonl": lambda item, rules: [token_record(item, rules)],
}
"""Function from a rollout to its records, by the name of the format."""
