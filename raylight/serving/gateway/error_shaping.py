"""Reshaping of errors: the error of any layer is sent in the shape of the request's dialect."""

from __future__ import annotations

import functools
import json
import logging
import uuid
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from raylight.http.errors import RequestError, find_error, read_error
from raylight.http.sse import is_event_stream, sse_bytes
from raylight.serving.dialects.dialect import Dialect
from raylight.serving.dialects.registry import ChatDialect

logger = logging.getLogger(__name__)

MAX_ERROR = 2**20
"""Bytes read of an error's body; the rest is dropped."""
RESHAPED_HEADERS = (b"content-length", b"content-type", b"transfer-encoding", b"content-encoding")
"""Headers that describe the body, which reshaping replaces."""


RETRY_AFTER_S = 1
"""Seconds after which a client should repeat a request that was rejected for now."""
REJECTED_FOR_NOW = (429, 503, 529)
NOT_IMPLEMENTED = 501
REQUEST_IDS = (b"x-request-id", b"request-id")
"""Headers with the id of a request, as OpenAI and Anthropic name them."""
STREAMED_ERROR = b'data: {"error"'


class ErrorShapingSend:
    """An ASGI `send` that passes answers on as they arrive, and errors as a whole and in the dialect's shape.

    Status 422 becomes 400, as in OpenAI's API. An error has an id of its request. One that passes has a
    `retry-after`; one that no retry changes, despite its status, has `x-should-retry: false`.

    Args:
        dialect: None passes errors on unchanged, for routes whose errors have another shape.

    Attributes:
        started: True once anything has been sent, so that no other answer is possible.
    """

    def __init__(self, send: Send, dialect: type[Dialect] | None) -> None:
        self.started = False
        self._send = send
        self._dialect = dialect
        self._streams = False
        self._error_start: Message | None = None
        self._body = bytearray()

    @functools.cached_property
    def request_id(self) -> str:
        """Id of the request in errors."""
        return f"req_{uuid.uuid4().hex[:24]}"

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start" and message["status"] >= 400 and self._dialect is not None:
            self._error_start = message
        elif self._error_start is None:
            self.started = True
            await self._send(self._with_shaped_event(message))
        elif kind == "http.response.body":
            self._body += message.get("body", b"")[: MAX_ERROR - len(self._body)]
            if not message.get("more_body", False):
                await self._send_reshaped(self._dialect or ChatDialect, self._error_start)

    async def send_error(
        self,
        dialect: type[Dialect],
        error: RequestError,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        """Answer with an error, in place of an inner layer's error of which only a part has arrived."""
        await self._send_json(dialect, error.status, dialect.error_body(error), headers or [])

    def _with_shaped_event(self, message: Message) -> Message:
        """Return a message of an answer; an event that is an engine's error gets the shape of OpenAI."""
        if message["type"] == "http.response.start":
            self._streams = is_event_stream(message)
            return message
        body = message.get("body", b"")
        if not (self._streams and body.startswith(STREAMED_ERROR) and self._dialect and self._dialect.native):
            return message
        event, _, rest = body.partition(b"\n\n")
        try:
            error = find_error(json.loads(event.removeprefix(b"data: ")))
        except (ValueError, RecursionError):
            return message  # the event continues in the next message
        assert error is not None, "the event is an object with a key named error"
        return {**message, "body": sse_bytes(self._dialect.error_body(error)) + rest}

    async def _send_reshaped(self, dialect: type[Dialect], start: Message) -> None:
        status = 400 if start["status"] == 422 else start["status"]
        content = bytes(self._body)
        headers = [pair for pair in start.get("headers", []) if pair[0].lower() not in RESHAPED_HEADERS]
        if status == 500:
            logger.error(
                "an inner layer failed (request %s): %.500s",
                self.request_id,
                content.decode("utf-8", "replace"),
            )
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            body = None
        # engines' errors have OpenAI's shape, but their types and codes differ
        if dialect.native or not _has_shape(body, dialect.error_body(RequestError(""))):
            body = dialect.error_body(read_error(status, content))
        await self._send_json(dialect, status, body, headers)

    async def _send_json(
        self, dialect: type[Dialect], status: int, body: Any, headers: list[tuple[bytes, bytes]]
    ) -> None:
        given = {name.lower(): value for name, value in headers}
        request_id = next((given[name] for name in REQUEST_IDS if name in given), self.request_id.encode())
        if "request_id" in body:
            body = body | {"request_id": request_id.decode("latin-1")}
        content = json.dumps(body).encode()
        described = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            *((name, request_id) for name in REQUEST_IDS if name not in given),
        ]
        if status in REJECTED_FOR_NOW and b"retry-after" not in given:
            described.append((b"retry-after", str(RETRY_AFTER_S).encode()))
        if status == NOT_IMPLEMENTED:
            described.append((b"x-should-retry", b"false"))
        self.started = True
        status = dialect.error_statuses.get(status, status)
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *described]})
        await self._send({"type": "http.response.body", "body": content})


def _has_shape(value: object, example: object) -> bool:
    """Return True if a decoded value has the keys of an example, with values of its types.

    None in the example stands for any value.
    """
    if isinstance(example, dict):
        return isinstance(value, dict) and all(
            _has_shape(value.get(key), part) for key, part in example.items()
        )
    return example is None or isinstance(value, type(example))


async def reject_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the handshake of a web socket with status 403."""
    await receive()
    await send({"type": "websocket.close", "code": 1008})
