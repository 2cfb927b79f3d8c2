"""Middleware that translates agents' requests for the engine, and the engine's answers back.

Chat requests, translated or not, reach the inner layers in normal form.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight.engines.capture_context import SCOPE
from raylight.http.bounds import check_bounds
from raylight.http.errors import RequestError, find_error, read_error
from raylight.http.request import JsonRequest, json_request
from raylight.http.sse import SseReader, sse_bytes
from raylight.serving.dialects.answers import DONE, decode_json
from raylight.serving.dialects.chat_normalizer import ChatNormalizer
from raylight.serving.dialects.dialect import Dialect, Translation
from raylight.serving.dialects.native import ChatDialect, CompletionsDialect
from raylight.serving.dialects.registry import dialect_of
from raylight.serving.dialects.tool_checks import check_large_schemas, check_response_format

DIALECT_KEY = "raylight.dialect"
"""Key of the ASGI scope that holds the name of the dialect of a translated request."""

NATIVE_PATHS = (ChatDialect.path, CompletionsDialect.path, "/tokenize", "/detokenize")
"""Routes that the engine serves itself, and whose requests are checked."""

Headers = list[tuple[bytes, bytes]]


class TranslationMiddleware:
    """Serves the routes of all dialects with an application that serves chat completions and `/tokenize`.

    Completions, and all other paths, pass through. Pieces of a stream are sent as they arrive; a client's
    disconnect reaches the application.

    Args:
        template: the model's chat template; None if the model runs elsewhere.
    """

    def __init__(self, app: ASGIApp, template: str | None = None) -> None:
        self._app = app
        self._normalizer = ChatNormalizer(template)
        self._dialects: dict[type[Dialect], Dialect] = {}

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root) if scope["type"] == "http" else ""
        dialect = dialect_of(path)
        if dialect.native:
            checked = path in NATIVE_PATHS and scope["method"] == "POST"
            await (self._serve_native if checked else self._app)(scope, receive, send)
            return
        answer = _AnswerSender(dialect, send)
        try:
            _check_route(dialect, path, scope["method"])
            fields = (await json_request(scope, receive)).fields
            check_bounds(fields)
            answer.translation = translation = self._instance(dialect).translate(path, fields, SCOPE.get())
            chat = await self._normalize(translation)
        except RequestError as error:
            await answer.send_error(error)
            return
        request = JsonRequest(chat, receive)
        inner = _inner_scope(scope, root + translation.engine_path) | {DIALECT_KEY: dialect.name}
        await self._app(request.put_into(inner), request, answer)

    async def _serve_native(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        try:
            request = (await json_request(scope, receive)).with_receive(receive)
            fields = request.fields
            check_bounds(fields)
            await check_large_schemas(fields)
            if scope["path"].removeprefix(scope.get("root_path", "")) == ChatDialect.path:
                fields = self._normalizer.normalize(fields)
            else:
                check_response_format(fields.get("response_format"))
        except RequestError as error:
            await _AnswerSender(ChatDialect, send).send_error(error)
            return
        if fields is not request.fields:
            request = JsonRequest(fields, receive)
        await self._app(request.put_into(scope), request, send)

    async def _normalize(self, translation: Translation) -> dict[str, Any]:
        """Return the engine's request in normal form.

        Raises:
            RequestError: 400, it has none; the error names the fields as the agent does.
        """
        names = translation.field_names
        try:
            await check_large_schemas(translation.engine_request)
            return self._normalizer.normalize(translation.engine_request, names.of)
        except RequestError as error:
            raise names.rename(error) from None

    def _instance(self, dialect: type[Dialect]) -> Dialect:
        if dialect not in self._dialects:
            self._dialects[dialect] = dialect()
        return self._dialects[dialect]


def _check_route(dialect: type[Dialect], path: str, method: str) -> None:
    if path != dialect.path and path not in dialect.other_paths:
        raise RequestError(f"the route {path} does not exist", 404, "not_found_error")
    if method != "POST":
        raise RequestError(f"{path} takes POST, not {method:.20}", 405)


def _inner_scope(scope: AsgiScope, path: str) -> dict[str, Any]:
    headers = _without(scope["headers"], b"content-type", b"transfer-encoding", b"accept-encoding")
    headers += [(b"content-type", b"application/json")]
    return {**scope, "path": path, "raw_path": quote(path).encode(), "headers": headers}


def _without(headers: Any, *names: bytes) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in names]


class _AnswerSender:
    """An ASGI `send` that translates the answer of the engine's application.

    Attributes:
        translation: the request that is answered; set before the application runs.
    """

    translation: Translation

    def __init__(self, dialect: type[Dialect], send: Send) -> None:
        self._dialect = dialect
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
            await (self._send_piece if self._events else self._send_whole)(message.get("body", b""), more)
        else:
            await self._send(message)

    async def send_error(self, error: RequestError) -> None:
        """Answer with an error in place of the application."""
        self._status = error.status
        await self._send_json(self._dialect.error_body(error))

    async def _start(self, message: Message) -> None:
        self._status = message["status"]
        headers = {name.lower(): value for name, value in message.get("headers", [])}
        self._headers = _without(message.get("headers", []), b"content-length", b"content-type")
        if self._status < 400 and headers.get(b"content-type", b"").lower().startswith(b"text/event-stream"):
            self._events = _EventStream(self._dialect, self.translation)
            await self._send_start(b"text/event-stream; charset=utf-8")

    async def _send_start(self, content_type: bytes, *more: tuple[bytes, bytes]) -> None:
        headers = [*self._headers, (b"content-type", content_type), *more]
        await self._send({"type": "http.response.start", "status": self._status, "headers": headers})

    async def _send_piece(self, body: bytes, more: bool) -> None:
        assert self._events is not None
        out = self._events.feed(body) + (b"" if more else self._events.finish())
        if out or not more:
            await self._send({"type": "http.response.body", "body": out, "more_body": more})

    async def _send_whole(self, body: bytes, more: bool) -> None:
        self._body.append(body)
        if not more:
            await self._send_json(self._translate(b"".join(self._body)))

    async def _send_json(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        await self._send_start(b"application/json", (b"content-length", str(len(body)).encode()))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _translate(self, body: bytes) -> dict[str, Any]:
        """Return the dialect's answer, or its error body for an error or an unreadable answer."""
        try:
            if self._status >= 400:
                raise self.translation.field_names.rename(read_error(self._status, body))
            return self.translation.write_answer(_decode_engine_json(body))
        except RequestError as error:
            self._status = error.status
            return self._dialect.error_body(error)


