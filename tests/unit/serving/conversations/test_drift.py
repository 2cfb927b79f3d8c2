"""Kinds and places of requests that leave their conversations."""

import logging
from typing import Any

import pytest
from conversation_helpers import SCOPE, TOKENIZERS, Conversations
from template_helpers import ADD, call_of, result, says, user

from raylight.engines.capture_context import AttemptScope
from raylight.types import HistoryNote

Messages = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "Be brief. It is 10:15."}
CALLING = says("Adding.", call_of("add", '{"a": 1}'))
FIRST_TURN = [SYSTEM, user("U1"), CALLING, result("3"), says("It is 3.")]
TURNS: Messages = [*FIRST_TURN, user("U2"), says("A2"), user("U3")]
"""A conversation of three sampled answers, with the next message."""


def stored(tools: Any = None, name: str = "tools") -> Conversations:
    found, tokens = Conversations(TOKENIZERS[name]), [1]
    for index, message in enumerate(TURNS):
        if message["role"] == "assistant":
            tokens = [*tokens, 2, index]
            found.store(SCOPE, {"messages": TURNS[:index], "tools": tools}, message, tokens)
    return found


def note_of(messages: Messages, **body: Any) -> HistoryNote:
    found = stored(body.pop("stored_tools", None))
    return found.prompt(found.read(SCOPE, {"messages": messages, **body})).note


def changed(index: int, *messages: dict[str, Any]) -> Messages:
    """Return the turns with other messages in place of one."""
    return [*TURNS[:index], *messages, *TURNS[index + 1 :]]


@pytest.mark.parametrize(
    ("messages", "kind", "index", "offset"),
    [
        (changed(0, {**SYSTEM, "content": "Be brief. It is 10:16."}), "system_edited", 0, 20),
        (changed(0, {**SYSTEM, "role": "developer"}), "system_edited", 0, 22),
        (changed(1, user("U1, again")), "history_edited", 1, 2),
        (changed(1, user("new"), user("U1")), "history_edited", 1, 0),
        (changed(1, SYSTEM | {"content": "more"}, user("U1")), "history_edited", 1, 0),
        (changed(3, result("4")), "history_edited", 3, 0),
        (changed(2, says("Add.", call_of("add", '{"a": 1}'))), "answer_edited", 2, 3),
        (changed(2, says("Adding.", call_of("add", '{"a": 2}'))), "call_edited", 2, 15),
        (changed(2, says("Adding.")), "call_edited", 2, 1),
        (changed(4, says("It is 3. ...")), "answer_edited", 4, 8),
        ([SYSTEM, *TURNS[4:]], "history_truncated", 1, 0),
        ([SYSTEM, user("So far: 3."), *TURNS[5:]], "history_truncated", 1, 0),
        (TURNS[1:], "history_truncated", 0, 0),
    ],
)
def test_each_kind_has_its_place(messages: Messages, kind: str, index: int, offset: int) -> None:
    note = note_of(messages)
    assert (note.kind, note.message, note.offset) == (kind, index, offset)
    assert note.reason
    assert f"message {index}, character {offset}" in note.place


@pytest.mark.parametrize(
    "messages",
    [
        TURNS[:2],
        TURNS[:4],
        [SYSTEM, user("another task")],
        [user("alone")],
        [{**SYSTEM, "content": "You are a judge."}, user("U1")],
        [SYSTEM, user("another task"), says("by the agent itself"), user("go on")],
    ],
)
def test_new_contexts_and_repeated_prompts_are_no_drift(messages: Messages) -> None:
    assert note_of(messages).kind in ("new", "continued")


def test_a_conversation_and_its_forks_are_continued() -> None:
    for messages in (TURNS, TURNS[:4], [*TURNS[:-1], user("another way")], [*TURNS[:5], user("other")]):
        assert note_of(messages).kind == "continued"


def test_an_edited_answer_shows_what_was_sampled() -> None:
    note = note_of(changed(4, says("It is three.")))
    assert (note.sampled, note.sent) == ("3.", "three.")
    assert note.place == "message 4, character 6: was '3.', sent 'three.'"


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ([ADD], None, "removed add"),
        (None, [ADD], "added add"),
        ([ADD], [ADD, {"type": "function", "function": {"name": "sub"}}], "added sub"),
        ([ADD], [{**ADD, "function": {**ADD["function"], "description": "Other."}}], "changed add"),
        (["odd"], [5], "added 5; removed odd"),
        ([1, 2], [2, 1], "their order"),
    ],
)
def test_changed_tools_are_named(before: Any, after: Any, what: str) -> None:
    note = note_of(TURNS, stored_tools=before, tools=after)
    assert (note.kind, note.reason) == ("tools_changed", f"the tools of the request changed: {what}")


def test_changed_variables_of_the_template() -> None:
    assert note_of(TURNS, reasoning_effort="low").kind == "variables_changed"
    found = stored()
    other = AttemptScope("ro-1", "at-1", "judge")
    judge = found.read(other, {"messages": TURNS, "reasoning_effort": "low"})
    assert found.prompt(judge).note.kind == "new", "conversations of another agent"


def test_content_that_cannot_be_compared() -> None:
    audio = user([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}])
    note = note_of([*TURNS, says("A3"), audio])
    assert (note.kind, note.reason) == ("unsupported", "a content part of type 'input_audio'")
    assert note_of(TURNS, documents=[{"text": "x"}]).kind == "unsupported"


def test_a_template_that_does_not_allow_it(caplog: pytest.LogCaptureFixture) -> None:
    found = Conversations(TOKENIZERS["strict"])
    found.store(SCOPE, {"messages": [user("U1")]}, says("A"), [1, 2])
    with caplog.at_level(logging.WARNING):
        sent = found.read(SCOPE, {"messages": [user("U1"), says("A"), user("U2"), user("U3")]})
        note = found.prompt(sent).note
    assert note.kind == "template"
    assert "roles must alternate" in note.reason


def test_a_large_tree_is_searched_up_to_a_limit() -> None:
    found = Conversations(TOKENIZERS["chatml"])
    for number in range(2500):
        found.store(SCOPE, {"messages": [user(f"U{number}")]}, says(f"A{number}"), [1, number])
    sent = found.read(SCOPE, {"messages": [user("x"), says("A2499"), user("y")]})
    assert found.prompt(sent).note.kind == "history_edited"
