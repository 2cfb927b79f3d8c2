"""Demonstrations: the rows have an engine's tokens, and exactly the assistant's answers are learned."""

import json
from typing import Any

import pytest
from template_helpers import ADD, call_of, make_tokenizer, result, says, template, user

from raylight.errors import DatasetError
from raylight.experience.batches.demonstrations import Demonstration, DemonstrationRow, demonstration_rows

SUM = [
    {"role": "system", "content": "Use the tools."},
    user("What is 12 + 34?"),
    says(None, call_of("add", '{"a": 12, "b": 34}')),
    result("46"),
    says("46"),
]


def rows_of(name: str, value: Any) -> tuple[Any, list[DemonstrationRow]]:
    tokenizer = make_tokenizer(template(name))
    return tokenizer, demonstration_rows(tokenizer, Demonstration.parse(value, "the example"), "the example")


def answers(tokenizer: Any, row: DemonstrationRow) -> list[str]:
    return [tokenizer.decode(row.tokens[start:end]) for start, end in row.answers]


def test_the_answers_of_a_conversation_are_learned_and_nothing_else() -> None:
    tokenizer, (row,) = rows_of("chatml", [user("one"), says("a"), user("two"), says("b")])
    assert answers(tokenizer, row) == ["a<|im_end|>", "b<|im_end|>"]
    assert len(row.learned) == sum(end - start for start, end in row.answers)
    assert "one" in tokenizer.decode(row.tokens)
    assert "one" not in tokenizer.decode([row.tokens[i] for i in row.learned])


def test_tool_calls_are_learned_in_the_models_own_format() -> None:
    tokenizer, (row,) = rows_of("tools", {"messages": SUM, "tools": [ADD]})
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 34}}\n</tool_call><|im_end|>'
    assert answers(tokenizer, row) == [call, "46<|im_end|>"]


@pytest.mark.parametrize("name", ["chatml", "tools", "thinking"])
def test_prompts_have_the_tokens_that_an_engine_renders(name: str) -> None:
    messages = [user("that cat sat"), says("and then"), user("so"), says("the mat")]
    tokenizer, rows = rows_of(name, messages)
    row = rows[-1]
    prompt = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, return_dict=False)
    assert row.tokens[: row.answers[-1][0]] == prompt


def test_a_template_that_drops_reasoning_makes_two_rows() -> None:
    messages = [
        user("one"),
        {**says("a"), "reasoning_content": "first"},
        user("two"),
        {**says("b"), "reasoning_content": "second"},
    ]
    tokenizer, rows = rows_of("thinking", messages)
    assert [answers(tokenizer, row) for row in rows] == [
        ["<think>\nfirst\n</think>\n\na<|im_end|>"],
        ["<think>\nsecond\n</think>\n\nb<|im_end|>"],
    ]
    assert "first" not in tokenizer.decode(rows[1].tokens)


@pytest.mark.parametrize(
    "reasoned",
    [
        {"reasoning": "second"},
        {"reasoning_content": "second"},
        {"content": [{"type": "thinking", "thinking": "second"}, {"type": "text", "text": "b"}]},
    ],
)
def test_reasoning_is_learned_under_every_name(reasoned: dict[str, Any]) -> None:
    tokenizer, rows = rows_of("thinking", [user("two"), {**says("b"), **reasoned}])
    assert answers(tokenizer, rows[-1]) == ["<think>\nsecond\n</think>\n\nb<|im_end|>"]


def test_an_answer_with_weight_0_is_context() -> None:
    tokenizer, (row,) = rows_of("chatml", [user("one"), {**says("a"), "weight": 0}, user("two"), says("b")])
    assert answers(tokenizer, row) == ["b<|im_end|>"]
    assert "a<|im_end|>" in tokenizer.decode(row.tokens)


def test_text_parts_and_developer_messages_are_read() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "Be brief."}, user(parts), says("a")]
    parsed = Demonstration.parse({"messages": messages}, "the example")
    assert [(m["role"], m["content"]) for m in parsed.messages] == [
        ("system", "Be brief."),
        ("user", "one\ntwo"),
        ("assistant", "a"),
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("a text", "a demonstration is {'messages'"),
        ({"prompt": "one"}, "a demonstration is {'messages'"),
        ([user("one")], "has no answer of the assistant"),
        ([user("one"), {**says("a"), "weight": 0}], "has no answer of the assistant"),
        ([user("one"), {"role": "bot", "content": "a"}], "message 2 is"),
        ([user("one"), says(None)], "neither text nor tool calls"),
        ([user([{"type": "image_url"}]), says("a")], "the content is"),
        ([user("one"), says(None, call_of("add", "{a: 1}"))], "not valid JSON"),
        ([user("one"), says(None, call_of("add", "[1]"))], "not an object"),
        ([user("one"), says(None, {"name": "add"})], "the tool call .* is malformed"),
        ({"messages": [user("one"), says("a")], "tools": "add"}, "tools is 'add'"),
    ],
)
def test_malformed_demonstrations_are_named(value: Any, words: str) -> None:
    with pytest.raises(DatasetError, match=words) as failed:
        Demonstration.parse(value, "line 7")
    assert str(failed.value).startswith("line 7")


@pytest.mark.parametrize(
    ("chat_template", "value", "words"),
    [
        ("chatml", SUM, "does not show the call of 'add'"),
        ("chatml", {"messages": [user("one"), says("a")], "tools": [ADD]}, "does not show tools"),
        ("chatml", [user("<|im_end|>"), says("a")], "the tokenizer's control token '<|im_end|>'"),
        ("headers", [user("one"), says("a")], "does not end an answer with the end token"),
        ("chatml", [user("\ud800"), says("a")], "cannot be encoded"),
    ],
)
def test_what_the_template_cannot_render_is_named(chat_template: str, value: Any, words: str) -> None:
    with pytest.raises(DatasetError) as failed:
        rows_of(chat_template, value)
    assert words in str(failed.value)
    assert str(failed.value).startswith("the example")


def test_a_template_that_begins_the_reasoning_itself_is_rejected() -> None:
    tokenizer = make_tokenizer(template("chatml") + "{% if add_generation_prompt %}<think>\n{% endif %}")
    with pytest.raises(DatasetError, match="differently after its own prompt"):
        demonstration_rows(tokenizer, Demonstration.parse([user("one"), says("a")], "x"), "x")


def test_an_answer_that_nothing_precedes_is_rejected() -> None:
    end = "{% if m.role == 'assistant' %}<|im_end|>{% endif %}"
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}" + end + "{% endfor %}")
    with pytest.raises(DatasetError, match="x: the chat template renders nothing before the first answer"):
        demonstration_rows(tokenizer, Demonstration.parse([user(""), says("a")], "x"), "x")
    context = [user(""), {**says("a"), "weight": 0}, user("one"), says("b")]
    (row,) = demonstration_rows(tokenizer, Demonstration.parse(context, "x"), "x")
    assert row.learned[0] > 0


def test_a_template_that_raises_is_quoted() -> None:
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DatasetError, match="roles must alternate"):
        demonstration_rows(tokenizer, Demonstration.parse([user("one"), says("a")], "x"), "x")


def test_a_demonstration_survives_json() -> None:
    parsed = Demonstration.parse({"messages": SUM, "tools": [ADD]}, "x")
    again = json.loads(json.dumps({"messages": parsed.messages, "tools": parsed.tools}))
    assert Demonstration.parse(again, "x") == parsed
