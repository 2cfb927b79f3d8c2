"""A conversation's past tokens stay as sampled, whatever the template and the agent do to its messages."""

import logging
from sys import getsizeof
from typing import Any

import pytest
from conversation_helpers import (
    SCOPE,
    TOKENIZERS,
    TOOL_TEMPLATES,
    Conversations,
    Splice,
    Spoken,
    Table,
    speak,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from template_helpers import ADD, call_of, result, says, user

from raylight.engines.capture_context import AttemptScope
from raylight.experience.trajectories.trajectory import build_trajectories
from raylight.serving.conversations import turn_tree
from raylight.serving.conversations.message_forms import UnsupportedMessage, message_forms
from raylight.serving.conversations.turn_tree import OVERHEAD

FIRST = {"messages": [user("U1")]}
TOKENS = [1, 2, 3]
TWO_CALLS = [call_of("f", "{}"), call_of("g", "{}")]

spoken = st.builds(
    Spoken,
    thought=st.sampled_from(["", "the cat\n\n sat", " so "]),
    text=st.lists(st.integers(0, 255 + 70), max_size=12).map(
        lambda ids: [i for i in ids if i not in TOKENIZERS["chatml"].all_special_ids]
    ),
    call=st.sampled_from(["", '{"b":2,"a":1.50}', '{ "a" : [1,\n2], "c": "\\u00e9" }', "{}"]),
    ends=st.booleans(),
)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(turns=st.lists(spoken, min_size=10, max_size=10))
@settings(max_examples=settings.default.max_examples // 3, deadline=None)
def test_ten_turns_are_one_trajectory(name: str, turns: list[Spoken]) -> None:
    table = Table(name)
    for said in turns:
        table.turn(said)
    for before, call in zip(table.calls, table.calls[1:], strict=False):
        earlier = before.token_ids.tolist()
        assert call.prompt_ids.tolist()[: len(earlier)] == earlier
    trajectories = build_trajectories(table.calls)
    assert trajectories.relations == ["start"] + ["extension"] * 9
    assert len(trajectories.rows) == 1
    assert table.conversations.counts.spliced == 9


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("thinking", speak("the cat", thought="so it sat")),
        ("collapsing", speak("the  cat\n\nsat")),
        ("tools", speak("the cat", call='{"b":2,"a":1.50}')),
        ("chatml", Spoken(text=[*TOKENIZERS["chatml"].encode("t"), *TOKENIZERS["chatml"].encode("he")])),
        ("headers", speak(" the cat \n")),
    ],
)
def test_the_same_conversation_drifts_without(name: str, said: Spoken) -> None:
    rows = {}
    for splices in (True, False):
        table = Table(name, splices)
        for _ in range(10):
            table.turn(said)
        rows[splices] = len(build_trajectories(table.calls).rows)
    assert rows[True] == 1
    assert rows[False] > 1


@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - {"thinking"}))
def test_what_the_template_would_keep_is_spliced_to_what_it_renders(name: str) -> None:
    table = Table(name)
    for number in range(4):
        table.turn(speak("the cat", call='{"a": 1}' if name == "tools" and number % 2 else ""))
    body = {"messages": table.messages, "tools": [ADD] if name in TOOL_TEMPLATES else None}
    spliced, text = table.conversations.splice(SCOPE, body), table.tokenizer.decode(table.render(body))
    # one has a space before the end
    assert table.tokenizer.decode(spliced.tokens) == text.replace(" the cat </s>", "the cat</s>")


def conversations(name: str = "chatml", **more: Any) -> Conversations:
    return Conversations(TOKENIZERS[name], **more)


def known(message: dict[str, Any], name: str = "chatml", **body: Any) -> Conversations:
    """Return Conversations that store one conversation: a question and this answer."""
    found = conversations(name)
    found.store(SCOPE, FIRST | body, message, TOKENS)
    return found


def spliced(found: Conversations, body: dict[str, Any]) -> Splice:
    """Return a prompt that must be known."""
    splice = found.splice(SCOPE, body)
    assert splice is not None
    return splice


