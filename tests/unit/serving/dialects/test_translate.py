"""The translation middleware, called directly."""

import asyncio
import json
from typing import Any

import pytest
from asgi_helpers import DISCONNECT, replying, request, response_body, start, stream_start, talk
from dialect_helpers import FakeChat, Say, translated
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from raylight.http.sse import SseReader, sse_bytes
from raylight.serving.dialects.translate import TranslationMiddleware


def asking(path: str = "/v1/messages", method: str = "POST", **more: Any) -> Scope:
    headers = [
        (b"content-length", b"1"),
        (b"Content-Type", b"text/odd"),
        (b"accept-encoding", b"gzip"),
        (b"x-trace", b"t"),
    ]
    return {
        "type": "http",
        "path": path,
        "raw_path": path.encode(),
        "method": method,
        "headers": headers,
        "query_string": b"",
        **more,
    }


ASK = json.dumps(
    {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "stream": True}
).encode()


async def test_a_body_in_pieces_arrives_whole_and_described() -> None:
    fake, app = translated(Say("hello"))
    pieces = [request(ASK[at : at + 9], more=at + 9 < len(ASK)) for at in range(0, len(ASK), 9)]
    await talk(app, asking("/app/v1/messages", root_path="/app"), *pieces)
    scope = fake.scopes[0]
    assert (scope["path"], scope["raw_path"]) == ("/app/v1/chat/completions", b"/app/v1/chat/completions")
    headers = dict(scope["headers"])
    assert headers == {b"x-trace": b"t", b"content-type": b"application/json"}
    assert fake.asked[0]["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/messages"])
async def test_other_paths_pass_through_untouched(path: str) -> None:
    seen: list[Any] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([scope, receive, send])

    scope, things = asking(path), [object(), object()]
    await TranslationMiddleware(inner)(scope, *things)  # type: ignore[arg-type]
    assert seen[0] is scope
    assert seen[1:] == things


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "top_k", 2**63),
        ("/v1/completions", "top_k", 2**63),
        ("/v1/responses", "max_output_tokens", 2**40),
        ("/v1/messages", "stop_sequences", ["x" * 1001]),
        ("/v1/messages/count_tokens", "tools", [{}] * 1001),
        ("/tokenize", "truncate_prompt_tokens", -5),
        ("/detokenize", "tokens", [-1]),
    ],
)
async def test_values_beyond_their_bounds_are_refused_by_the_clients_name(
    path: str, field: str, value: Any
) -> None:
    fake, app = translated()
    content = json.dumps({"model": "policy", field: value}).encode()
    begin, answer = await talk(app, asking(path), request(content))
    assert begin["status"] == 400
    assert json.loads(answer["body"])["error"]["message"].startswith(field)
    assert fake.asked == []


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/messages/batches", "POST", 404),
        ("/v1/responses/resp_1", "GET", 404),
        ("/v1/messages", "GET", 405),
        ("/v1/responses/", "POST", 404),
    ],
)
async def test_the_engines_own_routes_of_a_dialect_are_not_reached(
    path: str, method: str, status: int
) -> None:
    fake, app = translated()
    sent = await talk(app, asking(path, method))
    assert sent[0]["status"] == status
    assert json.loads(sent[1]["body"])["error"]["message"]
    assert fake.scopes == []


NESTED = b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": ' + b"[" * 100_000
DEEP = json.dumps(
    {
        "model": "m",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "f", "input_schema": {"a": 1}}],
    }
)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        NESTED,
        *(DEEP.replace("1}}", "[" * n + "]" * n + "}}").encode() for n in (900, 960, 990)),
        b'{"model": "m\\ud800"}',
        b'{"a": "\\uD800"}',
        b'{"model": "m", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"max_tokens": NaN}',
    ],
)
async def test_bodies_that_are_no_requests_are_refused(content: bytes) -> None:
    fake, app = translated(Say("ok"))
    sent = await talk(app, asking(), request(content))
    if not fake.asked:  # else it was not too deep
        assert sent[0]["status"] == 400
        assert json.loads(sent[1]["body"])["type"] == "error"
    assert fake.asked == [] or content.startswith(b'{"model": "m", "max_tokens": 1,')


async def test_half_a_surrogate_pair_reaches_no_engine_even_where_anything_may_stand() -> None:
    fake, app = translated(Say("ok"))
    half = DEEP.replace("1}}", '"\\ud800"}}').encode()
    assert (await talk(app, asking(), request(half)))[0]["status"] == 400
    paired = half.replace(b"\\ud800", b"\\ud83d\\ude00")
    assert (await talk(app, asking(), request(paired)))[0]["status"] == 200
    assert fake.asked[0]["tools"][0]["function"]["parameters"] == {"a": "\N{GRINNING FACE}"}


async def test_a_client_that_leaves_while_it_asks_reaches_no_engine() -> None:
    fake, app = translated()
    cut = request(ASK[:5], more=True)
    with pytest.raises(ClientDisconnect):
        await talk(app, asking(), cut, DISCONNECT)
    assert fake.scopes == []


