"""Prompts that a teacher reads instead of the model's: which call they change, and the tokens after them."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import make_finished, make_generation, make_key

from raylight import semconv
from raylight.errors import ConfigError, TeacherPromptError
from raylight.experience.teachers import (
    changed_prompts,
    check_prompt_function,
    first_call,
    replace_prompt,
)
from raylight.experience.trajectories.row_rules import DEFAULT_RULES, learned_rows
from raylight.types import FinishedRollout, Span, Trajectory

QUESTION = {"role": "user", "content": "2+2="}
PARAMETERS = {"type": "object", "properties": {"b": {}, "a": {}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]


def rollout(
    *calls: tuple[list[int], list[int], Any], dialect: str = "chat", tools: Any = None, **parameters: Any
) -> FinishedRollout:
    """A rollout with calls: the tokens of prompt and answer, and the messages of the prompt."""
    finished = make_finished(1.0, calls=0)
    finished.rollout.input = {"sum": 4}
    for number, (prompt, output, messages) in enumerate(calls):
        key = make_key(finished.rollout.rollout_id)
        finished.generations.append(make_generation(prompt, output, key=key, start=float(number)))
        attributes = {
            semconv.CALL_ID: key.call_id,
            semconv.DIALECT: dialect,
            semconv.INPUT_MESSAGES: json.dumps(messages),
            semconv.REQUEST_PARAMETERS: json.dumps({"temperature": 1.0, **parameters}),
        } | ({semconv.TOOL_DEFINITIONS: json.dumps(tools)} if tools else {})
        finished.spans.append(
            Span.from_attributes(
                rollout_id=finished.rollout.rollout_id,
                attempt_id="at-1",
                sequence_id=number,
                name="chat",
                attributes=attributes,
            )
        )
    return finished


def rows_of(finished: FinishedRollout) -> list[Trajectory]:
    return learned_rows(finished, DEFAULT_RULES)


def with_hint(task: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": f"It is {task['sum']}."}, *messages]


def test_the_first_prompt_of_a_conversation_with_tools_is_changed() -> None:
    later = [QUESTION, {"role": "assistant", "content": "add"}, {"role": "tool", "content": "4"}]
    finished = rollout(
        ([1, 2], [3, 4], [QUESTION]),
        ([1, 2, 3, 4, 5], [6], later),
        tools=TOOLS,
        chat_template_kwargs={"x": 1},
    )
    (row,) = rows_of(finished)
    (change,) = changed_prompts([row], [finished], with_hint)
    assert change.tokens.tolist() == [1, 2]
    common = {"tools": TOOLS, "chat_template_kwargs": {"x": 1}}
    assert json.loads(change.own) == common | {"messages": [QUESTION]}
    assert json.loads(change.teacher) == common | {"messages": with_hint({"sum": 4}, [QUESTION])}
    assert all(json.dumps(TOOLS) in text for text in (change.own, change.teacher)), "templates keep the order"
    ids, start = replace_prompt(row, change.tokens, [9, 9, 9])
    assert (ids.tolist(), start) == ([9, 9, 9, 3, 4, 5, 6], 3)


def test_an_effort_of_reasoning_reaches_the_template_as_in_vllm() -> None:
    finished = rollout(([1], [2], [QUESTION]), reasoning_effort="low")
    (change,) = changed_prompts(rows_of(finished), [finished], with_hint)
    found = json.loads(change.teacher)["chat_template_kwargs"]
    assert found == {"enable_thinking": True, "reasoning_effort": "low"}


def test_a_fork_keeps_the_tokens_after_the_first_prompt() -> None:
    """The second call continues the first; the third goes another way after the first answer."""
    other = [QUESTION, {"role": "assistant", "content": "3"}, {"role": "user", "content": "Sure?"}]
    finished = rollout(
        ([1, 2], [3], [QUESTION]), ([1, 2, 3, 4], [5], other), ([1, 2, 3, 6], [7], [*other, QUESTION])
    )
    rows = rows_of(finished)
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]
    seen = []

    def hint(task: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        seen.append(list(messages))
        messages.append(QUESTION)  # the function may change what it was given
        return messages

    changes = changed_prompts(rows, [finished], hint)
    assert seen == [[QUESTION]]  # once for both rows
    assert [change and change.tokens.tolist() for change in changes] == [[1, 2], [1, 2]]
    ids, start = replace_prompt(rows[1], finished.generations[0].prompt_ids, [8])
    assert (ids.tolist(), start) == ([8, 3, 6, 7], 3)  # 3 was trained in the first row


def test_a_row_that_was_cut_begins_with_its_call() -> None:
    finished = rollout(([1, 2], [3, 4, 5], [QUESTION]), ([7], [3], [QUESTION]))
    cut = Trajectory(finished.rollout.rollout_id, [1, 2, 3], [0, 0, 1], [0, 0, -1], [-1, -1, 0])
    assert first_call(cut, finished.generations) is finished.generations[0]


def test_parallel_samples_of_a_prompt_are_told_apart() -> None:
    finished = rollout(([1, 2], [3], [QUESTION]), ([1, 2], [4], [QUESTION]))
    rows = rows_of(finished)
    assert [first_call(row, finished.generations) for row in rows] == finished.generations


def test_unchanged_messages_leave_the_prompt_as_it_was() -> None:
    finished = rollout(([1, 2], [3], [QUESTION]))
    rows = rows_of(finished)
    assert changed_prompts(rows, [finished], lambda task, messages: messages) == [None]


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=8),
    st.lists(st.integers(0, 99), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=12),
)
def test_trained_tokens_stay_as_they_were_sampled(
    own: list[int], other: list[int], rest: list[tuple[int, bool]]
) -> None:
    mask = [0] * len(own) + [int(trained) for _, trained in rest]
    row = Trajectory("r", own + [token for token, _ in rest], mask, np.zeros(len(mask)), [-1] * len(mask))
    ids, start = replace_prompt(row, np.asarray(own, np.int32), other)
    assert ids[: len(other)].tolist() == other
    assert ids[start:].tolist() == row.token_ids[row.prompt_length :].tolist()
    assert ids.dtype == row.token_ids.dtype


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"returned None .* unchanged ones where"),
        ("2+2=", r"returned '2\+2='"),
        ([], r"returned \[\]"),
        ({"role": "user", "content": ""}, r"returned \{"),
        (["2+2="], r"as a message .* a dict with role and content"),
        ([{"content": "2+2="}], "as a message"),
        ([{"role": "user", "content": object()}], "are not JSON"),
    ],
)
def test_what_is_no_list_of_messages_is_an_error(returned: Any, message: str) -> None:
    finished = rollout(([1, 2], [3], [QUESTION]))
    with pytest.raises(TeacherPromptError, match=message):
        changed_prompts(rows_of(finished), [finished], lambda task, messages: returned)


def test_an_error_of_the_function_names_the_rollout() -> None:
    finished = rollout(([1, 2], [3], [QUESTION]))
    with pytest.raises(TeacherPromptError, match=rf"KeyError for rollout {finished.rollout.rollout_id}"):
        changed_prompts(rows_of(finished), [finished], lambda task, messages: task["answer"])


def test_plain_completions_are_an_error() -> None:
    finished = rollout(([1, 2], [3], [{"role": "user", "content": "2+2="}]), dialect="completions")
    with pytest.raises(TeacherPromptError, match=r"has no messages .* let the agent use chat"):
        changed_prompts(rows_of(finished), [finished], with_hint)
    finished.spans.clear()  # a custom engine records none
    with pytest.raises(TeacherPromptError, match="has no messages"):
        changed_prompts(rows_of(finished), [finished], with_hint)


async def waits(task: Any, messages: Any) -> Any:
    return messages


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (waits, "is a coroutine function; give a plain one"),
        (lambda messages: messages, "must take two arguments, the task and the messages"),
        (lambda task, messages, reward: messages, "must take two arguments"),
    ],
)
def test_a_function_with_other_arguments_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_prompt_function(function)
    check_prompt_function(with_hint)
