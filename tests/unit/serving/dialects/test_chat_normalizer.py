"""Normal form of chat requests."""

from collections.abc import Iterator
from typing import Any

import pytest
from template_helpers import make_tokenizer

from raylight.http.errors import RequestError
from raylight.serving.dialects.chat_normalizer import ChatNormalizer, _log_replaced
from raylight.types.request_fields import log_dropped

PLAIN = "{% for message in messages %}{{ message.content }} about verbosity and thinking{% endfor %}"
QWEN = PLAIN + "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
DEEPSEEK_3 = PLAIN + "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}"
DEEPSEEK = PLAIN + "{% if thinking %}<think>{% endif %}"
GPT_OSS = (
    PLAIN
    + "{{- 'Reasoning: ' + reasoning_effort }}{{ verbosity|default('medium') }}"
    + "{% for message in messages %}{% generation %}{{ message.thinking }}{{ '<thinking>' }}"
    + "{% endgeneration %}{% continue %}{% endfor %}{% set enable_thinking = true %}{{ enable_thinking }}"
)

QWEN_3_8 = (
    "{%- if enable_thinking is undefined or enable_thinking is true %}"
    "{%- if reasoning_effort|default('xhigh') not in ('xhigh', 'medium', 'low') %}"
    "{{- raise_exception('Unexpected reasoning effort') }}{% endif %}{% endif %}" + PLAIN
)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": "hi"}], **fields}


