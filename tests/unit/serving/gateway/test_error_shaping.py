"""Errors of inner layers are sent in the shape of the dialect, whatever their own."""

import json
import logging
from typing import Any

import pytest
from asgi_helpers import DISCONNECT, EMPTY_BODY, talk
from gateway_helpers import CHAT, MINE, SECRET, Site, asgi_scope, is_refusal
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from raylight.http.errors import RequestError
from raylight.serving.capture.recorder import OverloadedError

MESSAGES = "/v1/messages"
FOUND = {"detail": [{"loc": ["body", "messages"], "msg": "Field required", "type": "missing"}]}
VLLM = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}
OPENAI = {"error": {"message": "no", "type": "tokens", "param": "n", "code": "rate_limit_exceeded"}}
ANTHROPIC = {
    "type": "error",
    "error": {"type": "invalid_request_error", "message": "no"},
    "request_id": "req_theirs",
}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/tokenize"])
@pytest.mark.parametrize(
    ("response", "status", "says"),
    [
        (JSONResponse(FOUND, 422), 400, "Field required"),
        (JSONResponse({"detail": "Not Found"}, 404), 404, "Not Found"),
        (PlainTextResponse("Internal Server Error", 500), 500, "Internal Server Error"),
        (Response(status_code=502), 502, "502"),
        (JSONResponse({"error": "plain"}, 400), 400, "plain"),
        (JSONResponse(["odd"], 400), 400, "odd"),
        (JSONResponse(VLLM, 400), 400, "no"),
        (Response(b"\xff\xfe", 400), 400, ""),
        (JSONResponse({"error": {}}, 400), 400, ""),
        (JSONResponse({"object": "error", "message": "old vLLM", "type": "x"}, 400), 400, "old vLLM"),
    ],
)
async def test_an_inner_error_gets_the_shape(
    site: Site, path: str, response: Response, status: int, says: str
) -> None:
    site.inner.app = response
    answer = await site.post(MINE + path)
    assert answer.status_code == status
    assert is_refusal(answer, path)
    assert says in answer.json()["error"]["message"]
    assert answer.headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize(("path", "body"), [(CHAT, OPENAI), (MESSAGES, ANTHROPIC)])
async def test_an_error_that_has_the_shape_stays_as_it_is(site: Site, path: str, body: Any) -> None:
    site.inner.app = JSONResponse(body, 429, {"retry-after": "7", "x-request-id": "req_theirs"})
    answer = await site.post(MINE + path)
    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (429, body, "7")


async def test_an_error_in_pieces_is_put_together(site: Site) -> None:
    async def pieces() -> Any:
        for byte in json.dumps(FOUND).encode():
            yield bytes([byte])

    site.inner.app = StreamingResponse(pieces(), 422, media_type="application/json")
    answer = await site.post()
    assert (answer.status_code, is_refusal(answer, CHAT)) == (400, True)
    assert "Field required" in answer.text


async def test_an_endless_error_is_cut(site: Site) -> None:
    async def pieces() -> Any:
        for _ in range(30):
            yield b"x" * 100_000

    site.inner.app = StreamingResponse(pieces(), 500)
    answer = await site.post()
    assert is_refusal(answer, CHAT)
    assert len(answer.content) < 1_100_000


def raising(error: Exception, after: int = 0) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if after:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise error

    return app


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_an_inner_failure_is_logged_and_tells_nothing(
    site: Site, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    site.inner.app = raising(ValueError("the secret path"))
    with caplog.at_level(logging.ERROR):
        answer = await site.post(MINE + path)
    assert (answer.status_code, is_refusal(answer, path)) == (500, True)
    assert "secret" not in answer.text
    assert "the secret path" in caplog.text


async def test_an_inner_refusal_keeps_its_status(site: Site) -> None:
    site.inner.app = raising(RequestError("full", 503, "overloaded_error"))
    answer = await site.post()
    assert answer.status_code == 503
    assert answer.json()["error"] == {
        "message": "full",
        "type": "server_error",
        "param": None,
        "code": "server_is_overloaded",
    }


async def test_an_overloaded_recorder_says_when_to_come_back(site: Site) -> None:
    site.inner.app = raising(OverloadedError("later"))
    assert (await site.post()).headers["retry-after"] == "1"


async def test_a_refusal_may_quote_half_a_character(site: Site) -> None:
    site.inner.app = raising(RequestError("\ud800 is odd"))
    assert (await site.post()).status_code == 400


@pytest.mark.parametrize("error", [ValueError("broken"), RequestError("late")])
async def test_an_answer_that_breaks_off_is_cut(site: Site, error: Exception) -> None:
    """The server closes the connection on an exception, so that no client takes a half answer for a whole
    one.
    """
    site.inner.app = raising(error, after=1)

    with pytest.raises(type(error)):
        await talk(site.app, asgi_scope(CHAT), EMPTY_BODY)


async def test_no_answer_is_a_failure(site: Site) -> None:
    async def silent(scope: Scope, receive: Receive, send: Send) -> None: ...

    site.inner.app = silent
    answer = await site.post()
    assert (answer.status_code, is_refusal(answer, CHAT)) == (500, True)


async def test_no_answer_to_a_client_that_left_is_none(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async def listens(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    site.inner.app = listens
    sent = await talk(site.app, asgi_scope(CHAT, key=SECRET), EMPTY_BODY, DISCONNECT)
    assert (sent, caplog.records) == ([], [])


async def test_a_stream_passes_at_once(site: Site) -> None:
    sent: list[Message] = []

    async def pieces() -> Any:
        yield b"data: 1\n\n"
        assert sent[-1]["body"] == b"data: 1\n\n"
        yield b"data: 2\n\n"

    site.inner.app = StreamingResponse(pieces(), media_type="text/event-stream")
    scope = asgi_scope(CHAT, asgi={"spec_version": "2.4", "version": "3.0"})
    await talk(site.app, scope, EMPTY_BODY, sent=sent)
    assert [message.get("body") for message in sent[1:]] == [b"data: 1\n\n", b"data: 2\n\n", b""]
