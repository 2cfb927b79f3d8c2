"""Any model name from an attempt: answered by the served model, echoed, and recorded as an auxiliary call."""

import json
from typing import Any

import openai
import pytest
from capture_helpers import FakeApp
from gateway_helpers import CHAT, MINE, MODELS, SECRET, within
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from raylight.http.sse import sse_bytes
from raylight.semconv import REQUEST_MODEL
from raylight.serving.gateway.model_names import describe_model, model_in_place_of

from .test_gateway_stack import MESSAGES, Stack

HAIKU = "claude-haiku-4-5"


class App(FakeApp):
    """Engine's application that serves a list of models, and streams if asked to."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/models":
            await JSONResponse({"object": "list", "data": MODELS["data"][:1]})(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def stack(**settings: Any) -> Stack:
    return Stack(engine_app=App(), **settings)


async def test_every_dialect_echoes_the_requested_name_and_records_an_auxiliary_call() -> None:
    served = stack()
    async with within(), served.openai() as client, served.anthropic() as other:
        chat = await client.chat.completions.create(model=HAIKU, messages=MESSAGES)
        completion = await client.completions.create(model=HAIKU, prompt="hi")
        response = await client.responses.create(model=HAIKU, input="hi")
        message = await other.messages.create(model=HAIKU, messages=MESSAGES, max_tokens=5)
        own = await client.chat.completions.create(model="policy", messages=MESSAGES)
    assert {chat.model, completion.model, response.model, message.model} == {HAIKU}
    assert own.model == "policy"
    await served.sink.has(5, 5)
    generations = [generation for _, generation, _ in served.sink.closed if generation]
    assert {generation.model for generation in generations} == {"policy"}
    assert [generation.auxiliary_model for generation in generations] == [HAIKU] * 4 + [None]
    spans = [dict(span.attributes)[REQUEST_MODEL] for _, _, span in served.sink.closed if span]
    assert spans == [HAIKU] * 4 + ["policy"]
    assert served.value("auxiliary_requests_total") == 4


async def test_a_stream_that_is_cut_anywhere_has_the_requested_name() -> None:
    quoted = json.dumps({"model": "policy"})
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
    choice = {"index": 0, "delta": {"role": "assistant", "content": quoted}, "finish_reason": "stop"}
    stream = sse_bytes(chunk | {"choices": [choice]}) + sse_bytes("[DONE]")

    async def engine_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/models":
            await JSONResponse(MODELS)(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for byte in stream:
            await send({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    served = Stack(engine_app=engine_app)
    served.engine_app = engine_app
    async with within(), served.openai() as client:
        answer = await client.chat.completions.create(model='odd"name', messages=MESSAGES, stream=True)
        chunks = [piece async for piece in answer]
    assert [(piece.model, piece.choices[0].delta.content) for piece in chunks] == [('odd"name', quoted)]


async def test_outside_of_attempts_the_engine_judges_the_name() -> None:
    seen: list[Any] = []

    async def engine_app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["path"])
        await Response(status_code=404)(scope, receive, send)

    served = Stack(engine_app=engine_app)
    assert (await served.post(CHAT, SECRET, {"model": HAIKU, "messages": MESSAGES})).status_code == 404
    assert seen == [CHAT]


async def test_an_attempt_finds_any_model_and_the_run_only_those_served() -> None:
    served = stack()
    async with within(), served.openai(MINE) as client, served.anthropic() as other:
        assert (await client.models.retrieve(HAIKU)).id == HAIKU
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert [(model.id, model.display_name) async for model in other.models.list()] == [
            ("policy", "policy")
        ]
    async with within(), served.openai("") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.retrieve(HAIKU)


@pytest.mark.parametrize(
    ("name", "served", "expected"),
    [
        ("policy", ["policy"], "policy"),
        ("x", ["policy"], "policy"),
        ("x", ["policy", "adapter"], "adapter"),
        ("adapter", ["policy", "adapter"], "adapter"),
        ("x", [], "policy"),
    ],
)
def test_the_adapter_is_the_trained_model(name: str, served: list[str], expected: str) -> None:
    assert model_in_place_of(name, "policy", served) == expected


def test_an_entry_without_a_time_is_of_1970() -> None:
    assert describe_model({"id": "a"})["created_at"] == "1970-01-01T00:00:00Z"
