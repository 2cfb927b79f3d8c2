"""New turns are rendered exactly as in the whole conversation, or rejected."""

from typing import Any

import pytest
from template_helpers import ADD, call_of, make_tokenizer, result, says, template, user

from raylight.serving.conversations.rendering import FIRST, MAX_SHAPES, Renderer, UnsupportedTemplate

CALL = call_of("add", {"a": 1, "b": [2]})
ASKED = [user("U1"), says("A1"), user("U2")]
CALLED = [user("U1"), says("", CALL), result("3.5")]
CHATML_U2 = "<|im_end|>\n<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n"
HEADERS_U2 = (
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU2"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
CHANNELS_RESULT = "<|call|><|start|>functions.add to=assistant<|message|>3.5<|end|><|start|>assistant"
TURNS = "{%- for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content + '<|im_end|>' }}{% endfor %}"

WITHIN = TURNS.replace(
    "m.content +", "m.content + (messages[2].content if loop.index == 2 else '') +"
).replace("messages %}", "messages if m.role != 'tool' %}")
"""Renders a tool's result within the turn that called it."""

WITHIN_CALL = (
    "{%- for m in messages %}{{ m.role if m.role != 'tool' else '' }}{{ '<|end|>' if m.role != 'assistant' "
    "else m.content }}{%- for c in m.tool_calls or [] %}{{ (c.function.arguments | tojson) + '<|call|>|' "
    "}}{{ messages[2].content if messages | length > 2 else '' }}|{% endfor %}{% endfor %}"
)
"""The same, with a special token before the result that does not end the turn."""


def after(
    chat_template: str, messages: list[dict[str, Any]], answered: int = 1, tools: Any = None, **kwargs: Any
) -> str:
    return text_after(Renderer(make_tokenizer(chat_template)), messages, answered, tools, kwargs)


def text_after(
    renderer: Renderer,
    messages: list[dict[str, Any]],
    answered: int,
    tools: Any = None,
    variables: Any = None,
) -> str:
    """Return the rendered text after an answer, from the end of its turn on."""
    conversation = renderer._read(messages, answered, tools, variables)
    return renderer._new_text(renderer._rule(conversation), conversation, FIRST)


def extended(chat_template: str, tokens: str, messages: list[dict[str, Any]], answered: int = 1) -> str:
    """Return the text that continues a conversation."""
    tokenizer = make_tokenizer(chat_template)
    ids = tokenizer.encode(tokens, add_special_tokens=False)
    extended = Renderer(tokenizer).extend(ids, messages, answered)
    assert extended[: len(ids)] == ids
    return str(tokenizer.decode(extended))


@pytest.mark.parametrize(
    ("name", "messages", "text"),
    [
        ("chatml", ASKED, CHATML_U2),
        ("tools", ASKED, CHATML_U2),
        ("tools", CALLED, CHATML_U2.replace("U2", "<tool_response>\n3.5\n</tool_response>")),
        ("thinking", ASKED, CHATML_U2),
        ("thinking", CALLED, CHATML_U2.replace("U2", "<tool_response>\n3.5\n</tool_response>")),
        ("collapsing", ASKED, CHATML_U2),
        ("headers", ASKED, HEADERS_U2),
        ("headers", CALLED, HEADERS_U2.replace("user", "ipython").replace("U2", '"3.5"')),
        ("strict", ASKED, "</s>[INST] U2[/INST]"),
        ("strict", CALLED, '</s>[TOOL_RESULTS]{"content": "3.5", "call_id": "call_0"}[/TOOL_RESULTS]'),
        ("channels", ASKED, "<|end|><|start|>user<|message|>U2<|end|><|start|>assistant"),
        ("channels", CALLED, CHANNELS_RESULT),
        ("parts", ASKED, CHATML_U2),
        ("open_turns", ASKED, "<|user|>\nU2<|assistant|>\n"),
        ("open_turns", CALLED, "<|observation|>\n3.5<|assistant|>\n"),
    ],
)
def test_what_follows_an_answer(name: str, messages: list[dict[str, Any]], text: str) -> None:
    assert after(template(name), messages) == text


def test_a_token_that_ends_only_the_last_answer_is_not_kept_in_history() -> None:
    """gpt-oss's rule: <|return|> never precedes another message."""
    with pytest.raises(UnsupportedTemplate, match=r"with another token than <\|return\|>"):
        extended(template("channels"), "<|start|>assistant<|message|>A1<|return|>", ASKED)
    cut = "<|start|>assistant<|message|>A1"
    assert extended(template("channels"), cut, ASKED).startswith(f"{cut}<|end|><|start|>user")
    called = "<|start|>assistant to=functions.add<|message|>{}<|call|>"
    assert extended(template("channels"), called, CALLED).startswith(f"{called}<|start|>functions.add")


def test_a_tool_that_answers_within_the_turn_after_a_token_of_its_own() -> None:
    """Text before the calls is rendered after their results."""
    within = (
        "{%- for m in messages %}{%- if m.role != 'tool' %}{%- for c in m.tool_calls or [] %}{{ "
        "c.function.name + (c.function.arguments | tojson) + '<|call|>' }}{% endfor %}{%- if m.tool_calls "
        "and not loop.last %}{{ messages[loop.index].content + '<|end|>' }}{% endif %}{{ m.content }}{{ "
        "'<|im_end|>' if m.content }}{% endif %}{% endfor %}"
    )
    assert after(within, CALLED) == "<|call|>3.5<|end|>"
    assert after(within, [user("U1"), says("Let me.", CALL), result("3.5")]) == "<|call|>3.5<|end|>"


@pytest.mark.parametrize("name", ["tools", "strict"])
def test_several_calls_and_their_results(name: str) -> None:
    calls = says("Both.", call_of("add", '{"a": 1}', "c1"), call_of("add", "{}", "c2"))
    text = after(template(name), [user("U1"), calls, result("3", "c1"), result("4", "c2")], tools=[ADD])
    assert text.count("3") == text.count("4") == 1
    assert "add" not in text
    assert text.startswith(("<|im_end|>", "</s>"))


def test_a_template_that_takes_one_call_at_a_time_still_shows_the_results_of_two() -> None:
    calls = says(None, call_of("add", "{}", "c1"), call_of("add", "{}", "c2"))
    assert '"3"' in after(template("headers"), [user("U1"), calls, result("3", "c1"), result("4", "c2")])


def test_the_variables_of_the_template_are_passed_on() -> None:
    assert after(template("thinking"), ASKED, enable_thinking=False).endswith(
        "assistant\n<think>\n\n</think>\n\n"
    )


def test_parts_of_text_are_text_and_text_is_in_parts_for_those_who_read_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": {}}]
    messages = [user("U1"), says("A1"), user(parts)]
    assert "user\none\ntwo<|im_end|>" in after(template("chatml"), messages)
    only_parts = template("parts").replace("{{- m.content }}", "{{- raise_exception('parts!') }}")
    assert "user\none\ntwo<|im_end|>" in after(only_parts, messages)


@pytest.mark.parametrize(
    ("sampled", "prompt"),
    [
        ("A1<|im_end|>", "A1" + CHATML_U2),
        ("A1", "A1" + CHATML_U2),
        (" A1 \n\n", " A1 \n\n" + CHATML_U2),
        ("A1<|end|>", "A1<|end|>" + CHATML_U2),
    ],
    ids=["ended", "cut short", "with space", "ended by another token"],
)
def test_a_turn_ends_once(sampled: str, prompt: str) -> None:
    assert extended(template("chatml"), sampled, ASKED) == prompt


def test_an_ending_of_several_tokens_is_sampled_whole_or_in_part() -> None:
    twice = TURNS.replace("<|im_end|>", "<|end|><|im_end|>")
    end = "<|end|><|im_end|><|im_start|>user U2<|end|><|im_end|>"
    for sampled in ("A1<|end|><|im_end|>", "A1<|end|>", "A1"):
        assert extended(twice, sampled, ASKED) == "A1" + end


def test_space_before_the_end_of_a_turn_is_not_added() -> None:
    for sampled in ("A1</s>", "A1"):
        assert extended(template("strict"), sampled, ASKED) == "A1</s>[INST] U2[/INST]"


def test_the_next_turns_beginning_may_have_been_sampled() -> None:
    assert extended(template("open_turns"), "A1<|user|>", ASKED) == "A1<|user|>\nU2<|assistant|>\n"


@pytest.mark.parametrize(
    ("chat_template", "messages", "why"),
    [
        (TURNS.replace("messages", "messages[-1:]"), ASKED, "exactly once"),
        (TURNS + "{{ messages[1].content }}", ASKED, "exactly once"),
        (TURNS.replace("m.content", "m.content | lower"), ASKED, "exactly once"),
        (TURNS + "{{ messages[1].content | length }}", ASKED, "depends on the answer"),
        (
            TURNS.replace("m.role", "(m.role if loop.first else messages[loop.index0 - 1].content[:4])"),
            ASKED,
            "depends on",
        ),
        (TURNS.replace("messages", "messages if m.role != 'tool'"), CALLED, "omits a new message"),
        (
            "{%- for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}",
            ASKED,
            "without a special token",
        ),
        (WITHIN_CALL, CALLED, "omits a new message"),
        (WITHIN, CALLED, "without a special token"),
        (template("strict"), [user("U1"), says("A1"), user("U2"), user("U3")], "alternate"),
        (template("strict"), [user("U1"), says("A1"), result("3")], "Not expecting"),
        ("{{ raise_exception('no system') }}", ASKED, "no system"),
        ("{{ 1 // 0 }}", ASKED, "raises"),
    ],
)
def test_templates_that_cannot_be_taken_apart(
    chat_template: str, messages: list[dict[str, Any]], why: str
) -> None:
    with pytest.raises(UnsupportedTemplate, match=why):
        Renderer(make_tokenizer(chat_template)).extend([1, 2], messages, 1)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = make_tokenizer("")
    tokenizer.chat_template = None
    with pytest.raises(UnsupportedTemplate, match="raises"):
        text_after(Renderer(tokenizer), ASKED, 1)


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "add_generation_prompt"])
def test_arguments_of_the_tokenizer_are_no_variables(name: str) -> None:
    with pytest.raises(UnsupportedTemplate, match="not template variables"):
        text_after(Renderer(make_tokenizer(template("chatml"))), ASKED, 1, None, {name: True})


def test_a_shape_is_tried_out_once_and_a_new_one_again() -> None:
    renderer = Renderer(make_tokenizer(TURNS.replace("m.content", "(m.content if m.role != 'tool' else '')")))
    assert text_after(renderer, ASKED, 1) == text_after(renderer, ASKED, 1)
    assert "U3" in text_after(renderer, [*ASKED, says("A2"), user("U3")], 3)
    with pytest.raises(UnsupportedTemplate, match="omits a new message"):
        text_after(renderer, CALLED, 1)


def test_shapes_without_number_do_not_fill_the_memory() -> None:
    renderer = Renderer(make_tokenizer(template("chatml")))
    for number in range(MAX_SHAPES + 10):
        text_after(renderer, ASKED, 1, None, {"number": number})
    assert len(renderer._rules) <= MAX_SHAPES


def test_messages_and_tokenizer_are_left_as_they_are() -> None:
    tokenizer = make_tokenizer(template("tools"))
    messages = [user("U1"), says(None, call_of("add", '{"a":1}')), result([{"type": "text", "text": "3"}])]
    before = repr(messages)
    renderer = Renderer(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('changed') }}"
    assert "3" in text_after(renderer, messages, 1)
    assert repr(messages) == before