def ending(found: Conversations, body: dict[str, Any]) -> str:
    """Return a prompt's new turns."""
    splice = spliced(found, body)
    return str(TOKENIZERS["thinking"].decode(splice.tokens[len(TOKENS) :]))


def then(message: Any, *new: dict[str, Any], **body: Any) -> dict[str, Any]:
    return {"messages": [user("U1"), message, *(new or (user("U2"),))], **body}


@pytest.mark.parametrize(
    ("answer", "echo"),
    [
        (says(" A\n"), says("A")),
        (says("A"), says([{"type": "text", "text": "A"}])),
        (says("A"), says([{"type": "thinking", "thinking": "so"}, {"type": "output_text", "text": "A"}])),
        (says(None), says("")),
        (says("A") | {"reasoning_content": "so", "refusal": None}, says("A") | {"reasoning": "other"}),
        (says("A"), says("A") | {"name": "bob"}),
        (says("<think>so</think>\n\nA"), says("A")),
        (says("so</think>\n\nA"), says("A")),
        (says(None, call_of("f", '{"a":1.0,"b":{}}')), says("", call_of("f", '{ "b": {},\n "a": 1 }', "x"))),
        (says(None, call_of("f", "")), says(None, call_of("f", "{}"))),
        (says(None, call_of("f", "not JSON ")), says(None, call_of("f", "not JSON"))),
        (says("A") | {"tool_calls": []}, says("A") | {"tool_calls": None}),
    ],
)
def test_the_same_answer_in_other_words(answer: dict[str, Any], echo: dict[str, Any]) -> None:
    prompt = spliced(known(answer, "tools"), then(echo))
    assert prompt.tokens[: len(TOKENS)] == TOKENS


@pytest.mark.parametrize(
    ("answer", "echo"),
    [
        (says("A"), says("B")),
        (says("A"), says("A.")),
        (says("a b"), says("ab")),
        (says("A"), user("A")),
        (says("A", call_of("f", "{}")), says("A")),
        (says("A", call_of("f", "{}")), says("A", call_of("g", "{}"))),
        (says("A", call_of("f", '{"a":1}')), says("A", call_of("f", '{"a":"1"}'))),
        (says("A", call_of("f", '{"a":1}')), says("A", call_of("f", '{"a":true}'))),
        (says("A", *TWO_CALLS), says("A", *reversed(TWO_CALLS))),
        (says("see <think>x</think> B"), says("B")),
    ],
)
def test_an_edited_answer_is_another_one(answer: dict[str, Any], echo: dict[str, Any]) -> None:
    assert known(answer, "tools").splice(SCOPE, then(echo)) is None


def test_other_messages_before_the_answer_are_another_conversation() -> None:
    found = known(says("A"))
    assert found.splice(SCOPE, {"messages": [user("other"), says("A"), user("U2")]}) is None
    assert found.splice(SCOPE, {"messages": [user("U1") | {"name": "bob"}, says("A"), user("U2")]}) is None
    assert found.splice(SCOPE, {"messages": [says("A"), user("U2")]}) is None
    spliced(found, {"messages": [user([{"type": "text", "text": "U1 "}]), says("A"), user("U2")]})


def test_results_belong_to_calls_by_place_not_by_label() -> None:
    found, calls = conversations("tools"), [call_of("f", "{}", "a"), call_of("g", "{}", "b")]
    body = {"messages": [user("U1"), says(None, *calls), result("same", "a"), result("same", "b")]}
    found.store(SCOPE, body, says("A"), TOKENS)
    renamed = [call_of("f", "{}", "x"), call_of("g", "{}", "y")]
    tail = [says("A"), user("U2")]
    again = [user("U1"), says(None, *renamed), result("same", "x"), result("same", "y"), *tail]
    assert found.splice(SCOPE, {"messages": again})
    swapped = {"messages": [user("U1"), says(None, *calls), result("same", "b"), result("same", "a"), *tail]}
    assert found.splice(SCOPE, swapped) is None


