"""Conversations and pairs of recorded rollouts."""

import json
from typing import Any

import pytest
from unit_helpers import make_finished, make_generation, make_key

from raylight import semconv
from raylight.experience.batches.demonstrations import Demonstration
from raylight.experience.trajectories.exported_traces import (
    FORMATS,
    conversations,
    dpo_record,
    token_record,
)
from raylight.experience.trajectories.row_rules import DEFAULT_RULES
from raylight.types import FinishedRollout, Span

SHOT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
QUESTION = {"role": "user", "content": "2+2="}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "4"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def rollout(
    *calls: tuple[list[int], list[int], list[Any], Any], tools: Any = None, dialect: str = "chat"
) -> FinishedRollout:
    """A rollout with calls: the tokens of prompt and answer, and the messages of both."""
    finished = make_finished(1.0, calls=0)
    ids = finished.rollout.rollout_id
    for number, (prompt, output, asked, answered) in enumerate(calls):
        key = make_key(ids)
        finished.generations.append(make_generation(prompt, output, key=key, start=float(number)))
        attributes = {
            semconv.CALL_ID: key.call_id,
            semconv.DIALECT: dialect,
            semconv.INPUT_MESSAGES: json.dumps(asked),
            semconv.OUTPUT_MESSAGES: json.dumps([answered]),
        } | ({semconv.TOOL_DEFINITIONS: json.dumps(tools)} if tools else {})
        finished.spans.append(
            Span.from_attributes(
                rollout_id=ids, attempt_id="at-1", sequence_id=number, name="chat", attributes=attributes
            )
        )
    return finished


def test_a_tool_call_and_its_answer_are_one_conversation_with_its_tools():
    asked = [QUESTION]
    again = [QUESTION, CALL, RESULT]
    finished = rollout(([1], [2], asked, CALL), ([1, 2, 3], [4], again, answer("4")), tools=TOOLS)
    (record,) = FORMATS["sft"](finished, DEFAULT_RULES)
    assert record == {"messages": [*again, answer("4")], "tools": TOOLS}
    assert Demonstration.parse(record, "it").tools == TOOLS
    tokens = token_record(finished, DEFAULT_RULES)
    assert tokens["rows"][0]["token_ids"] == [1, 2, 3, 4]
    assert tokens["rows"][0]["mask"] == [0, 1, 0, 1]


def test_an_answer_in_the_prompt_has_weight_0():
    (found,) = conversations(rollout(([1], [2], [*SHOT, QUESTION], answer("4"))))
    assert [message.get("weight") for message in found.messages] == [None, 0, None, None]
    assert found.sampled == [3]


def test_a_changed_history_makes_several_conversations():
    finished = rollout(([1], [2], [QUESTION], answer("4")), ([7], [8], [SHOT[0]], answer("2")))
    assert [record["messages"] for record in FORMATS["sft"](finished, DEFAULT_RULES)] == [
        [QUESTION, answer("4")],
        [SHOT[0], answer("2")],
    ]


def test_plain_completions_have_no_messages_but_tokens():
    finished = rollout(([1], [2], ["2+2="], answer("4")), dialect="completions")
    assert FORMATS["sft"](finished, DEFAULT_RULES) == []
    assert token_record(finished, DEFAULT_RULES)["rows"][0]["token_ids"] == [1, 2]


def test_a_pair_has_the_prompt_that_both_share():
    good = rollout(
        ([1], [2], [QUESTION], CALL), ([1, 2, 3], [4], [QUESTION, CALL, RESULT], answer("4")), tools=TOOLS
    )
    bad = rollout(([1], [5], [QUESTION], answer("5")), tools=TOOLS)
    assert dpo_record(good, bad) == {
        "prompt": [QUESTION],
        "chosen": [CALL, RESULT, answer("4")],
        "rejected": [answer("5")],
        "tools": TOOLS,
    }


@pytest.mark.parametrize(
    "other",
    [
        rollout(([1], [2], [QUESTION], answer("4"))),
        rollout(([1], [2], [SHOT[0]], answer("2"))),
        rollout(),
    ],
)
def test_equal_answers_and_other_prompts_are_no_pair(other):
    assert dpo_record(rollout(([1], [2], [QUESTION], answer("4"))), other) is None
