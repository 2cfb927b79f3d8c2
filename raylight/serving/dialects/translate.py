"""The layer that turns what agents speak into what engines understand, and the answers back, as they come."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight.engines.capture_context import SCOPE
from raylight.http.errors import (
    DialectName,
    RequestError,
    dialect_of,
    error_body,
    error_of,
    error_response,
    read_error,
)
from raylight.http.request import JsonRequest, json_request
from raylight.http.sse import SseReader, sse_bytes
from raylight.serving.dialects.answers import DONE
from raylight.serving.dialects.messages_answer import CountTokens, Messages
from raylight.serving.dialects.response_history import EarlierResponses
from raylight.serving.dialects.responses_answer import Responses

DIALECT = "raylight.dialect"
"""Key of the ASGI scope under which inner layers find what the agent spoke, where it was translated."""

Headers = list[tuple[bytes, bytes]]


class Stream(Protocol):
    """Turns the chunks of a streamed chat answer into a dialect's events. An event is its data; its name is its `type`."""

    def feed(self, chunk: dict[str, Any]) -> list[dict[str, Any]]: ...

    def finish(self) -> list[dict[str, Any]]: ...

    def fail(self, error: RequestError) -> list[dict[str, Any]]: ...


class Translator(Protocol):
    """One request of a dialect and its answer. All of it may raise `RequestError`."""

    path: str
    """Of the engine's route."""

    def request(self, body: Any) -> dict[str, Any]: ...

    def answer(self, chat: dict[str, Any]) -> dict[str, Any]: ...

    def stream(self) -> Stream: ...


class Translate:
    """Serves `/v1/responses`, `/v1/messages` and `/v1/messages/count_tokens` by an application that serves
    `/v1/chat/completions` and `/tokenize`. Other paths pass through.

    Pieces of a stream leave as they come; a client's leaving reaches the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._earlier = EarlierResponses()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root) if scope["type"] == "http" else ""
        dialect = dialect_of(path)
        if dialect not in ("responses", "messages"):
            await self._app(scope, receive, send)
            return
        try:
            translator = self._translator(path, scope["method"])
            fields = (await json_request(scope, receive)).fields
            request = JsonRequest(translator.request(fields), receive)
        except RequestError as error:
            await error_response(dialect, error)(scope, receive, send)
            return
        inner = _inner_scope(scope, root + translator.path) | {DIALECT: dialect}
        await self._app(request.put_into(inner), request, _AnswerSender(dialect, translator, send))

    def _translator(self, path: str, method: str) -> Translator:
        translators: dict[str, Callable[[], Translator]] = {
            "/v1/responses": lambda: Responses(self._earlier, SCOPE.get()),
            "/v1/messages": Messages,
            "/v1/messages/count_tokens": CountTokens,
        }
        if path not in translators:
            raise RequestError(f"there is no {path} here", 404, "not_found_error")
        if method != "POST":
            raise RequestError(f"{path} takes POST only", 405)
        return translators[path]()


def _inner_scope(scope: AsgiScope, path: str) -> dict[str, Any]:
    headers = _without(scope["headers"], b"content-type", b"transfer-encoding", b"accept-encoding")
    headers += [(b"content-type", b"application/json")]
    return {**scope, "path": path, "raw_path": quote(path).encode(), "headers": headers}


def _without(headers: Any, *names: bytes) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in names]


class _AnswerSender:
    """A `send` that translates what the engine's application answers."""

    def __init__(self, dialect: DialectName, translator: Translator, send: Send) -> None:
        self._dialect = dialect
        self._translator = translator
        self._send = send
        self._status = 200
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._events: _EventStream | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._start(message)
        elif message["type"] == "http.response.body":
            more = message.get("more_body", False)
            await (self._piece if self._events else self._whole)(message.get("body", b""), more)
        else:
            await self._send(message)

    async def _start(self, message: Message) -> None:
        self._status = message["status"]
        headers = {name.lower(): value for name, value in message.get("headers", [])}
        self._headers = _without(message.get("headers", []), b"content-length", b"content-type")
        if self._status < 400 and headers.get(b"content-type", b"").lower().startswith(b"text/event-stream"):
            self._events = _EventStream(self._translator.stream())
            await self._begin(b"text/event-stream; charset=utf-8")

    async def _begin(self, content_type: bytes, *more: tuple[bytes, bytes]) -> None:
        headers = [*self._headers, (b"content-type", content_type), *more]
        await self._send({"type": "http.response.start", "status": self._status, "headers": headers})

    async def _piece(self, body: bytes, more: bool) -> None:
        assert self._events is not None
        out = self._events.feed(body) + (b"" if more else self._events.finish())
        if out or not more:
            await self._send({"type": "http.response.body", "body": out, "more_body": more})

    async def _whole(self, body: bytes, more: bool) -> None:
        self._body.append(body)
        if more:
            return
        answer = json.dumps(self._translate(b"".join(self._body))).encode()
        await self._begin(b"application/json", (b"content-length", str(len(answer)).encode()))
        await self._send({"type": "http.response.body", "body": answer, "more_body": False})

    def _translate(self, body: bytes) -> dict[str, Any]:
        """The answer in the dialect's words; it may turn out to be an error."""
        try:
            if self._status >= 400:
                raise read_error(self._status, body)
            return self._translator.answer(_engine_json(body))
        except RequestError as error:
            self._status = error.status
            return error_body(self._dialect, error)


class _EventStream:
    """Bytes of an engine's event stream in, bytes of a dialect's out."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._reader = SseReader()
        self._over = False

    def feed(self, body: bytes) -> bytes:
        return b"".join(self._event(event.data) for event in self._reader.feed(body))

    def finish(self) -> bytes:
        """What is left to say when the engine's answer is over."""
        return self._event(DONE)

    def _event(self, data: str) -> bytes:
        if self._over:
            return b""
        try:
            if data == DONE:
                self._over = True
                events = self._stream.finish()
            else:
                chunk = _engine_json(data)
                if error := error_of(chunk):
                    raise error
                events = self._stream.feed(chunk)
        except RequestError as error:
            self._over = True
            events = self._stream.fail(error)
        return b"".join(sse_bytes(event, event["type"]) for event in events)


def _engine_json(body: bytes | str) -> dict[str, Any]:
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the engine's answer is not JSON: {error}", 502, "server_error") from None
    if not isinstance(decoded, dict):
        raise RequestError("the engine's answer is not a JSON object", 502, "server_error")
    return decoded