@pytest.mark.parametrize(
    "root",
    [{"tools": [ADD]}, {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "low"}],
)
def test_what_renders_otherwise_is_another_conversation(root: dict[str, Any]) -> None:
    assert known(says("A"), "thinking").splice(SCOPE, then(says("A"), **root)) is None
    assert known(says("A"), "thinking", **root).splice(SCOPE, then(says("A"))) is None
    assert known(says("A"), "thinking", **root).splice(SCOPE, then(says("A"), **root)) is not None


def test_a_new_name_of_the_model_changes_nothing() -> None:
    spliced(known(says("A"), model="policy@1"), then(says("A"), model="policy@2", temperature=0.5))
    spliced(known(says("A"), tools=[]), then(says("A")))


def test_the_engines_defaults_are_the_templates_too() -> None:
    found = conversations("thinking", template_kwargs={"enable_thinking": False})
    found.store(SCOPE, FIRST, says("A"), TOKENS)
    assert ending(found, then(says("A"))).endswith("</think>\n\n")
    asked = {"chat_template_kwargs": {"enable_thinking": True}}
    found.store(SCOPE, FIRST | asked, says("A"), TOKENS)
    assert ending(found, then(says("A"), **asked)).endswith("assistant\n")
    found.store(SCOPE, FIRST | {"reasoning_effort": "high"}, says("A"), TOKENS)
    assert ending(found, then(says("A"), reasoning_effort="high")).endswith("assistant\n")


SPECIAL_BODIES: list[dict[str, Any]] = [
    {"continue_final_message": True},
    {"add_generation_prompt": False},
    {"chat_template": "x"},
    {"documents": [{"text": "x"}]},
    {"prompt_embeds": "x"},
    {"truncate_prompt_tokens": 5},
    {"echo": True},
    {"kv_transfer_params": {"a": 1}},
    {"chat_template_kwargs": "x"},
]


@pytest.mark.parametrize("special", SPECIAL_BODIES, ids=lambda body: next(iter(body)))
def test_special_requests_are_neither_spliced_nor_remembered(special: dict[str, Any]) -> None:
    found = known(says("A"))
    assert found.splice(SCOPE, then(says("A"), **special)) is None
    assert found.splice(SCOPE, then(says("A"))) is not None
    assert not known(says("A"), **special).has(SCOPE, FIRST, says("A"))
    assert found.missing(SCOPE, then(says("B"))) is not None
    assert found.missing(SCOPE, then(says("B"), **special)) is None


IMAGE = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
MALFORMED: list[Any] = [
    user(IMAGE),
    user(5),
    user([5]),
    user([{"type": "text"}]),
    user("\ud800"),
    {"content": "no role"},
    {"role": 5, "content": "x"},
    "text",
    None,
    5,
    [],
    says("x") | {"tool_calls": 5},
    says("x") | {"tool_calls": ["x"]},
    says("x") | {"tool_calls": [{"type": "custom"}]},
    says("x") | {"tool_calls": [{"id": [], "function": {"name": "f"}}]},
    says("x") | {"audio": {"id": "x"}},
    {"role": "tool", "content": {"a": 1}},
    {"role": "tool", "tool_call_id": [], "content": [None]},
]


@pytest.mark.parametrize("message", MALFORMED, ids=repr)
def test_messages_that_are_not_understood_are_left_to_the_engine(message: Any) -> None:
    found = known(says("A"))
    assert found.splice(SCOPE, then(says("A"), message)) is None
    assert found.missing(SCOPE, then(says("B"), message)) is None
    found.store(SCOPE, {"messages": [message]}, says("A"), [7])
    assert found.splice(SCOPE, {"messages": [message, says("A"), user("U2")]}) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
anything = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "system"]) | json_values,
        "content": st.just("x") | json_values,
        "tool_calls": json_values
        | st.lists(st.fixed_dictionaries({"function": st.dictionaries(st.just("name"), json_values)})),
        "tool_call_id": json_values,
        "reasoning_content": json_values,
        "name": json_values,
    },
)


