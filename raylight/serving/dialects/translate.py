"""Middleware that translates agents' requests for the engine, and the engine's answers back.

Chat requests, translated or not, reach the inner layers in normal form.

While the engine is silent (its weights change, or the request waits for its turn), a stream shows signs of
life: clients and proxies end a connection that is silent for longer than their read timeout.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Self
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight._utils.aio import cancel_all, pause
from raylight.engines.capture_context import SCOPE
from raylight.engines.families import template_of
from raylight.http.errors import RequestError, find_error, read_error
from raylight.http.field_bounds import check_bounds
from raylight.http.request import JsonRequest, json_request
from raylight.http.sse import SseReader, is_event_stream, sse_bytes
from raylight.serving.dialects.answers import DONE, decode_json
from raylight.serving.dialects.chat_normalizer import (
    ChatNormalizer,
    check_large_schemas,
    check_response_format,
    effort_as_variable,
)
from raylight.serving.dialects.dialect import TOKENIZE, Dialect, Event, Translation
from raylight.serving.dialects.registry import ChatDialect, CompletionsDialect, dialect_of
from raylight.serving.dialects.request_images import IMAGES_KEY, ImageReader, Images
from raylight.serving.dialects.tool_images import ToolImages
from raylight.types import JsonObject, Tokenizer
from raylight.types.request_fields import log_dropped

KEEP_ALIVE_S = 15.0
"""Seconds of silence after which something is sent, as the standard on server-sent events recommends."""
COMMENT = b": keep-alive\n\n"
"""Comment of a stream, which clients skip."""
EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
LONGEST_END = max(map(len, EVENT_ENDS))


class KeepAliveSend:
    """An ASGI `send` that sends a comment or a dialect's event after each `interval_s` without a message.

    It does so only between the events of a stream, and within `async with`.

    Args:
        send: the client's.

    Attributes:
        write: returns what is sent; by default a comment.
    """

    def __init__(self, send: Send, interval_s: float) -> None:
        self.write: Callable[[], bytes] = lambda: COMMENT
        self._send = send
        self._interval_s = interval_s
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._sent_at = 0.0
        self._tail = EVENT_ENDS[0]
        """The last bytes that were sent. Pieces may be cut anywhere, also within the end of an event."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stop()

    async def __call__(self, message: Message) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_last:
            await self._stop()
        async with self._lock:
            await self._send(message)
            self._tail = (self._tail + message.get("body", b"")[-LONGEST_END:])[-LONGEST_END:]
        self._sent_at = asyncio.get_running_loop().time()
        if message["type"] == "http.response.start" and is_event_stream(message):
            self._task = asyncio.create_task(self._keep_alive(), name="keep a stream alive")

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await pause(max(0.0, self._sent_at + self._interval_s - loop.time()))
            async with self._lock:
                is_silent = loop.time() >= self._sent_at + self._interval_s
                if is_silent and self._tail.endswith(EVENT_ENDS):
                    await self._send({"type": "http.response.body", "body": self.write(), "more_body": True})
            if is_silent:
                self._sent_at = loop.time()

    async def _stop(self) -> None:
        if self._task is not None:
            await cancel_all([self._task])
            self._task = None


DIALECT_KEY = "raylight.dialect"
"""Key of the ASGI scope that holds the name of the dialect of a translated request."""
ANSWER_ID = b"x-raylight-answer-id"
"""Header of a stream that is started before its first event: the id of the answer, without a prefix."""

NATIVE_PATHS = (ChatDialect.path, CompletionsDialect.path, TOKENIZE, "/detokenize")
"""Routes that the engine serves itself, and whose requests are checked."""

Headers = list[tuple[bytes, bytes]]