class _EventStream:
    """Translates the bytes of an engine's event stream to those of a dialect's."""

    def __init__(self, dialect: type[Dialect], translation: Translation) -> None:
        self._dialect = dialect
        self._field_names = translation.field_names
        self._stream = translation.start_stream()
        self._reader = SseReader()
        self._ended = False

    def feed(self, body: bytes) -> bytes:
        """Return the translation of a piece, which may be cut anywhere."""
        return b"".join(self._translate(event.data) for event in self._reader.feed(body))

    def finish(self) -> bytes:
        """Return the rest of the dialect's stream at the end of the engine's."""
        return self._translate(DONE)

    def _translate(self, data: str) -> bytes:
        if self._ended:
            return b""
        try:
            if data == DONE:
                self._ended = True
                events = self._stream.finish()
            else:
                chunk = _decode_engine_json(data)
                if error := find_error(chunk):
                    raise self._field_names.rename(error)
                events = self._stream.feed(chunk)
        except RequestError as error:
            self._ended = True
            events = self._stream.fail(error, self._dialect.error_body(error))
        return b"".join(sse_bytes(event, event.get("type")) for event in events)


def _decode_engine_json(body: bytes | str) -> dict[str, Any]:
    try:
        decoded = decode_json(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the engine's answer is not JSON: {error}", 502, "server_error") from None
    if not isinstance(decoded, dict):
        raise RequestError("the engine's answer is not a JSON object", 502, "server_error")
    return decoded