@given(
    messages=st.lists(anything | json_values, max_size=3),
    body=st.dictionaries(
        st.sampled_from(["tools", "chat_template_kwargs", "reasoning_effort", "documents"]), json_values
    ),
)
def test_whatever_is_sent_nothing_is_raised(messages: list[Any], body: dict[str, Any]) -> None:
    found = known(says("A"), "tools", **body)
    found.splice(SCOPE, then(says("A"), *messages, **body))
    found.missing(SCOPE, then(says("A"), *messages, **body))
    found.store(SCOPE, {"messages": messages, **body}, says("A"), TOKENS)
    found.splice(SCOPE, {"messages": [*messages, says("A"), *messages], **body})


@pytest.mark.parametrize("messages", [None, 5, {}, "x", []])
def test_a_body_without_messages_is_left_to_the_engine(messages: Any) -> None:
    found = known(says("A"))
    assert found.splice(SCOPE, {"messages": messages}) is None
    assert found.splice(SCOPE, {}) is None
    assert found.missing(SCOPE, {"messages": messages}) is None
    found.store(SCOPE, {}, says("A"), [1])


def test_something_new_must_come_after_the_answer() -> None:
    found = known(says("A"))
    assert found.splice(SCOPE, {"messages": [user("U1"), says("A")]}) is None
    assert found.splice(SCOPE, FIRST) is None


def test_the_longest_known_conversation_is_continued_and_a_fork_finds_its_own() -> None:
    found, first = known(says("A")), then(says("A"))
    prompt = spliced(found, first)
    found.store(SCOPE, first, says("B"), [*prompt.tokens, 9])
    longest = spliced(found, {"messages": [*first["messages"], says("B"), user("U3")]})
    assert longest.tokens[: len(prompt.tokens) + 1] == [*prompt.tokens, 9]
    fork = spliced(found, then(says("A"), user("another way")))
    assert fork.tokens[: len(TOKENS)] == TOKENS
    edited = spliced(found, {"messages": [*first["messages"], says("edited"), user("U3")]})
    assert "edited" in TOKENIZERS["chatml"].decode(edited.tokens[len(TOKENS) :])
    assert (longest.complete, fork.complete, edited.complete) == (True, True, False)


def test_what_is_missing_is_the_last_answer_that_is_not_known() -> None:
    found, first = known(says("A")), then(says("A"))
    assert found.missing(SCOPE, FIRST) is None, "it has no past"
    assert found.missing(SCOPE, first) is None
    assert found.missing(SCOPE, then(says("A"), says("B"))) is None, "the last message cannot be continued"
    second = {"messages": [*first["messages"], says("B"), user("U3")]}
    missing = found.missing(SCOPE, second)
    assert missing is not None
    assert missing == found.missing(SCOPE, {"messages": [*second["messages"], user("and U4")]})
    assert missing != found.missing(SCOPE, {"messages": [*first["messages"], says("C"), user("U3")]})
    splice = spliced(found, second)
    assert (splice.tokens[: len(TOKENS)], splice.complete) == (TOKENS, False)
    assert vars(found.counts) == {"spliced": 0, "partly": 1, "rendered": 0, "refused_by_template": 0}
    found.store(SCOPE, first, says("B"), [*TOKENS, 9])
    assert found.missing(SCOPE, second) is None
    whole = spliced(found, second)
    assert (whole.tokens[: len(TOKENS) + 1], whole.complete) == ([*TOKENS, 9], True)


def test_of_equal_answers_the_latest_counts() -> None:
    found = known(says("A"))
    found.store(SCOPE, FIRST, says("A "), [4, 5])
    prompt = spliced(found, then(says("A")))
    assert prompt.tokens[:2] == [4, 5]


def test_parallel_answers_are_all_known() -> None:
    found = conversations()
    for n in range(4):
        found.store(SCOPE, FIRST, says(f"A{n}"), [1, 2, 10 + n])
    for n in range(4):
        prompt = spliced(found, then(says(f"A{n}")))
        assert prompt.tokens[:3] == [1, 2, 10 + n]


