"""Anthropic's messages dialect through the real SDK, in front of a chat application."""

import hashlib
from types import SimpleNamespace
from typing import Any

import anthropic
import pytest
from app_clients import anthropic_client
from dialect_helpers import (
    BREAKS,
    OLD_VLLM_ERROR,
    SAYS,
    VLLM_ERROR,
    WEATHER,
    FakeChat,
    Say,
    call,
    translated,
)
from template_helpers import says, user

from raylight.images.messages import recorded_url
from raylight.serving.dialects.translate import TranslationMiddleware

ASK = {"model": "policy", "max_tokens": 9, "messages": [user("hi")]}
THE_TOOL = {"type": "function", "function": {"name": "weather"}}
ONE_AT_A_TIME = {"parallel_tool_calls": False}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
TEXT = {"type": "text", "text": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "t"}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
TOOL = {"name": "weather", "description": "of a city", "input_schema": WEATHER}


async def ask(*says: Say, **fields: Any) -> tuple[list[dict[str, Any]], anthropic.types.Message]:
    """Return the chat requests made for one message, and the answer."""
    fake, app = translated(*says)
    answer = await anthropic_client(app).messages.create(**ASK | fields)
    return fake.asked, answer


async def said(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """Return the chat messages of a conversation."""
    asked, _ = await ask(Say("ok"), messages=list(messages), **fields)
    return asked[0]["messages"]


async def test_a_plain_question_and_answer() -> None:
    fake, app = translated(Say("hello"))
    answer = await anthropic_client(app).messages.create(**ASK)
    assert fake.asked == [
        {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9}
    ]
    assert fake.scopes[0]["path"] == "/v1/chat/completions"
    assert fake.scopes[0]["raylight.dialect"] == "messages"
    assert answer.to_dict() == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 7,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


async def test_every_setting_reaches_the_engine() -> None:
    asked, _ = await ask(
        Say("ok"),
        extra_body={"temperature": 0, "top_p": 0.5, "top_k": 3},
        stop_sequences=["END"],
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": WEATHER}},
    )
    asked[0].pop("messages")
    assert asked[0] == {
        "model": "policy",
        "max_completion_tokens": 9,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "stop": ["END"],
        "chat_template_kwargs": {"enable_thinking": True},
        "thinking_token_budget": 1024,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": WEATHER}},
    }


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True}, ONE_AT_A_TIME | {"tool_choice": "required"}),
        ({"type": "tool", "name": "weather"}, {"tool_choice": THE_TOOL}),
        ({"type": "none"}, {"tool_choice": "none"}),
    ],
)
async def test_choices_of_tools(choice: dict[str, Any], chat: dict[str, Any]) -> None:
    asked, _ = await ask(Say("ok"), tools=[TOOL], tool_choice=choice)
    assert {k: v for k, v in asked[0].items() if k in ("tool_choice", "parallel_tool_calls")} == chat
    function = {"name": "weather", "description": "of a city", "parameters": WEATHER}
    assert asked[0]["tools"] == [{"type": "function", "function": function}]


async def test_the_system_and_texts_of_several_blocks() -> None:
    blocks = [TEXT | {"text": "a", "cache_control": {"type": "ephemeral"}}, TEXT | {"text": "b"}]
    messages = await said(user(blocks), system=blocks)
    assert messages == [{"role": "system", "content": "a\nb"}, user("a\nb")]


async def test_images_keep_their_place() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    [message] = await said(user([image, {"type": "text", "text": "what?"}, IMAGE]))
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": recorded_url(hashlib.sha256(b"ABC").hexdigest())}},
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
    ]


async def test_results_of_parallel_tools() -> None:
    uses = [
        {"type": "tool_use", "id": f"t{i}", "name": "weather", "input": {"city": "Zürich"}} for i in (1, 2)
    ]
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    results = [
        RESULT | {"tool_use_id": "t1", "content": [TEXT | {"text": "sun"}, TEXT | {"text": "warm"}]},
        RESULT | {"tool_use_id": "t2", "content": "no such city", "is_error": True},
        RESULT | {"tool_use_id": "t3"},
        TEXT | {"text": "go on"},
    ]
    asking = says([thought, TEXT | {"text": "let me see"}, *uses])
    messages = await said(user("hi"), asking, user(results))
    assert messages[1:] == [
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [call("t1", '{"city": "Zürich"}'), call("t2", '{"city": "Zürich"}')],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sun\nwarm"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no such city"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "go on"},
    ]


