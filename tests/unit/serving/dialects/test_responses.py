"""OpenAI's responses dialect through the real SDK, in front of a chat application."""

from typing import Any

import openai
import pydantic
import pytest
from app_clients import openai_client
from dialect_helpers import (
    BREAKS,
    OLD_VLLM_ERROR,
    SAYS,
    VLLM_ERROR,
    WEATHER,
    Say,
    call,
    translated,
)
from openai.types.responses import Response, ResponseStreamEvent
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope
from template_helpers import result, says, user

from raylight.engines.capture_context import SCOPE, AttemptScope
from raylight.http.errors import RequestError
from raylight.serving.dialects.responses import ResponseHistory

ASK = {"model": "policy", "input": "hi"}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": WEATHER, "strict": True}
TOOL = {"type": "function"} | FUNCTION
HIDDEN_THOUGHT = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
EVENTS = pydantic.TypeAdapter(ResponseStreamEvent)


async def ask(*says: Say, **fields: Any) -> tuple[list[dict[str, Any]], Response]:
    """Return the chat requests made for one response, and the answer."""
    fake, app = translated(*says)
    answer = await openai_client(app).responses.create(**ASK | fields)
    return fake.asked, answer


async def said(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the chat messages of input items."""
    asked, _ = await ask(Say("ok"), input=list(items), **fields)
    return asked[0]["messages"]


async def test_a_plain_question_and_answer() -> None:
    fake, app = translated(Say("hello"))
    answer = await openai_client(app).responses.create(**ASK)
    assert fake.asked == [{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}]
    assert fake.scopes[0]["path"] == "/v1/chat/completions"
    assert fake.scopes[0]["raylight.dialect"] == "responses"
    assert (answer.id, answer.output_text) == ("resp_1", "hello")
    assert (answer.status, answer.created_at) == ("completed", 1700000000)
    assert answer.usage.to_dict() == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 18,
    }


@pytest.mark.parametrize("label", ["metadata", "user", "store", "safety_identifier"])
async def test_a_label_may_have_any_value(label: str) -> None:
    for value in ("x", 5, {"a": 1}, ["x"], None):
        _, answer = await ask(Say("hello"), extra_body={label: value})
        assert answer.status == "completed"


async def test_every_setting_reaches_the_engine_and_is_echoed() -> None:
    form = {"name": "w", "schema": WEATHER, "strict": True}
    schema = {"type": "json_schema"} | form
    settings = {"temperature": 0, "top_p": 0.5, "parallel_tool_calls": False}
    asked, answer = await ask(
        Say("{}"),
        **settings,
        max_output_tokens=9,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": schema},
        reasoning={"effort": "low"},
        metadata={"a": "b"},
        instructions="be brief",
        user="u",
    )
    assert asked[0] == settings | {
        "model": "policy",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": form},
    }
    echoed = answer.to_dict()
    assert {name: echoed[name] for name in settings} == settings
    labels = (echoed["metadata"], echoed["instructions"], echoed["max_output_tokens"], echoed["store"])
    assert labels == ({"a": "b"}, "be brief", 9, False)
    tools = (echoed["tools"], echoed["tool_choice"], echoed["text"]["format"])
    assert tools == ([TOOL], {"type": "function", "name": "weather"}, schema)


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
async def test_choices_of_tools(choice: Any) -> None:
    asked, answer = await ask(Say("ok"), tools=[TOOL], tool_choice=choice)
    assert asked[0]["tool_choice"] == answer.tool_choice == choice


async def test_json_objects() -> None:
    asked, _ = await ask(Say("{}"), text={"format": {"type": "json_object"}})
    assert asked[0]["response_format"] == {"type": "json_object"}


async def test_items_of_every_kind() -> None:
    image = {"type": "input_image", "image_url": "https://x/y.png"}
    messages = await said(
        {"role": "developer", "content": "be brief"},
        user([{"type": "input_text", "text": "see"}, image | {"detail": "auto"}]),
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "t1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "t2", "name": "weather", "arguments": "{ }"},
        {"type": "function_call_output", "call_id": "t1", "output": "sun"},
        {"type": "function_call_output", "call_id": "t2", "output": [{"type": "input_text", "text": "rain"}]},
        says("mixed"),
        says([{"type": "output_text", "text": "really", "annotations": []}]),
        user("thanks"),
    )
    assert messages == [
        {"role": "system", "content": "be brief"},
        user(
            [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "https://x/y.png"}}]
        ),
        says(None, call("t1", "{}"), call("t2", "{ }")) | {"reasoning_content": "hm"},
        result("sun", "t1"),
        result("rain", "t2"),
        says("mixed"),
        says("really"),
        user("thanks"),
    ]


@pytest.mark.parametrize("name", SAYS)
async def test_a_stream_ends_as_the_same_response_as_an_answer_in_one_piece(name: str) -> None:
    say = SAYS[name]
    _, app = translated(say, say)
    client = openai_client(app)
    whole = await client.responses.create(**ASK)
    async with client.responses.stream(**ASK) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = (
        (["reasoning"] if say.reasoning else [])
        + (["message"] if say.content else [])
        + ["function_call"] * len(say.calls)
    )
    assert [item.type for item in whole.output] == kinds
    assert _plain(final) == _plain(whole)


def _plain(response: Response) -> dict[str, Any]:
    """Remove what the SDK parsed, and the ids that differ between two answers."""
    parsed = {"id": True, "output": {"__all__": {"id", "parsed_arguments"}}}
    return response.model_dump(mode="json", exclude=parsed, exclude_none=True)


@pytest.mark.parametrize("name", [*SAYS, "cut off"])
async def test_every_event_has_the_shape_of_the_sdks_types(name: str) -> None:
    fake, app = translated(SAYS.get(name, Say("hel", finish="length")))
    events = [event async for event in await openai_client(app).responses.create(**ASK, stream=True)]
    for event in events:
        EVENTS.validate_python(event.to_dict())
    assert fake.asked[0]["stream_options"] == {"include_usage": True}
    assert events[-1].type == ("response.incomplete" if name == "cut off" else "response.completed")


async def test_the_events_of_a_stream_in_their_order() -> None:
    _, app = translated(Say("ab", reasoning="c", calls=[call("t1", "{}"), call("t2", '{"city": 1}')]))
    events = [event async for event in await openai_client(app).responses.create(**ASK, stream=True)]
    parts = ["content_part.done", "output_item.done", "output_item.added"]
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        *parts,
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        *parts,
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        *["function_call_arguments.delta"] * 4,
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


async def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    _, whole = await ask(Say("hel", finish="length"))
    assert (whole.status, whole.output[0].status) == ("incomplete", "incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reasoning", [None, "hm"])
async def test_a_loop_of_tools_gives_back_what_the_engine_said(stream: bool, reasoning: str | None) -> None:
    calls = [call("t1", '{"city":"Bern"}'), call("t2", '{"city":  "Zürich"')]
    fake, app = translated(Say("let me see", reasoning=reasoning, calls=calls), Say("sun"))
    client = openai_client(app)
    if stream:
        events = [event async for event in await client.responses.create(**ASK, tools=[TOOL], stream=True)]
        first = events[-1].response
    else:
        first = await client.responses.create(**ASK, tools=[TOOL])
    results = [
        {"type": "function_call_output", "call_id": i.call_id, "output": "x"}
        for i in first.output
        if i.type == "function_call"
    ]
    await client.responses.create(
        model="policy", input=[{"role": "user", "content": "hi"}, *first.output, *results], tools=[TOOL]
    )
    thought = {"reasoning_content": reasoning} if reasoning else {}
    turn = says("let me see", *calls) | thought
    assert fake.asked[1]["messages"] == [user("hi"), turn, result("x", "t1"), result("x", "t2")]


async def test_dumped_items_with_their_nulls_come_back_too() -> None:
    fake, app = translated(Say("let me see", reasoning="hm", calls=[call("t1", "{}")]), Say("sun"))
    client = openai_client(app)
    first = await client.responses.parse(**ASK, tools=[TOOL])
    await client.responses.create(model="policy", input=[item.model_dump() for item in first.output])
    sent = says("let me see", call("t1", "{}")) | {"reasoning_content": "hm"}
    assert fake.asked[1]["messages"] == [sent]


async def test_two_answers_in_a_row_stay_two_messages() -> None:
    """The ids of items show which belong together."""
    fake, app = translated(Say("one"), Say(calls=[call("t1", "{}")]), Say("ok"))
    client = openai_client(app)
    answers = [await client.responses.create(**ASK) for _ in range(2)]
    await client.responses.create(model="policy", input=answers[0].output + answers[1].output)
    assert fake.asked[2]["messages"] == [says("one"), says(None, call("t1", "{}"))]


async def test_text_without_an_id_after_a_call_belongs_to_the_same_turn() -> None:
    """Haystack sends calls first, and pydantic-ai leaves out the ids of what it streamed."""
    sent = call("t1", "{}")
    item = {"type": "function_call", "call_id": "t1", "name": "weather", "arguments": "{}"}
    text, output = says("let me see"), {"type": "function_call_output", "call_id": "t1", "output": "x"}
    for made in (item, item | {"id": "fc_1.1"}):
        assert await said(made, text, output) == [says("let me see", sent), result("x", "t1")]
        turn = says("first let me see", sent)
        assert await said(says("first "), made, text, output) == [turn, result("x", "t1")]
    assert await said(item, output, text) == [says(None, sent), result("x", "t1"), text]


class InScope:
    """Sets the attempt as the gateway does."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.inside = AttemptScope("ro-1", "at-1")

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        token = SCOPE.set(self.inside)
        try:
            await self.app(scope, receive, send)
        finally:
            SCOPE.reset(token)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_from_an_earlier_response(stream: bool) -> None:
    fake, app = translated(Say("one", reasoning="hm"), Say("two"), Say("three"))
    client = openai_client(InScope(app))
    first = await client.responses.create(**ASK, instructions="be brief", stream=stream)
    if stream:
        first = [event async for event in first][-1].response
    second = await client.responses.create(model="policy", input="more", previous_response_id=first.id)
    await client.responses.create(
        model="policy", input="again", instructions="be long", previous_response_id=second.id
    )
    assert second.previous_response_id == first.id
    answered = says("one") | {"reasoning_content": "hm"}
    talk = [user("hi"), answered, user("more"), says("two"), user("again")]
    assert fake.asked[1]["messages"] == talk[:3]
    assert fake.asked[2]["messages"] == [{"role": "system", "content": "be long"}, *talk]


async def test_only_the_own_attempt_finds_a_response_and_only_if_it_was_to_be_stored() -> None:
    fake, app = translated(Say("one"), Say("two"))
    outer = InScope(app)
    client = openai_client(outer)
    stored = await client.responses.create(**ASK)
    unstored = await client.responses.create(**ASK, store=False)
    with pytest.raises(openai.BadRequestError, match=r"no response 'resp_2' here.*whole conversation"):
        await client.responses.create(**ASK, previous_response_id=unstored.id)
    outer.inside = AttemptScope("ro-2", "at-1")
    with pytest.raises(openai.BadRequestError, match="no response 'resp_1' here"):
        await client.responses.create(**ASK, previous_response_id=stored.id)
    assert len(fake.asked) == 2


async def test_references_to_earlier_items_stand_for_them() -> None:
    calls = [call("c1", '{"city": "A"}'), call("c2", '{"city": "B"}')]
    fake, app = translated(Say("one", reasoning="hm", calls=calls), Say("two"))
    outer = InScope(app)
    client = openai_client(outer)
    first = await client.responses.create(**ASK)
    references: Any = [{"type": "item_reference", "id": first.output[0].id}, {"id": first.output[1].id}]
    references += [{"type": "item_reference", "id": item.id} for item in first.output[2:]]
    result = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
    asked: Any = {"model": "policy", "input": [{"role": "user", "content": "hi"}, *references, result]}
    await client.responses.create(**asked)
    whole = asked | {"input": [asked["input"][0], *(item.to_dict() for item in first.output), result]}
    fake.says.append(Say("two"))
    await client.responses.create(**whole)
    assert fake.asked[1] == fake.asked[2]
    outer.inside = AttemptScope("ro-2", "at-1")
    with pytest.raises(openai.NotFoundError, match=r"input\[1\]: there is no item 'rs_1.0' here"):
        await client.responses.create(**asked)


def test_the_least_recently_used_responses_are_forgotten() -> None:
    earlier = ResponseHistory(capacity=2_000)
    for name in "ab":
        earlier.remember(None, name, [{"role": "user", "content": name * 50}])
    earlier.find(None, "a")
    earlier.remember(None, "c", [{"role": "user", "content": "c" * 50}])
    assert earlier.find(None, "a") == [{"role": "user", "content": "a" * 50}]
    with pytest.raises(RequestError):
        earlier.find(None, "b")


def test_a_response_remembered_twice_counts_once() -> None:
    earlier = ResponseHistory(capacity=2_000)
    for _ in range(10):
        earlier.remember(None, "a", [{"role": "user", "content": "a" * 50}])
    earlier.remember(None, "b", [{"role": "user", "content": "b" * 50}])
    assert earlier.find(None, "a") != earlier.find(None, "b")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"no_such_field": 1}, "no_such_field: this field is not supported"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0]: 'type' 'local_shell' is not supported"),
        ({"background": True}, "background: "),
        ({"include": ["message.output_text.logprobs"]}, "include[0]: "),
        ({"conversation": "conv_1"}, "conversation: this field is not supported"),
        ({"reasoning": {"unheard": 1}}, "reasoning.unheard: this field is not supported"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools: it is"),
        ({"tool_choice": "always"}, "'always' is not supported"),
        ({"temperature": "hot"}, "temperature: "),
        ({"max_output_tokens": 0}, "max_output_tokens: "),
        ({"input": []}, "input: it is empty"),
        ({"input": 5}, "input: "),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]: this item is not supported"),
        ({"input": [user([{"type": "input_file", "file_id": "x"}])]}, "'input_file' is not supported"),
        ({"input": [HIDDEN_THOUGHT]}, "encrypted_content: this field is not supported"),
    ],
)
async def test_what_is_not_understood_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    fake, app = translated()
    with pytest.raises(openai.BadRequestError) as refused:
        await openai_client(app).responses.create(**{**ASK, "extra_body": fields})
    assert refused.value.type == "invalid_request_error"
    assert message in refused.value.message
    assert fake.asked == []


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, VLLM_ERROR, openai.BadRequestError),
        (404, OLD_VLLM_ERROR, openai.NotFoundError),
        (429, "too long", openai.RateLimitError),
        (503, {"detail": "too long"}, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_engine_become_the_sdks_own(
    status: int, error: Any, kind: type, stream: bool
) -> None:
    _, app = translated(Say(status=status, error=error))
    with pytest.raises(kind, match="too long") as refused:
        await openai_client(app).responses.create(**ASK, stream=stream)
    assert refused.value.body["message"] == "too long"


@pytest.mark.parametrize("say", BREAKS)
async def test_a_stream_that_breaks_off_fails(say: Say) -> None:
    _, app = translated(say)
    events = [event async for event in await openai_client(app).responses.create(**ASK, stream=True)]
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.error.code == "server_error"
    assert events[-1].response.error.message == events[-2].message
    for event in events[-2:]:
        EVENTS.validate_python(event.to_dict())


async def test_a_context_that_overflows_in_a_stream_has_its_own_code() -> None:
    error = {"message": "too long", "code": "context_length_exceeded", "type": "invalid_request_error"}
    _, app = translated(Say("hel", error=error))
    events = [event async for event in await openai_client(app).responses.create(**ASK, stream=True)]
    assert (events[-1].type, events[-1].response.error.code) == ("response.failed", "context_length_exceeded")


async def test_an_aborted_answer_is_an_error_that_may_be_tried_again() -> None:
    with pytest.raises(openai.InternalServerError, match=r"is incomplete.*abort") as refused:
        await ask(Say("hel", finish="abort"))
    assert refused.value.status_code == 503


async def test_parsing_into_a_model() -> None:
    class City(pydantic.BaseModel):
        city: str

    fake, app = translated(Say('{"city": "Bern"}'))
    answer = await openai_client(app).responses.parse(**ASK, text_format=City)
    assert answer.output_parsed == City(city="Bern")
    assert fake.asked[0]["response_format"]["json_schema"]["name"] == "City"
