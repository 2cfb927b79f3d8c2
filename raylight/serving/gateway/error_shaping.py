"""Reshaping of errors: the error of any layer is sent in the shape of the request's dialect."""

from __future__ import annotations

import json
import logging
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from raylight.http.errors import RequestError, read_error
from raylight.serving.dialects.dialect import Dialect
from raylight.serving.dialects.native import ChatDialect

logger = logging.getLogger(__name__)

MAX_ERROR = 2**20
"""Bytes read of an error's body; the rest is dropped."""
RESHAPED_HEADERS = (b"content-length", b"content-type", b"transfer-encoding", b"content-encoding")
"""Headers that describe the body, which reshaping replaces."""


class ErrorShapingSend:
    """An ASGI `send` that passes answers on as they arrive, and errors as a whole and in the dialect's shape.

    Status 422 becomes 400, as in OpenAI's API.

    Args:
        dialect: None passes errors on unchanged, for routes with a shape of their own.

    Attributes:
        started: True once anything has been sent, so that no other answer is possible.
    """

    def __init__(self, send: Send, dialect: type[Dialect] | None) -> None:
        self.started = False
        self._send = send
        self._dialect = dialect
        self._error_start: Message | None = None
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start" and message["status"] >= 400 and self._dialect is not None:
            self._error_start = message
        elif self._error_start is None:
            self.started = True
            await self._send(message)
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
        await self._send_json(error.status, dialect.error_body(error), headers or [])

    async def _send_reshaped(self, dialect: type[Dialect], start: Message) -> None:
        status = 400 if start["status"] == 422 else start["status"]
        content = bytes(self._body)
        headers = [pair for pair in start.get("headers", []) if pair[0].lower() not in RESHAPED_HEADERS]
        if status == 500:
            logger.error("an inner layer failed: %.500s", content.decode("utf-8", "replace"))
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            body = None
        if not _has_shape(body, dialect.error_body(RequestError(""))):
            body = dialect.error_body(read_error(status, content))
        await self._send_json(status, body, headers)

    async def _send_json(self, status: int, body: Any, headers: list[tuple[bytes, bytes]]) -> None:
        content = json.dumps(body).encode()
        described = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
        ]
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *described]})
        await self._send({"type": "http.response.body", "body": content})


def _has_shape(value: Any, example: Any) -> bool:
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