async def test_an_image_from_a_tool_follows_as_the_users() -> None:
    messages = await said(user([RESULT | {"content": [IMAGE]}]))
    assert messages[0] == {"role": "tool", "tool_call_id": "t", "content": ""}
    assert messages[1]["role"] == "user"
    assert messages[1]["content"][0]["type"] == "image_url"


ANSWERS = SAYS | {
    "cut off": Say("hel", finish="length"),
    "a stop word": Say("hello", stop_word="END"),
    "a named tool whose end is a stop": Say(calls=[call("t1", '{"city": "Bern"}')], finish="stop"),
}
REASONS = {
    "parallel calls": "tool_use",
    "a call without arguments": "tool_use",
    "cut off": "max_tokens",
    "a stop word": "stop_sequence",
    "a named tool whose end is a stop": "tool_use",
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_stream_ends_as_the_same_message_as_an_answer_in_one_piece(name: str) -> None:
    say = ANSWERS[name]
    _, app = translated(say, say)
    client = anthropic_client(app)
    whole = await client.messages.create(**ASK)
    async with client.messages.stream(**ASK) as stream:
        streamed = await stream.get_final_message()
    assert whole.stop_reason == REASONS.get(name, "end_turn")
    assert whole.stop_sequence == say.stop_word
    kinds = (
        (["thinking"] if say.reasoning else [])
        + (["text"] if say.content else [])
        + ["tool_use"] * len(say.calls)
    )
    assert [block.type for block in whole.content] == kinds
    plain = {"id": "", "parsed_output": None}
    assert _plain(streamed) | plain == _plain(whole) | plain


def _plain(message: anthropic.types.Message) -> dict[str, Any]:
    content = [
        {k: v for k, v in block.to_dict().items() if k != "parsed_output"} for block in message.content
    ]
    return {name: value for name, value in message.to_dict().items() if name != "stop_details"} | {
        "content": content
    }


async def test_the_events_of_a_stream_in_their_order() -> None:
    fake, app = translated(Say("ab", reasoning="c", calls=[call("t1", "{}"), call("t2", '{"city": 1}')]))
    events = [event async for event in await anthropic_client(app).messages.create(**ASK, stream=True)]
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    blocks = [
        (kind, index)
        for index, deltas in enumerate([2, 2, 1, 4])
        for kind in (start, *[delta] * deltas, stop)
    ]
    assert [(event.type, getattr(event, "index", None)) for event in events] == [
        ("message_start", None),
        *blocks,
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert fake.asked[0]["stream_options"] == {"include_usage": True}
    assert [e.delta.type for e in events if e.type == delta] == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "text_delta",
        *["input_json_delta"] * 5,
    ]
    assert events[-2].delta.stop_reason == "tool_use"
    assert events[-2].usage.output_tokens == 7
    assert events[-2].usage.input_tokens == 7


async def test_tokens_of_thinking_are_counted() -> None:
    usage = Say().usage | {"completion_tokens_details": {"reasoning_tokens": 5}}
    _, app = translated(*[Say("four", reasoning="hm", usage=usage)] * 2)
    client = anthropic_client(app)
    answer = await client.messages.create(**ASK)
    async with client.messages.stream(**ASK) as stream:
        streamed = await stream.get_final_message()
    counted = [message.usage.output_tokens_details for message in (answer, streamed)]
    assert [details.thinking_tokens if details else None for details in counted] == [5, 5]


async def test_changed_thinking_is_refused() -> None:
    fake, app = translated(Say("four", reasoning="\nhm\n"), Say("ok"), Say("ok"), Say("ok"))
    client = anthropic_client(app)
    first = await client.messages.create(**ASK)
    thinking, text = (block.to_dict() for block in first.content)
    assert thinking["signature"]

    async def send_back(block: dict[str, Any]) -> Any:
        turns = [says([block, text]), user("and?")]
        return await client.messages.create(**ASK | {"messages": ASK["messages"] + turns})

    await send_back(thinking)
    await send_back(thinking | {"signature": "of another provider"})
    await send_back(thinking | {"thinking": "hm"})  # as clients that trim texts
    shown = [asked["messages"][1].pop("reasoning_content") for asked in fake.asked[1:]]
    assert shown == ["\nhm\n", "\nhm\n", "hm"]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\]\.content\[0\].*does not match"):
        await send_back(thinking | {"thinking": "well"})