async def test_each_piece_of_a_stream_leaves_as_it_comes_and_a_disconnect_arrives() -> None:
    """The application sends the next piece after the client has the last; the client disconnects midway."""
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    outbox: asyncio.Queue[Message] = asyncio.Queue()
    left = asyncio.Event()
    chunks = [b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in Say("ab").chunks(1)]
    gate: asyncio.Queue[bytes] = asyncio.Queue()

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(stream_start(x_a="b"))
        gone = asyncio.create_task(receive())
        while not gone.done():
            piece = asyncio.create_task(gate.get())
            await asyncio.wait([piece, gone], return_when=asyncio.FIRST_COMPLETED)
            if piece.done():
                await send(response_body(piece.result(), more=True))
        assert gone.result()["type"] == "http.disconnect"
        left.set()

    inbox.put_nowait(request(ASK))
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(TranslationMiddleware(inner)(asking(), inbox.get, outbox.put))
        begin = await outbox.get()
        assert dict(begin["headers"]) == {b"content-type": b"text/event-stream; charset=utf-8", b"x-a": b"b"}
        seen = []
        for chunk in chunks[:3]:
            gate.put_nowait(chunk)
            seen.append([event.event for event in SseReader().feed((await outbox.get())["body"])])
        assert seen == [
            ["message_start"],
            ["content_block_start", "content_block_delta"],
            ["content_block_delta"],
        ]
        inbox.put_nowait(DISCONNECT)
        await left.wait()


async def test_a_piece_without_news_sends_nothing() -> None:
    fake = FakeChat(Say("a"))
    sent = await talk(TranslationMiddleware(fake), asking(), request(ASK))
    assert all(message["body"] for message in sent[1:-1])
    assert not sent[-1]["more_body"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("piece", [b"data: {\n\n", b"data: 3\n\n", b"data: {}\n\n", b""])
async def test_a_stream_that_is_none_ends_in_an_error_event(path: str, piece: bytes) -> None:
    late = sse_bytes({"id": "x", "model": "m", "choices": [{"delta": {"content": "late"}}]})
    inner = replying(stream_start(), response_body(piece, more=True), response_body(late))
    asked = ASK if path == "/v1/messages" else b'{"model": "m", "input": "hi", "stream": true}'
    sent = await talk(TranslationMiddleware(inner), asking(path), request(asked))
    events = SseReader().feed(b"".join(message["body"] for message in sent[1:]))
    wanted = "error" if path == "/v1/messages" else "response.failed"
    assert events[-1].event == wanted
    assert [event.event for event in events].count("error") == 1
    assert sent[-1]["more_body"] is False


@pytest.mark.parametrize(
    "answer",
    [
        b"no JSON",
        b"[]",
        b"{}",
        b'{"id": "x", "model": "m", "choices": []}',
        b'{"id": 1, "model": "m", "choices": [{"message": {"content": [1]}}]}',
    ],
)
async def test_an_answer_that_is_none_is_a_bad_gateway(answer: bytes) -> None:
    inner = replying(start(content_length="3"), response_body(answer))
    sent = await talk(TranslationMiddleware(inner), asking(), request(ASK))
    assert sent[0]["status"] == 502
    assert json.loads(sent[1]["body"])["error"]["type"] == "api_error"
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(sent[1]["body"])).encode()


async def test_headers_of_a_refusal_stay() -> None:
    refusal = start(429, retry_after="3", content_type="text/plain")
    inner = replying(refusal, response_body(b"slow ", more=True), response_body(b"down"))
    sent = await talk(TranslationMiddleware(inner), asking(), request(ASK))
    assert dict(sent[0]["headers"])[b"retry-after"] == b"3"
    assert json.loads(sent[1]["body"])["error"] == {"type": "rate_limit_error", "message": "slow down"}


async def test_an_application_that_fails_fails_outside_too() -> None:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        await talk(TranslationMiddleware(inner), asking(), request(ASK))


SCALARS = st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | st.text(max_size=4)
TYPES = [
    "text",
    "tool_use",
    "tool_result",
    "image",
    "thinking",
    "input_text",
    "output_text",
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "function",
    "json_schema",
    "auto",
    "user",
    "assistant",
    "system",
]
NAMES = [
    "type",
    "role",
    "content",
    "text",
    "input",
    "id",
    "name",
    "source",
    "tool_use_id",
    "call_id",
    "arguments",
    "output",
    "summary",
    "thinking",
    "tools",
    "tool_choice",
    "messages",
    "model",
    "max_tokens",
    "system",
    "format",
    "schema",
    "parameters",
    "input_schema",
]
ANYTHING = st.recursive(
    SCALARS | st.sampled_from(TYPES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
)


@settings(deadline=None)
@given(
    st.sampled_from(["/v1/messages", "/v1/messages/count_tokens", "/v1/responses"]),
    st.dictionaries(st.sampled_from(NAMES), ANYTHING),
)
async def test_whatever_is_asked_is_answered_or_refused(path: str, fields: dict[str, Any]) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    asked = {"model": "m", "input": "hi"} if path == "/v1/responses" else asked
    _, app = translated(Say("ok"))
    sent = await talk(app, asking(path), request(json.dumps(asked | fields).encode()))
    assert sent[0]["status"] in (200, 400)
    assert isinstance(json.loads(sent[1]["body"]), dict)