def test_attempts_and_agents_are_apart() -> None:
    found = known(says("A"))
    for ids in (("ro-1", "at-2"), ("ro-2", "at-1"), ("ro-1", "at-1", "judge")):
        other = AttemptScope(*ids)
        assert found.splice(other, then(says("A"))) is None
        assert not found.has(other, FIRST, says("A"))
        assert found.missing(other, then(says("A"))) is not None
    assert found.has(SCOPE, FIRST, says("A"))


def test_an_attempt_is_forgotten_with_all_its_agents() -> None:
    found = known(says("A"))
    found.store(AttemptScope("ro-1", "at-1", "judge"), FIRST, says("A"), TOKENS)
    found.forget(SCOPE)
    found.forget(SCOPE)
    assert not found.has(SCOPE, FIRST, says("A"))
    assert found.splice(SCOPE, then(says("A"))) is None
    assert found._attempts.currsize == 0


def test_the_attempt_not_used_for_longest_is_forgotten_first() -> None:
    found = conversations(capacity_bytes=3 * (2 * OVERHEAD + 200))
    scopes = [AttemptScope("ro", f"at-{n}") for n in range(4)]
    for scope in scopes[:3]:
        found.store(scope, FIRST, says("A"), list(range(10)))
    assert found.splice(scopes[0], then(says("A"))) is not None
    found.store(scopes[3], FIRST, says("A"), list(range(10)))
    assert [found.has(scope, FIRST, says("A")) for scope in scopes] == [True, False, True, True]


def test_of_a_long_attempt_the_conversations_not_used_for_longest_are_forgotten() -> None:
    capacity = 40 * OVERHEAD
    found = conversations(capacity_bytes=capacity)
    openings = [{"messages": [user(f"question {n}")]} for n in range(200)]
    found.store(SCOPE, FIRST, says("A"), TOKENS)
    for number, opening in enumerate(openings):
        found.store(SCOPE, opening, says("A"), [number, *TOKENS])
        assert found.splice(SCOPE, then(says("A"))) is not None
        assert found._attempts.currsize <= capacity
    kept = [number for number, opening in enumerate(openings) if found.has(SCOPE, opening, says("A"))]
    assert kept == list(range(kept[0], 200))
    assert len(kept) > 5
    assert found._attempts.currsize == sum(
        turn.size
        for attempt in found._attempts.values()
        for turn in turn_tree._unique_turns(root.turns for root in attempt.roots.values())
    )


def test_a_long_conversation_takes_the_room_of_its_tokens() -> None:
    table = Table("chatml")
    for _ in range(30):
        table.turn(speak("the cat sat on the mat"))
    last = table.calls[-1]
    tokens = len(last.prompt_ids) + len(last.output_ids)
    texts = sum(getsizeof(message["content"].strip()) for message in table.messages[:-1])
    assert table.conversations._attempts.currsize == 4 * tokens + texts + 60 * OVERHEAD


def test_the_counts_and_one_word_of_why(caplog: pytest.LogCaptureFixture) -> None:
    found = conversations("strict")
    found.store(SCOPE, FIRST, says("A"), TOKENS)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert found.splice(SCOPE, then(says("A"), user("U2"), user("U3"))) is None
    assert found.splice(SCOPE, FIRST) is None
    assert found.splice(SCOPE, then(says("A"))) is not None
    assert vars(found.counts) == {"spliced": 1, "partly": 0, "rendered": 1, "refused_by_template": 3}
    assert caplog.text.count("roles must alternate") == 1


@pytest.mark.parametrize(
    "part", [{"type": [], "text": "a"}, {"type": {}, "text": "a"}, {"text": "a"}, 1, None]
)
def test_a_part_of_no_known_type_is_left_to_the_engine(part: Any) -> None:
    with pytest.raises(UnsupportedMessage):
        message_forms([{"role": "user", "content": [part]}])
