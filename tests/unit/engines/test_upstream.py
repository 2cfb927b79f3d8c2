"""The upstream engine: forwarded requests, responses, and failures of the upstream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import openai
import pytest
from app_clients import openai_client
from counting_proxy import OUTSIDE, counting_proxy
from gateway_helpers import BODY, CHAT, asgi_scope, within
from scripted_models import serve_chat
from starlette.requests import Request
from starlette.responses import JSONResponse

from raylight.engines.protocol import LoraAdapter
from raylight.engines.upstream import UpstreamEngine
from raylight.errors import ConfigError, WeightSyncError

URL = "https://upstream.example/api/v1"
ANSWER = {"id": "x", "object": "chat.completion", "choices": []}
EVENTS = [b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"]

Handler = Callable[[httpx2.Request], Any]


class Pieces(httpx2.AsyncByteStream):
    """A body in pieces. `gate` holds back all but the first; `closed` is set when the reader stops."""

    def __init__(self, pieces: list[bytes], error: Exception | None = None, held: bool = False) -> None:
        self.pieces = pieces
        self.error = error
        self.gate, self.closed = asyncio.Event(), asyncio.Event()
        if not held:
            self.gate.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for number, piece in enumerate(self.pieces):
            if number:
                await self.gate.wait()
            yield piece
        if self.error:
            raise self.error

    async def aclose(self) -> None:
        self.closed.set()


class Call:
    """A request to the engine's application, and its response."""

    def __init__(
        self, engine: UpstreamEngine, path: str = CHAT, body: Any = BODY, method: str = "POST", **headers: str
    ) -> None:
        self.engine = engine
        given = [
            (name.encode(), value.encode())
            for name, value in ({"content-type": "application/json"} | headers).items()
        ]
        self.scope = asgi_scope(path, method) | {"headers": given}
        self.left = asyncio.Event()
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.pieces: list[bytes] = []
        self.status = 0
        self.headers: dict[str, str] = {}
        self._body = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive(self) -> dict[str, Any]:
        if self._body:
            return self._body.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.pieces.append(message.get("body", b""))
        self.sent.put_nowait(message)

    async def run(self) -> Call:
        async with within():
            await (await self.engine.app())(self.scope, self.receive, self.send)
        return self

    @property
    def json(self) -> Any:
        return json.loads(b"".join(self.pieces))

    @property
    def error(self) -> str:
        return self.json["error"]["message"]


def engine_of(
    handler: Handler, key: str | None = "up-key", url: str = URL, **settings: Any
) -> UpstreamEngine:
    return UpstreamEngine(
        url, key, "policy", "up/model-7", transport=httpx2.MockTransport(handler), **settings
    )


def answering(status: int = 200, body: Any = ANSWER, **headers: str) -> Handler:
    return lambda request: httpx2.Response(
        status, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


def streaming(body: Pieces) -> Handler:
    return lambda request: httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=body)


def raising(error: Exception) -> Handler:
    def fail(request: httpx2.Request) -> Any:
        raise error

    return fail