def tool(name: str = "add", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    for once in (log_dropped, _log_replaced):
        once.cache_clear()
    yield
    for once in (log_dropped, _log_replaced):
        once.cache_clear()


@pytest.mark.parametrize("template", [None, PLAIN, QWEN])
def test_a_plain_request_stays_the_same_object(template: str | None) -> None:
    body = chat(tools=[tool()], tool_choice="auto", temperature=1, user="me", store=True)
    assert ChatNormalizer(template).normalize(body) is body


@pytest.mark.parametrize(
    ("template", "given", "left"),
    [
        (QWEN, {"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinking": True}}),
        (QWEN, {"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (QWEN, {"reasoning": {"effort": "none"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (QWEN, {"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (QWEN, {"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (QWEN, {"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        (
            QWEN,
            {"chat_template_kwargs": {"enable_thinking": False, "x": 1}, "reasoning_effort": "high"},
            {"chat_template_kwargs": {"enable_thinking": False, "x": 1}},
        ),
        (DEEPSEEK, {"enable_thinking": True}, {"chat_template_kwargs": {"thinking": True}}),
        (GPT_OSS, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (GPT_OSS, {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (GPT_OSS, {"verbosity": "high"}, {"chat_template_kwargs": {"verbosity": "high"}}),
        (
            QWEN,
            {"thinking": {"type": "enabled", "budget_tokens": 64}},
            {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 64},
        ),
        (
            QWEN,
            {"thinking": {"budget_tokens": 64}, "thinking_token_budget": 32},
            {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 32},
        ),
        (DEEPSEEK_3, {"thinking": True}, {"chat_template_kwargs": {"thinking": True}}),
    ],
)
def test_a_setting_that_the_template_reads_reaches_it(
    template: str, given: dict[str, Any], left: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert ChatNormalizer(template).normalize(chat(**given)) == chat(**left)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("template", "given", "field"),
    [
        (PLAIN, {"reasoning_effort": "low"}, "reasoning_effort"),
        (PLAIN, {"reasoning": {"effort": "low"}}, "reasoning"),
        (QWEN, {"reasoning": {"summary": "auto"}}, "reasoning"),
        (GPT_OSS, {"reasoning": {"summary": "auto"}}, "reasoning"),
        (GPT_OSS, {"enable_thinking": True}, "enable_thinking"),
        (GPT_OSS, {"thinking": True}, "thinking"),
        ("{% if thinking", {"thinking": True}, "thinking"),
        (PLAIN, {"thinking": {"type": "enabled"}}, "thinking"),
        (PLAIN, {"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking"),
        (PLAIN, {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        (QWEN, {"verbosity": "low"}, "verbosity"),
    ],
)
def test_a_setting_that_the_template_does_not_read_is_dropped_and_logged_once(
    template: str, given: dict[str, Any], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    for normalizer in (ChatNormalizer(template), ChatNormalizer(template)):
        assert normalizer.normalize(chat(**given)) == chat()
    (message,) = caplog.messages
    assert f"the field {field}, which this model's chat template does not read" in message


@pytest.mark.parametrize(
    ("given", "effort"),
    [
        *(("minimal", "low"), ("low", "low"), ("medium", "medium"), ("high", "xhigh"), ("xhigh", "xhigh")),
        *(("max", "xhigh"), ("none", None), ("odd", "odd"), (["low"], ["low"])),
    ],
)
def test_an_effort_that_the_template_refuses_becomes_the_nearest(given: Any, effort: Any) -> None:
    """Qwen 3.8 takes three efforts, and reads `enable_thinking` too."""
    normalizer = ChatNormalizer(QWEN_3_8, make_tokenizer(QWEN_3_8))
    expected = (
        {"reasoning_effort": effort} if effort else {"chat_template_kwargs": {"enable_thinking": False}}
    )
    for asked in ({"reasoning_effort": given}, {"reasoning": {"effort": given}}):
        assert normalizer.normalize(chat(**asked)) == chat(**expected)


def test_a_replaced_effort_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    template = QWEN_3_8.replace("enable_thinking", "other")
    for _ in range(2):
        normalizer = ChatNormalizer(template, make_tokenizer(template))
        assert normalizer.normalize(chat(reasoning_effort="none")) == chat(reasoning_effort="low")
    (message,) = caplog.messages
    assert message == (
        "a request has reasoning_effort='none', which this model's chat template refuses; it gets 'low'"
    )


def test_reasoning_without_an_effort_leaves_the_effort_of_the_request() -> None:
    given = chat(reasoning_effort="low", reasoning={"summary": "auto"})
    assert ChatNormalizer(GPT_OSS).normalize(given) == chat(reasoning_effort="low")


def test_the_log_has_the_agents_name_of_a_field(caplog: pytest.LogCaptureFixture) -> None:
    ChatNormalizer(PLAIN).normalize(chat(reasoning_effort="low"), lambda field: f"of.{field}")  # type: ignore[arg-type]
    assert "the field of.reasoning_effort, which" in caplog.messages[0]


@pytest.mark.parametrize("given", [{"reasoning": "much"}, {"thinking": 3}, {"chat_template_kwargs": "x"}])
def test_a_setting_of_another_form_is_left_to_the_engine(given: dict[str, Any]) -> None:
    assert ChatNormalizer(QWEN).normalize(chat(**given)) == chat(**given)


def test_a_model_elsewhere_gets_every_setting() -> None:
    body = chat(reasoning_effort="low", verbosity="low", reasoning={"effort": "low"}, thinking={})
    assert ChatNormalizer(None).normalize(body) is body


def test_cache_hints_are_dropped_wherever_they_are() -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "hi"}
    messages = [{"role": "user", "content": [text | hint, text]}, {"role": "user", "content": "x"} | hint]
    given = chat(messages=messages, tools=[tool() | hint, tool("sub", **hint)], **hint)
    plain = [{"role": "user", "content": [text, text]}, {"role": "user", "content": "x"}]
    assert ChatNormalizer(None).normalize(given) == chat(messages=plain, tools=[tool(), tool("sub")])
    assert messages[0]["content"][0] == text | hint  # type: ignore[index]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_stay(mode: str) -> None:
    allowed = {"mode": mode, "tools": [tool("c"), tool("a")]}
    given = chat(
        tools=[tool(name) for name in "abc"],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    )
    assert ChatNormalizer(PLAIN).normalize(given) == chat(tools=[tool("a"), tool("c")], tool_choice=mode)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({}, "tool_choice.allowed_tools.mode: it must be"),
        ({"allowed_tools": {"mode": "often"}}, "tool_choice.allowed_tools.mode: it must be"),
        ({"allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice.allowed_tools.tools: it is empty"),
        (
            {"allowed_tools": {"mode": "auto", "tools": [tool("a"), tool("z")]}},
            "tool_choice.allowed_tools.tools[1]: the request has no tool 'z'",
        ),
        ({"allowed_tools": {"mode": "auto", "tools": ["a"]}}, "tools[0]: the request has no tool None"),
    ],
)
def test_a_wrong_choice_of_allowed_tools_is_refused(choice: dict[str, Any], message: str) -> None:
    body = chat(tools=[tool("a")], tool_choice={"type": "allowed_tools"} | choice)
    with pytest.raises(RequestError) as caught:
        ChatNormalizer(PLAIN).normalize(body)
    assert message in caught.value.message
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"tools": [], "tool_choice": "auto"}, {}),
        ({"tools": None, "tool_choice": "none"}, {}),
        ({"tool_choice": "auto"}, {}),
        ({"tools": [], "tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tools": [tool()], "tool_choice": "none"}, {"tools": [tool()], "tool_choice": "none"}),
    ],
)
def test_choices_without_tools_are_dropped_unless_they_require_one(
    given: dict[str, Any], left: dict[str, Any]
) -> None:
    assert ChatNormalizer(PLAIN).normalize(chat(**given)) == chat(**left)
