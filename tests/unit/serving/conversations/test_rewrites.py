"""Agents that send a conversation back in other words continue it in tokens, where the tokens allow it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from conversation_helpers import SCOPE, TOKENIZERS, Conversations, Spoken, Table, speak
from hypothesis import given, settings
from hypothesis import strategies as st
from template_helpers import call_of, says, user

from raylight.experience.trajectories.trajectory import build_trajectories
from raylight.serving.conversations.rewrites import calls_in_text, remainder
from raylight.types import HistoryNote

CHATML = TOKENIZERS["chatml"]
MARK = "</code>"
Messages = list[dict[str, Any]]
CALLS = [["add", {"a": 1, "b": [2.5, "x"]}]]
AS_DICT = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": CALLS[0][1]}}


def respaced(messages: Messages) -> Messages:
    """Messages with other white space in every text."""
    return [
        {**m, "content": "\n " + m["content"].replace(" ", " \n ") + "\n"} if m["content"] else m
        for m in messages
    ]


def marked(messages: Messages) -> Messages:
    """Answers that end with a mark, as smolagents' CodeAgent sends them."""
    return [
        {**m, "content": m["content"] + MARK}
        if m["role"] == "assistant" and not m["content"].endswith(MARK)
        else m
        for m in messages
    ]


def annotated(messages: Messages) -> Messages:
    """Answers that are merged with the agent's own next message."""
    return [
        {**m, "content": m["content"] + "\nCalling tools:\n[{'name': 'python'}]"}
        if m["role"] == "assistant"
        else m
        for m in messages
    ]