async def test_a_request_goes_up_with_the_upstreams_model_and_key_and_nothing_else() -> None:
    seen: list[httpx2.Request] = []

    def note(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(200, json=ANSWER)

    headers = {
        "authorization": "Bearer the-agents",
        "x-api-key": "the-agents",
        "cookie": "c",
        "x-stainless-os": "Linux",
    }
    call = await Call(engine_of(note), body=BODY | {"temperature": 0.1, "x": "ü"}, **headers).run()
    (request,) = seen
    assert str(request.url) == f"{URL}/chat/completions"
    assert request.headers["authorization"] == "Bearer up-key"
    assert json.loads(request.content) == BODY | {"temperature": 0.1, "x": "ü", "model": "up/model-7"}
    assert "the-agents" not in str(request.headers.raw)
    assert not {"cookie", "x-stainless-os", "x-api-key"} & set(request.headers)
    assert (call.status, call.json) == (200, ANSWER)


async def test_without_a_key_none_is_sent() -> None:
    seen: list[Any] = []
    engine = engine_of(
        lambda request: seen.append(request.headers) or httpx2.Response(200, json=ANSWER), key=None
    )
    await Call(engine, authorization="Bearer the-agents").run()
    assert "authorization" not in seen[0]


@pytest.mark.parametrize(
    ("url", "path", "target"),
    [
        (URL, "/v1/completions", URL + "/completions"),
        (URL + "/", CHAT, URL + "/chat/completions"),
        (URL, "/tokenize", "https://upstream.example/api/tokenize"),
        ("http://h:1/x", "/detokenize", "http://h:1/x/detokenize"),
        ("http://h:1/x", CHAT, "http://h:1/x/chat/completions"),
    ],
)
async def test_paths_are_joined_as_clients_do(url: str, path: str, target: str) -> None:
    seen: list[str] = []
    engine = engine_of(
        lambda request: seen.append(str(request.url)) or httpx2.Response(200, json=ANSWER), url=url
    )
    await Call(engine, path).run()
    assert seen == [target]


async def test_only_headers_for_clients_come_down() -> None:
    given = {
        "x_ratelimit_remaining_requests": "3",
        "openai_processing_ms": "5",
        "set_cookie": "a=b",
        "server": "s",
        "x_request_id": "r",
    }
    call = await Call(engine_of(answering(**given))).run()
    names = {"content-type", "x-ratelimit-remaining-requests", "openai-processing-ms", "x-request-id"}
    assert set(call.headers) == names


async def test_a_stream_passes_piece_by_piece() -> None:
    body = Pieces(EVENTS, held=True)
    call = Call(engine_of(streaming(body)))
    running = asyncio.create_task(call.run())
    async with within():
        assert (await call.sent.get())["type"] == "http.response.start"
        assert (await call.sent.get())["body"] == EVENTS[0]  # while the upstream holds the rest back
        body.gate.set()
        await running
    assert b"".join(call.pieces) == b"".join(EVENTS)
    assert body.closed.is_set()


async def test_a_client_that_leaves_ends_the_upstreams_work() -> None:
    body = Pieces(EVENTS, held=True)
    call = Call(engine_of(streaming(body)))
    running = asyncio.create_task(call.run())
    async with within():
        await call.sent.get()
        call.left.set()
        await running
    assert body.closed.is_set()


async def test_a_client_that_leaves_before_the_answer_cancels_the_request() -> None:
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def never(request: httpx2.Request) -> httpx2.Response:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    call = Call(engine_of(never))
    running = asyncio.create_task(call.run())
    async with within():
        await asked.wait()
        call.left.set()
        await running
    assert cancelled.is_set()
    assert call.sent.empty()


async def test_a_cancelled_request_is_cancelled_upstream_too() -> None:
    body = Pieces(EVENTS, held=True)
    call = Call(engine_of(streaming(body)))
    running = asyncio.create_task(call.run())
    async with within():
        await call.sent.get()
        running.cancel()
        await asyncio.wait([running])
    assert running.cancelled()
    assert body.closed.is_set()


# failures


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (httpx2.ConnectError("refused"), 502, "cannot be reached: refused"),
        (httpx2.ReadTimeout("slow"), 504, "in time"),
        (httpx2.ConnectTimeout("slow"), 504, "in time"),
        (httpx2.RemoteProtocolError("nonsense"), 502, "nonsense"),
        (httpx2.PoolTimeout("full"), 503, "connections"),
        (httpx2.ReadError("reset"), 502, "reset"),
    ],
)
async def test_a_broken_way_up_is_said_so(error: Exception, status: int, says: str) -> None:
    call = await Call(engine_of(raising(error))).run()
    assert call.status == status
    assert says in call.error


@pytest.mark.parametrize("status", [400, 404, 409, 422, 429, 500, 503])
async def test_an_upstreams_refusal_comes_down_with_its_status(status: int) -> None:
    body = {"error": {"message": "not so", "type": "odd", "param": "x", "code": 7}}
    call = await Call(engine_of(answering(status, body, retry_after="3", set_cookie="a=b"))).run()
    assert (call.status, call.json["error"]["type"]) == (status, "odd")
    assert call.error.startswith("not so")
    assert ("check engine.url" in call.error) == (status == 404)
    assert (call.headers["retry-after"], call.headers["content-type"]) == ("3", "application/json")
    assert "set-cookie" not in call.headers


@pytest.mark.parametrize(("code", "retry"), [("insufficient_quota", "false"), ("rate_limit_exceeded", None)])
async def test_a_quota_that_is_used_up_is_not_tried_again(code: str, retry: str | None) -> None:
    body = {"error": {"message": "no", "type": "requests", "param": None, "code": code}}
    call = await Call(engine_of(answering(429, body))).run()
    assert (call.json, call.headers.get("x-should-retry")) == (body, retry)