class TranslationMiddleware:
    """Serves the routes of all dialects with an application that serves chat completions and `/tokenize`.

    Completions, and all other paths, pass through. Pieces of a stream are sent as they arrive; a client's
    disconnect reaches the application.

    Args:
        tokenizer: the model's tokenizer, with its chat template; None if the model runs elsewhere.
        count_dropped: called with the type of each tool that a request has and the model does not get.
        keep_alive_s: seconds of silence in a stream after which a sign of life is sent.
        images: reads the images of requests; None: by the default limits.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokenizer: Tokenizer | None = None,
        count_dropped: Callable[[str], None] = lambda kind: None,
        keep_alive_s: float = KEEP_ALIVE_S,
        images: ImageReader | None = None,
    ) -> None:
        self._app = app
        self._keep_alive_s = keep_alive_s
        self._count_dropped = count_dropped
        self._is_remote = tokenizer is None
        self._images = images or ImageReader(is_remote=self._is_remote)
        self._normalizer = ChatNormalizer(None if tokenizer is None else template_of(tokenizer), tokenizer)
        self._tool_images = ToolImages(tokenizer)
        self._dialects: dict[type[Dialect], Dialect] = {}

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        dialect = dialect_of(path)
        if dialect.native and not (path in NATIVE_PATHS and scope["method"] == "POST"):
            await self._app(scope, receive, send)
            return
        async with KeepAliveSend(send, self._keep_alive_s) as kept:
            if dialect.native:
                await self._serve_native(scope, receive, kept)
            else:
                await self._translate(dialect, path, scope, receive, kept)

    async def _translate(
        self, dialect: type[Dialect], path: str, scope: AsgiScope, receive: Receive, send: KeepAliveSend
    ) -> None:
        answer = _AnswerSender(dialect, send)
        send.write = answer.keep_alive
        try:
            _check_route(dialect, path, scope["method"])
            fields = (await json_request(scope, receive)).fields
            check_bounds(fields)
            answer.translation = translation = self._instance(dialect).translate(path, fields, SCOPE.get())
            chat, images = await self._normalize(translation)
        except RequestError as error:
            await answer.send_error(error)
            return
        for kind in translation.dropped_tools:
            self._count_dropped(kind)
            log_dropped(f"tools of type {kind}", "no model here can use")
        request = JsonRequest(chat, receive)
        inner = _inner_scope(scope, scope.get("root_path", "") + translation.engine_path)
        inner |= {DIALECT_KEY: dialect.name, IMAGES_KEY: images}
        await self._app(request.put_into(inner), request, answer)

    async def _serve_native(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        try:
            request = (await json_request(scope, receive)).with_receive(receive)
            fields = request.fields
            check_bounds(fields)
            await check_large_schemas(fields)
            fields, images = await self._images.take(fields)
            messages, sources = self._tool_images.place(fields.get("messages"))
            if sources is not None:
                fields = fields | {"messages": messages}
            if scope["path"].removeprefix(scope.get("root_path", "")) == ChatDialect.path:
                fields = self._normalizer.normalize(fields)
            else:
                check_response_format(fields.get("response_format"))
        except RequestError as error:
            await _AnswerSender(ChatDialect, send).send_error(error)
            return
        if fields is not request.fields:
            request = JsonRequest(fields, receive)
        await self._app(request.put_into({**scope, IMAGES_KEY: images}), request, send)

    async def _normalize(self, translation: Translation) -> tuple[JsonObject, Images]:
        """Return the engine's request in normal form, and its images.

        Raises:
            RequestError: 400, it has none; the error names the fields as the agent does.
        """
        names, request = translation.field_names, translation.engine_request
        if self._is_remote and "stream_options" in request:  # OpenAI rejects continuous_usage_stats
            request = request | {"stream_options": {"include_usage": True}}
        try:
            await check_large_schemas(request)
            request, images = await self._images.take(request)
            messages, sources = self._tool_images.place(request["messages"])
            if sources is not None:
                request = request | {"messages": messages}
                translation.field_names = names = names.behind(sources)
            chat = self._normalizer.normalize(request, names.of)
            return effort_as_variable(chat) if translation.engine_path == TOKENIZE else chat, images
        except RequestError as error:
            raise names.rename(error) from None

    def _instance(self, dialect: type[Dialect]) -> Dialect:
        if dialect not in self._dialects:
            self._dialects[dialect] = dialect()
        return self._dialects[dialect]


def _check_route(dialect: type[Dialect], path: str, method: str) -> None:
    if path != dialect.path and path not in dialect.other_paths:
        raise RequestError(f"the route {path} does not exist", 404)
    if method != "POST":
        raise RequestError(f"{path} takes POST, not {method:.20}", 405)


def _inner_scope(scope: AsgiScope, path: str) -> JsonObject:
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

    def keep_alive(self) -> bytes:
        """Return a sign of life for a silent stream."""
        return (self._events.keep_alive() if self._events else b"") or COMMENT

    async def send_error(self, error: RequestError) -> None:
        self._status = error.status
        await self._send_json(self._dialect.error_body(error))

    async def _start(self, message: Message) -> None:
        self._status = message["status"]
        self._headers = _without(message.get("headers", []), b"content-length", b"content-type", ANSWER_ID)
        if is_event_stream(message):
            answer_id = dict(message["headers"]).get(ANSWER_ID, b"").decode()
            self._events = _EventStream(self._dialect, self.translation, answer_id)
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

    async def _send_json(self, answer: JsonObject) -> None:
        body = json.dumps(answer).encode()
        await self._send_start(b"application/json", (b"content-length", str(len(body)).encode()))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _translate(self, body: bytes) -> JsonObject:
        """Return the dialect's answer, or its error body for an error or an unreadable answer."""
        try:
            if self._status >= 400:
                raise self.translation.field_names.rename(read_error(self._status, body))
            return self.translation.write_answer(_decode_engine_json(body))
        except RequestError as error:
            self._status = error.status
            return self._dialect.error_body(error)


class _EventStream:
    """Translates the bytes of an engine's event stream to a dialect's."""

    def __init__(self, dialect: type[Dialect], translation: Translation, answer_id: str) -> None:
        self._dialect = dialect
        self._field_names = translation.field_names
        self._stream = translation.start_stream()
        self._stream.answer_id = answer_id
        self._reader = SseReader()
        self._ended = False

    def feed(self, body: bytes) -> bytes:
        """Return the translation of a piece, which may be cut anywhere."""
        return b"".join(self._translate(event.data) for event in self._reader.feed(body))

    def keep_alive(self) -> bytes:
        """Return the dialect's sign of life, if it has one."""
        return b"" if self._ended else _encode(self._stream.keep_alive())

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
                if self._stream.answer_id:
                    chunk["id"] = self._stream.answer_id
                events = self._stream.feed(chunk)
        except RequestError as error:
            self._ended = True
            events = self._stream.fail(error, self._dialect.error_body(error))
        return _encode(events)


def _encode(events: list[Event]) -> bytes:
    return b"".join(sse_bytes(event, event.get("type")) for event in events)


def _decode_engine_json(body: bytes | str) -> JsonObject:
    try:
        decoded = decode_json(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the engine's answer is not JSON: {error}", 502) from None
    if not isinstance(decoded, dict):
        raise RequestError("the engine's answer is not a JSON object", 502)
    return decoded