def flattened(messages: Messages) -> Messages:
    """Calls and results as text, as smolagents' ToolCallingAgent sends them."""
    flat: Messages = []
    for m in messages:
        if m["role"] == "tool":
            flat.append(user(f"Observation:\n{m['content']}"))
        elif m.get("tool_calls"):
            calls = [
                {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
                for c in m["tool_calls"]
            ]
            flat.append(says(f"{m['content']}\nCalling tools:\n{calls}".strip()))
        else:
            flat.append(m)
    return flat


class RewritingTable(Table):
    """A table whose agent sends every request's messages in other words."""

    def __init__(self, name: str, rewrite: Callable[[Messages], Messages]) -> None:
        super().__init__(name)
        self.rewrite = rewrite
        self.notes: list[HistoryNote] = []
        self.sources: list[str] = []
        self.sent: Messages = []

    def turn(self, spoken: Spoken) -> None:
        original = self.messages
        self.messages = self.sent = self.rewrite(original)
        sent = self.conversations.read(SCOPE, self.body())
        prompt = self.conversations.prompt(sent)
        self.notes.append(prompt.note)
        self.sources.append(prompt.source)
        super().turn(spoken)
        self.messages = [*original, *self.messages[len(self.sent) :]]

    @property
    def kinds(self) -> list[str]:
        return [note.kind for note in self.notes]

    @property
    def relations(self) -> list[str]:
        return list(build_trajectories(self.calls).relations)


def talk(table: RewritingTable, turns: list[Spoken]) -> RewritingTable:
    """Have a conversation, and return its table."""
    for said in turns:
        table.turn(said)
    return table


texts = st.sampled_from(["the cat", " the\n\ncat  sat ", "x = [1, 2]\n  y", "é中", "</co"])
answers = st.builds(
    lambda text, thought, ends: speak(text, thought=thought, ends=ends),
    texts,
    st.sampled_from(["", "so it sat"]),
    st.booleans(),
)
calling = st.builds(
    lambda text, call: speak(text, call=call), texts, st.sampled_from(["", '{"b":2,"a":1.50}', '{"a":"é"}'])
)


@pytest.mark.parametrize(
    "name", ["chatml", "thinking", "headers", "channels", "parts", "open_turns", "tools"]
)
@given(turns=st.lists(answers, min_size=6, max_size=6))
@settings(max_examples=settings.default.max_examples // 4, deadline=None)
def test_other_white_space_is_one_row(name: str, turns: list[Spoken]) -> None:
    table = talk(RewritingTable(name, respaced), turns)
    assert_one_row(table)
    assert table.sources == ["rendered"] + ["spliced"] * 5
    assert set(table.kinds[1:]) <= {"white_space", "continued"}


@pytest.mark.parametrize("name", ["chatml", "thinking", "headers", "channels", "open_turns", "tools"])
@given(turns=st.lists(texts, min_size=6, max_size=6), stopped=st.lists(st.booleans(), min_size=6, max_size=6))
@settings(max_examples=settings.default.max_examples // 4, deadline=None)
def test_an_appended_stop_word_is_one_row(name: str, turns: list[str], stopped: list[bool]) -> None:
    table = RewritingTable(name, marked)
    for text, by_word in zip(turns, stopped, strict=True):
        table.turn(speak(text + MARK * by_word, ends=False))
        if by_word:  # the client receives the text without the stop word
            table.messages[-2]["content"] = table.messages[-2]["content"].removesuffix(MARK)
    assert_one_row(table)
    assert set(table.kinds[1:]) <= {"suffix", "continued"}
    assert_shows(table)


@pytest.mark.parametrize("name", ["chatml", "thinking", "headers", "open_turns", "tools"])
@given(turns=st.lists(answers, min_size=6, max_size=6))
@settings(max_examples=settings.default.max_examples // 4, deadline=None)
def test_a_merged_message_is_one_row(name: str, turns: list[Spoken]) -> None:
    table = talk(RewritingTable(name, annotated), turns)
    assert_one_row(table)
    assert set(table.kinds[1:]) <= {"suffix", "merged"}
    shown = TOKENIZERS[name].decode(table.calls[-1].prompt_ids.tolist())
    assert shown.count("[{'name': 'python'}]") == 5


@pytest.mark.parametrize("name", ["tools", "thinking"])
@given(turns=st.lists(calling, min_size=6, max_size=6))
@settings(max_examples=settings.default.max_examples // 4, deadline=None)
def test_calls_as_text_are_one_row(name: str, turns: list[Spoken]) -> None:
    table = talk(RewritingTable(name, flattened), turns)
    assert_one_row(table)
    assert set(table.kinds[1:]) <= {"calls_as_text", "continued"}
    assert "Calling tools" not in TOKENIZERS[name].decode(table.calls[-1].prompt_ids.tolist())


def assert_one_row(table: RewritingTable) -> None:
    """Assert that all calls are one row, whose tokens are the last call's."""
    made = build_trajectories(table.calls)
    assert made.relations == ["start"] + ["extension"] * (len(table.calls) - 1)
    (row,) = made.rows
    assert row.token_ids.tolist() == table.calls[-1].token_ids.tolist()
    assert row.trained_tokens == sum(len(call.output_ids) for call in table.calls)


def assert_shows(table: RewritingTable) -> None:
    """Assert that the last prompt shows what the agent sent, up to white space."""
    tokenizer = TOKENIZERS[table.name]
    *_, last = table.calls
    shown = "".join(tokenizer.decode(last.prompt_ids.tolist()).split())
    for message in table.sent:
        assert "".join(message["content"].split()) in shown


def test_without_tolerance_they_are_other_messages() -> None:
    for rewrite in (respaced, marked, annotated):
        table = RewritingTable("chatml", rewrite)
        table.conversations = Conversations(CHATML, tolerate_rewrites=False)
        for _ in range(3):
            table.turn(speak("the cat sat", ends=False))
        assert set(table.kinds[1:]) == {"answer_edited"}


@pytest.mark.parametrize("text", ["the cat", "the cat\n", ""])
def test_text_on_a_new_line_after_a_sampled_end_is_a_turn_of_its_own(text: str) -> None:
    echo = says(f"{text.strip()}\n{MARK}")

    def echoed(messages: Messages) -> Messages:
        return [echo if m["role"] == "assistant" else m for m in messages]

    table = talk(RewritingTable("chatml", echoed), [speak(text)] * 2)
    assert table.kinds == ["new", "merged"]
    shown = CHATML.decode(table.calls[-1].prompt_ids.tolist())
    assert f"{text}<|im_end|>\n<|im_start|>assistant\n{MARK}<|im_end|>" in shown


def test_text_after_a_sampled_end_is_another_answer() -> None:
    table = talk(RewritingTable("chatml", marked), [speak("the cat")] * 2)
    note = table.notes[1]
    assert (note.kind, note.message, note.offset, note.sent) == ("answer_edited", 1, 7, MARK)
    assert "had ended" in note.reason
    assert table.relations[1] != "extension"


def sampled_twice(first: str, second: str, sent: str, *, ends: bool) -> tuple[HistoryNote, str]:
    """Return the note and the prompt of a request after two answers to the same messages."""
    table = Table("chatml")
    question = table.messages
    for text in (first, second):
        table.messages = question
        table.turn(speak(text, ends=ends))
    messages = [*question, says(sent), user("and then?")]
    prompt = table.conversations.prompt(table.conversations.read(SCOPE, table.body(messages)))
    return prompt.note, CHATML.decode(prompt.tokens or [])


@pytest.mark.parametrize("answers", [("the", "the cat"), ("the cat", "the")])
def test_text_is_appended_to_the_longest_answer_that_it_begins_with(answers: tuple[str, str]) -> None:
    note, shown = sampled_twice(*answers, "the cat" + MARK, ends=False)
    assert (note.kind, note.sampled, note.sent) == ("suffix", "", MARK)
    assert f"assistant\nthe cat{MARK}" in shown


@pytest.mark.parametrize("sent", ["the cat sat", "a dog"])
def test_an_empty_answer_that_was_asked_again_is_not_replaced(sent: str) -> None:
    note, _ = sampled_twice("", "the cat", sent, ends=True)
    assert note.kind == "answer_edited"


def test_a_rewritten_turn_is_found_again_at_once() -> None:
    table = talk(RewritingTable("chatml", marked), [speak("the cat", ends=False)] * 4)
    size = table.conversations._attempts.currsize
    table.conversations._rewrites = None
    sent = table.conversations.read(SCOPE, {"messages": marked(table.messages)[:-2]})
    assert table.conversations.prompt(sent).source == "spliced"
    assert table.conversations._attempts.currsize == size


def test_a_suffix_does_not_reach_a_request_without_it() -> None:
    table = talk(RewritingTable("chatml", marked), [speak("the cat", ends=False)] * 3)
    plain = table.conversations.prompt(table.conversations.read(SCOPE, {"messages": table.messages}))
    assert plain.tokens is not None
    assert MARK not in CHATML.decode(plain.tokens)


@pytest.mark.parametrize(
    ("text", "beginning", "rest"),
    [
        ("abc", "ab", "c"),
        ("a  b\nc d", " a b", "\nc d"),
        ("ab", "a b", None),
        ("a b", "ab", None),
        ("a", "a b", None),
        ("xyz", "", "xyz"),
        ("", "", ""),
        (" a", "a ", ""),
    ],
)
def test_the_rest_of_a_text(text: str, beginning: str, rest: str | None) -> None:
    assert remainder(text, beginning) == rest


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"Calling tools:\n{[AS_DICT]}", CALLS),
        (json.dumps([AS_DICT]), CALLS),
        (json.dumps(AS_DICT), CALLS),
        (f"Action:\n{json.dumps({'name': 'add', 'arguments': json.dumps(CALLS[0][1])}, indent=2)}", CALLS),
        (f"{json.dumps(AS_DICT)}\n{json.dumps(AS_DICT)}", CALLS * 2),
        ('{"name": "add", "args": {"a": 1.0}}', [["add", {"a": 1}]]),
        ("no calls", []),
        ("[1, 2]", []),
        ("[]", []),
        ("{'name': 'add'}", []),
        ("two lines\nof text [{'name': 'add', 'args': {}}]", []),
        ("x" * 41 + "[{'name': 'add', 'args': {}}]", []),
        ("[__import__('os')]", []),
        ("[" * 100_000, []),
        ('{"name": "add", "args": {}} and more', []),
        ('[{"function": 5}]', []),
        ('[{"function": "takes arguments"}]', []),
        ("[{'name': 'add', 'args': {1, 2}}]", []),
        ("{[]: 1}", []),
    ],
)
def test_calls_in_a_text(text: str, calls: list[Any]) -> None:
    assert calls_in_text(text) == calls


def test_other_calls_as_text_are_an_edited_answer() -> None:
    def edited(messages: Messages) -> Messages:
        return [{**m, "content": m["content"].replace("1.5", "7")} for m in flattened(messages)]

    table = talk(RewritingTable("tools", edited), [speak("the cat", call='{"a":1.50}')] * 2)
    assert table.notes[1].kind == "answer_edited"


def test_a_call_that_was_edited() -> None:
    table = Table("tools")
    table.turn(speak("", call='{"a": 1}'))
    messages = [table.messages[0], says("", call_of("add", '{"a": 2}')), *table.messages[2:]]
    note = table.conversations.prompt(table.conversations.read(SCOPE, table.body(messages))).note
    assert (note.kind, note.message, note.offset) == ("call_edited", 1, 15)
    assert (note.sampled, note.sent) == ("1}]]", "2}]]")
