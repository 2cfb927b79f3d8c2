"""Every error leaves in the shape of the dialect that was spoken, whoever made it and however it looked inside."""

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
"""Bytes of an error's body that are read; what comes after them is not sent on."""
RESHAPED = (b"content-length", b"content-type", b"transfer-encoding", b"content-encoding")


class ShapedSend:
    """Sends an answer on as it comes, but an error as a whole and in the dialect's shape; 422 becomes 400, as in OpenAI's API.

    Args:
        dialect: None leaves errors as they are, for routes with a shape of their own.
    """

    def __init__(self, send: Send, dialect: type[Dialect] | None) -> None:
        self._send = send
        self._dialect = dialect
        self._error: Message | None = None
        self._body = bytearray()
        self.started = False
        """Whether something has gone out, so that the answer can no longer be another one."""
        self.complete = False
        """Whether the answer has ended."""

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start" and message["status"] >= 400 and self._dialect is not None:
            self._error = message
        elif self._error is None:
            self.started = True
            await self._send(message)
            self.complete = kind == "http.response.body" and not message.get("more_body", False)
        elif kind == "http.response.body":
            self._body += message.get("body", b"")[: MAX_ERROR - len(self._body)]
            if not message.get("more_body", False):
                await self._send_held_error(self._dialect or ChatDialect, self._error)

    async def send_error(
        self, dialect: type[Dialect], error: RequestError, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        """Answer with an error of one's own, in place of one that was held back."""
        await self._answer(error.status, dialect.error_body(error), headers or [])

    async def _send_held_error(self, dialect: type[Dialect], start: Message) -> None:
        status = 400 if start["status"] == 422 else start["status"]
        body = bytes(self._body)
        kept = [pair for pair in start.get("headers", []) if pair[0].lower() not in RESHAPED]
        if status == 500:
            logger.error("an inner layer failed: %.500s", body.decode("utf-8", "replace"))
        try:
            told = json.loads(body)
        except (ValueError, RecursionError):
            told = None
        if not _has_shape(told, dialect.error_body(RequestError(""))):
            told = dialect.error_body(read_error(status, body))
        await self._answer(status, told, kept)

    async def _answer(self, status: int, told: Any, headers: list[tuple[bytes, bytes]]) -> None:
        body = json.dumps(told).encode()
        described = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *described]})
        await self._send({"type": "http.response.body", "body": body})
        self.complete = True


def _has_shape(value: Any, example: Any) -> bool:
    """Return True if a decoded value has all keys of an example, with values of the same types where the example has any."""
    if isinstance(example, dict):
        return isinstance(value, dict) and all(
            _has_shape(value.get(key), part) for key, part in example.items()
        )
    return example is None or isinstance(value, type(example))


async def refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Nothing here is a web socket; the handshake is answered with status 403."""
    await receive()
    await send({"type": "websocket.close", "code": 1008})