async def test_a_refusal_in_plain_text_gets_the_shape() -> None:
    call = await Call(engine_of(lambda request: httpx2.Response(503, text="<html>busy</html>"))).run()
    assert (call.status, call.error) == (503, "<html>busy</html>")


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_the_upstream_refuses_is_never_shown(status: int) -> None:
    call = await Call(engine_of(answering(status, {"error": {"message": "bad key up-key"}}))).run()
    assert call.status == status
    assert "rejected this server's API key" in call.error
    assert "up-key" not in str(call.json)
    assert call.json["error"]["code"] == ("invalid_api_key" if status == 401 else None)


async def test_a_redirect_is_not_followed() -> None:
    call = await Call(
        engine_of(lambda request: httpx2.Response(307, headers={"location": "http://169.254.169.254/"}))
    ).run()
    assert (call.status, "final URL" in call.error) == (502, True)


@pytest.mark.parametrize("status", [404, 405])
@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_an_upstream_that_does_not_tokenize_is_a_bad_request(path: str, status: int) -> None:
    call = await Call(engine_of(answering(status, {"detail": "Not Found"})), path).run()
    assert (call.status, call.error) == (400, f"the upstream has no {path}")


async def test_another_model_is_not_there() -> None:
    engine = engine_of(raising(AssertionError("still requested")))
    for body in (BODY | {"model": "up/model-7"}, {"messages": []}):
        call = await Call(engine, body=body).run()
        assert (call.status, "serves 'policy'" in call.error) == (404, True)


async def test_a_stream_that_breaks_off_between_events_says_why() -> None:
    call = await Call(engine_of(streaming(Pieces(EVENTS[:2], httpx2.ReadError("reset"))))).run()
    last = json.loads(call.pieces[-1].removeprefix(b"data: "))
    assert (b"".join(call.pieces[:-1]), last["error"]["message"]) == (
        b"".join(EVENTS[:2]),
        f"the upstream model at {URL} broke off its response: reset",
    )


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_an_answer_that_breaks_off_elsewhere_is_cut(kind: str) -> None:
    body = Pieces([b'data: {"n'], httpx2.ReadError("reset"))
    engine = engine_of(lambda request: httpx2.Response(200, headers={"content-type": kind}, stream=body))
    with pytest.raises(Exception, match="broke off"):
        await Call(engine).run()


async def test_a_real_client_reads_streams_and_errors_through_it() -> None:
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}
    events = [b"data: " + json.dumps(chunk).encode() + b"\n\n"]
    engine = engine_of(streaming(Pieces(events, httpx2.ReadError("reset"))))
    async with within(), openai_client(await engine.app()) as client:
        stream = await client.chat.completions.create(**BODY, stream=True)
        assert (await anext(stream)).id == "x"
        with pytest.raises(openai.APIError, match="broke off"):
            await anext(stream)


# the engine


async def test_the_model_is_listed_under_its_name_here() -> None:
    call = await Call(engine_of(raising(AssertionError())), "/v1/models", method="GET").run()
    assert [model["id"] for model in call.json["data"]] == ["policy"]


async def test_an_upstream_model_has_no_weights() -> None:
    engine = engine_of(answering())
    adapter = LoraAdapter({}, {})
    for work in (engine.start_weight_update(), engine.load_adapter("a", 1, adapter), engine.logprobs([1, 2])):
        with pytest.raises(WeightSyncError, match="cannot be trained"):
            await work
    await engine.drop_adapter("a")
    assert "no memory" in str(await engine.sleep())
    await engine.wake()
    assert (engine.tokenizer, engine.max_model_len) == (None, None)


async def test_a_closed_engine_ends_its_requests_and_takes_no_more() -> None:
    asked = asyncio.Event()

    async def never(request: httpx2.Request) -> httpx2.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    engine = engine_of(never)
    await engine.check_health()
    call = Call(engine)
    running = asyncio.create_task(call.run())
    async with within():
        await asked.wait()
        engine.close()
        await running
    assert call.status == 503
    assert (await Call(engine).run()).status == 503
    with pytest.raises(RuntimeError, match="closed"):
        await engine.check_health()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "upstream.example/v1",
        "ftp://h/v1",
        "http://",
        "http://h/v1?key=1",
        "http://u:p@h/v1",
        "http://h:x",
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        UpstreamEngine(url, None, "policy")


async def test_a_proxy_leads_to_upstreams_on_other_machines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: Request) -> JSONResponse:
        return JSONResponse(ANSWER)

    with counting_proxy() as proxy, serve_chat(answer) as here:
        for name, value in proxy.variables.items():
            monkeypatch.setenv(name, value)
        for url, seen in ((here, []), (f"http://{OUTSIDE}/v1", [f"{OUTSIDE}:80"])):
            call = await Call(UpstreamEngine(url, None, "policy")).run()
            assert (call.status, proxy.seen) == (200, seen)
