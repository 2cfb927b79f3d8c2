"""The body of a request: read within a limit, and known to be sound JSON before any inner layer sees it."""

from __future__ import annotations

import math
import re
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive
from starlette.types import Scope as AsgiScope

from raylight.http.errors import RequestError

MAX_BODY = 16 * 2**20
"""Bytes of a request's body."""
MAX_VALUES = 200_000
"""Values in a body, those within lists and objects too. Reading more would hold up all other requests."""
NUMBERS = range(-(2**63), 2**64)
"""Whole numbers that a body may hold: those of 64 bits. Engines pass them on to code that has no others."""


_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"|([,\[{])', re.DOTALL)
"""A text, or in the group what a further value follows."""


async def read_body(scope: AsgiScope, receive: Receive, max_bytes: int = MAX_BODY) -> bytes:
    """The whole body.

    Raises:
        RequestError: it is too large (413), encoded, or not of the type application/json (415).
        ClientDisconnect: the client went away before its end.
    """
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":  # a web page cannot send this type to another site unasked
        raise RequestError(
            f"the content type must be application/json, not {kind.decode('latin-1')[:80]!r}", 415
        )
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise RequestError("a body with a content encoding is not understood; send it as it is", 415)
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def check_json(body: bytes) -> None:
    """Make sure that a body is a JSON object in which every text is Unicode and every number is finite and of 64 bits.

    Raises:
        RequestError: it is not, it is nested more than 200 deep, or it has too many values.
    """
    if _has_many_values(body):
        raise RequestError(f"too many values in the body: it may have at most {MAX_VALUES}")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        kind = type(item)
        if kind is dict:
            pending.extend(item.values())
        elif kind is list:
            pending.extend(item)
        elif (kind is int and item not in NUMBERS) or (kind is float and not math.isfinite(item)):
            raise RequestError(f"the number {item!s:.30} in the body is too large")


class ReadBody:
    """A `receive` that gives a body that was read already, and then what else comes.

    Attributes:
        gone: whether the client went away meanwhile.
    """

    def __init__(self, body: bytes | None, receive: Receive) -> None:
        self._body = body
        self._receive = receive
        self.gone = False

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self._receive()
        self.gone = self.gone or message["type"] == "http.disconnect"
        return message


def _has_many_values(body: bytes) -> bool:
    """Whether more than `MAX_VALUES` marks stand outside of texts; told before parsing, which is what takes long."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") <= MAX_VALUES:
        return False
    values = 0
    for mark in _MARK.finditer(body):
        values += mark[1] is not None
        if values > MAX_VALUES:
            return True
    return False


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"the body is larger than {max_bytes} bytes", 413, "request_too_large")