async def test_a_stream_starts_with_the_size_of_its_prompt() -> None:
    fake = FakeChat(Say("ab"))
    client = anthropic_client(TranslationMiddleware(fake, tokenizer=SimpleNamespace(chat_template="")))
    async with client.messages.stream(**ASK) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_message()
    assert fake.asked[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    starts = [event.message.usage for event in events if event.type == "message_start"]
    assert [start.input_tokens for start in starts] == [11]
    assert [start.cache_creation_input_tokens for start in starts] == [0]
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == 11


async def test_a_loop_of_tools_gives_back_what_the_engine_said() -> None:
    calls = [call("t1", '{"city": "Bern"}'), call("t2", '{"city": "Zürich"}')]
    fake, app = translated(Say("let me see", reasoning="hm", calls=calls), Say("sun"))
    client = anthropic_client(app)
    messages: list[Any] = [user("weather?")]
    async with client.messages.stream(**ASK | {"messages": messages}, tools=[TOOL]) as stream:
        first = await stream.get_final_message()
    uses = [block for block in first.content if block.type == "tool_use"]
    results = [RESULT | {"tool_use_id": use.id, "content": use.input["city"]} for use in uses]
    messages += [says(first.content), user(results)]
    await client.messages.create(**ASK | {"messages": messages}, tools=[TOOL])
    assert fake.asked[1]["messages"][1:] == [
        {"role": "assistant", "content": "let me see", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "Bern"},
        {"role": "tool", "tool_call_id": "t2", "content": "Zürich"},
    ]


@pytest.mark.parametrize("arguments", ['{"city": "Ber', "[1]", "not JSON", '{"a": 1e999}', '{"a": NaN}'])
async def test_arguments_that_are_no_object_survive_the_loop(arguments: str) -> None:
    fake, app = translated(Say(calls=[call("t1", arguments)], finish="length"), Say("ok"))
    client = anthropic_client(app)
    first = await client.messages.create(**ASK)
    assert first.content[0].input == {"INVALID_JSON": arguments}
    more = [says(first.content), user("go on")]
    await client.messages.create(**ASK | {"messages": ASK["messages"] + more})
    assert fake.asked[1]["messages"][1]["tool_calls"] == [call("t1", arguments)]


async def test_counting_tokens() -> None:
    fake, app = translated()
    counted = await anthropic_client(app).messages.count_tokens(
        model="policy", messages=ASK["messages"], tools=[TOOL], system="be brief"
    )
    assert counted.input_tokens == 5
    assert fake.scopes[0]["path"] == "/tokenize"
    assert [m["role"] for m in fake.asked[0]["messages"]] == ["system", "user"]
    assert fake.asked[0]["tools"][0]["function"]["name"] == "weather"


async def test_the_effort_of_reasoning_is_counted() -> None:
    """Engines read it as a variable of the template in `/tokenize`."""
    fake, app = translated()
    given = {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": WEATHER}}}
    beta = {"output_format": {"type": "json_schema", "schema": WEATHER}, "thinking": {"type": "adaptive"}}
    for fields in (given, given | beta):
        counted = await anthropic_client(app).messages.count_tokens(
            model="policy", messages=ASK["messages"], extra_body=fields
        )
        assert counted.input_tokens == 5
    thinking = {"enable_thinking": True}
    assert fake.asked == [
        {"model": "policy", "messages": ASK["messages"], "chat_template_kwargs": variables}
        for variables in ({"reasoning_effort": "low"}, {"reasoning_effort": "low"} | thinking)
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"no_such_field": 1}, "no_such_field: this field is not supported"),
        ({"max_tokens": "9"}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"temperature": True}, "temperature: "),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "'role' 'robot' is not supported"),
        ({"messages": [user([{"type": "document", "source": {}}])]}, "messages[0].content[0].source: "),
        ({"messages": [user("hi"), says("I")]}, "the last message is the assistant's"),
        ({"messages": [user([{"type": "document", "source": PDF}])]}, "messages[0].content[0]"),
        ({"thinking": {"type": "adaptive", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ],
)
async def test_what_is_not_understood_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    fake, app = translated()
    with pytest.raises(anthropic.BadRequestError) as refused:
        await anthropic_client(app).messages.create(**{**ASK, "extra_body": fields})
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert message in refused.value.body["error"]["message"]
    assert fake.asked == []


@pytest.mark.parametrize(
    ("status", "error", "kind", "shape"),
    [
        (400, VLLM_ERROR, anthropic.BadRequestError, "invalid_request_error"),
        (401, {"error": {"message": "too long"}}, anthropic.AuthenticationError, "authentication_error"),
        (404, OLD_VLLM_ERROR, anthropic.NotFoundError, "not_found_error"),
        (429, "too long", anthropic.RateLimitError, "rate_limit_error"),
        (500, {"detail": "too long"}, anthropic.InternalServerError, "api_error"),
        (503, {"error": "too long"}, anthropic.InternalServerError, "overloaded_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_engine_become_the_sdks_own(
    status: int, error: Any, kind: type, shape: str, stream: bool
) -> None:
    _, app = translated(Say(status=status, error=error))
    with pytest.raises(kind) as refused:
        await anthropic_client(app).messages.create(**ASK, stream=stream)
    assert refused.value.body == {
        "type": "error",
        "error": {"type": shape, "message": "too long"},
        "request_id": None,
    }


@pytest.mark.parametrize("say", BREAKS)
async def test_a_stream_that_breaks_off_is_an_error(say: Say) -> None:
    _, app = translated(say)
    with pytest.raises(anthropic.APIStatusError, match=r"lost|is incomplete"):
        async with anthropic_client(app).messages.stream(**ASK) as stream:
            await stream.get_final_message()


async def test_an_aborted_answer_is_an_error_that_may_be_tried_again() -> None:
    with pytest.raises(anthropic.InternalServerError, match=r"is incomplete.*abort") as refused:
        await ask(Say("hel", finish="abort"))
    assert refused.value.status_code == 503


@pytest.mark.parametrize(
    ("thinking", "enabled", "budget"),
    [
        ({"type": "adaptive"}, True, None),
        ({"type": "adaptive", "budget_tokens": 0}, True, None),
        ({"type": "adaptive", "budget_tokens": 4000}, True, 4000),
        ({"type": "disabled", "budget_tokens": 4000}, False, None),
        ({"type": "enabled", "budget_tokens": 4000}, True, 4000),
    ],
)
async def test_forms_of_thinking(thinking: dict[str, Any], enabled: bool, budget: int | None) -> None:
    asked, _ = await ask(Say("ok"), extra_body={"thinking": thinking})
    assert asked[0]["chat_template_kwargs"] == {"enable_thinking": enabled}
    assert asked[0].get("thinking_token_budget") == budget


async def test_documents_of_text_redacted_thinking_and_text_before_results() -> None:
    report = {
        "type": "document",
        "title": "Report",
        "source": {"type": "text", "media_type": "text/plain", "data": "R"},
    }
    notes = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "N"}]}}
    messages = await said(
        {"role": "user", "content": [report, {"type": "text", "text": "Q"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x=="},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "now"},
                {"type": "tool_result", "tool_use_id": "t", "content": [notes]},
            ],
        },
        tools=[TOOL],
    )
    assert messages == [
        {"role": "user", "content": "Report\nR\nQ"},
        {"role": "assistant", "content": None, "tool_calls": [call("t", "{}")]},
        {"role": "tool", "tool_call_id": "t", "content": "N"},
        {"role": "user", "content": "now"},
    ]
