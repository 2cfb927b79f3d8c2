"""The JSON request that all layers of a replica share.

Laws: no layer receives a body that is not sound JSON within the limits. No layer reads or decodes a body that
another one has read or decoded. Layers share the decoded fields, so that none may change them.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive
from starlette.types import Scope as AsgiScope

from raylight._utils.bounds import MAX_BODY
from raylight._utils.no_proxy import LOOPBACK
from raylight.http.errors import RequestError
from raylight.types import JsonObject

MAX_VALUES = 200_000
"""Most values in a body, those in lists and objects included; decoding more would delay all requests."""
MAX_DEPTH = 200
"""Deepest nesting of lists and objects in a body."""
NUMBERS = range(-(2**63), 2**64)
"""Whole numbers allowed in a body: 64 bits, because engines pass them to code that has no others."""
QUOTED = frozenset({"input", "parsed", "parsed_arguments"})
"""Fields in `messages` and `input` with values that were read from an answer. No engine computes with their
whole numbers, which may have any size, so that an agent can send back what it was given."""
BODY_GRACE_S, BODY_RATE, BODY_TIMEOUT_S = 10.0, 16 * 1024, 120.0
"""Seconds in which a body must arrive, bytes for whose arrival it gets one second more, and most seconds."""
MAX_ARRIVING = 8192
"""Bodies that may arrive at a time in a process. They are not running requests yet."""
_arriving = 0
REQUEST = "raylight.request"
"""Key of the ASGI scope that holds the `JsonRequest`."""

_VALUE_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"|([,\[{])', re.DOTALL)
"""A string, or in its group a character that is followed by one more value."""


class JsonRequest:
    """A request's JSON body, decoded once, and an ASGI `receive` that replays it.

    A layer takes the decoded fields with `json_request`. An application that reads bodies by itself, such as
    vLLM's, calls this object as its `receive`: it gets the whole body as one message, and after it the
    messages of the client.

    Args:
        fields: the decoded object. Layers share it: none may change it.
        receive: the source of the messages after the body.
        content: the body as sent; None encodes `fields` at first use.

    Attributes:
        disconnected: True once a disconnect of the client has been received.
    """

    def __init__(self, fields: JsonObject, receive: Receive, content: bytes | None = None) -> None:
        self.fields = fields
        self.disconnected = False
        self._receive = receive
        self._content = content
        self._body_received = False

    @property
    def content(self) -> bytes:
        """The body in bytes."""
        if self._content is None:
            self._content = msgspec.json.encode(self.fields)
        return self._content

    async def __call__(self) -> Message:
        """Receive the body, and afterwards the next message of the client."""
        if not self._body_received:
            self._body_received = True
            return {"type": "http.request", "body": self.content, "more_body": False}
        message = await self._receive()
        self.disconnected = self.disconnected or message["type"] == "http.disconnect"
        return message

    def with_receive(self, receive: Receive) -> JsonRequest:
        """Return the same request with another source of the messages after the body."""
        return JsonRequest(self.fields, receive, self._content)

    def skip_body(self) -> None:
        """Receive only what follows the body from now on."""
        self._body_received = True

    def put_into(self, scope: AsgiScope) -> AsgiScope:
        """Return a scope for the next layer, with this request in it.

        A body that a layer made has no content length yet; the client's is removed.
        """
        if self._content is not None:
            return {**scope, REQUEST: self}
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        return {**scope, "headers": headers, REQUEST: self}


async def json_request(scope: AsgiScope, receive: Receive) -> JsonRequest:
    """Return the request that an outer layer put into the scope; without one, read and decode it.

    Its `receive` continues after the body in both cases.

    Raises:
        RequestError: 400, the body is not sound JSON (see `decode_fields`); 413, it is too large.
        ClientDisconnect: the client disconnected before the end of the body.
    """
    request = scope.get(REQUEST)
    if request is None:
        content = await read_body(receive, MAX_BODY)
        request = JsonRequest(decode_fields(content), receive, content)
    request.skip_body()
    return request


async def read_request(scope: AsgiScope, receive: Receive, max_bytes: int = MAX_BODY) -> JsonRequest:
    """Check the headers of a request, and read and decode its body.

    Raises:
        RequestError: 413, the body is too large; 415, it is compressed or its type is not application/json;
            400, it is not sound JSON (see `decode_fields`).
        ClientDisconnect: the client disconnected before the end of the body.
    """
    headers = dict(scope["headers"])
    content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    # Browsers send this type to another site only if that site agrees.
    if content_type != b"application/json":
        raise RequestError(
            f"the content type must be application/json, not {content_type.decode('latin-1')[:80]!r}", 415
        )
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise RequestError(
            "compressed bodies are not supported; send the body without a content encoding", 415
        )
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    content = await read_body(receive, max_bytes)
    return JsonRequest(decode_fields(content), receive, content)


def decode_fields(content: bytes) -> JsonObject:
    """Decode a body: a JSON object of Unicode strings and of finite numbers, whole ones of at most 64
    bits except in `QUOTED`.

    Raises:
        RequestError: 400, it is something else, nested more than `MAX_DEPTH` deep, or has more than
            `MAX_VALUES` values.
    """
    if _has_too_many_values(content):
        raise RequestError(f"too many values in the body: at most {MAX_VALUES} are allowed")
    if not content:
        raise RequestError("the body is empty; send a JSON object")
    try:
        fields = msgspec.json.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _name_wrong_number(content)
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    _check_values(fields)
    return fields


async def until_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """Return a body.

    Raises:
        RequestError: 408, it arrives too slowly; 413, it is too large; 503, too many others arrive.
        ClientDisconnect: the client disconnected before its end.
    """
    global _arriving
    if _arriving >= MAX_ARRIVING:
        raise RequestError(f"{_arriving} other bodies are arriving; send the request again later", 503)
    _arriving += 1
    body, started_at = bytearray(), asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(started_at + BODY_GRACE_S) as deadline:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return bytes(body)
                allowed = min(BODY_GRACE_S + len(body) / BODY_RATE, BODY_TIMEOUT_S)
                deadline.reschedule(started_at + allowed)
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {BODY_GRACE_S:g} s and 1 s more for each {BODY_RATE} bytes; "
            "send the request again",
            408,
        ) from None
    finally:
        _arriving -= 1


def _has_too_many_values(content: bytes) -> bool:
    """Count values by the characters before them, because decoding is what takes long."""
    if (
        len(content) <= MAX_VALUES
        or content.count(b",") + content.count(b"[") + content.count(b"{") <= MAX_VALUES
    ):
        return False
    values = 0
    for mark in _VALUE_MARK.finditer(content):
        values += mark[1] is not None
        if values > MAX_VALUES:
            return True
    return False


def _check_values(fields: JsonObject) -> None:
    """Raise a RequestError at a number beyond 64 bits, or at too deep a nesting."""
    level: list[Any] = [fields]
    is_wrong = False
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is dict:
                below.extend(value.values())
            elif kind is list:
                below.extend(value)
            else:
                is_wrong = is_wrong or _is_wrong_number(value)
        if not below:
            break
        level = below
    else:
        raise RequestError(f"the body is nested too deeply: at most {MAX_DEPTH} levels are allowed")
    for name, value in fields.items() if is_wrong else ():
        _check_numbers(name, value, QUOTED if name in ("messages", "input") else frozenset())


def _is_wrong_number(value: Any) -> bool:
    kind = type(value)
    return (kind is int and value not in NUMBERS) or (kind is float and not math.isfinite(value))


def _name_wrong_number(content: bytes) -> None:
    """Raise an error that names the field, if a body is not JSON only for NaN, or for an infinite number."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return
    if isinstance(fields, dict):
        _check_values(fields)


def _check_numbers(name: str, value: object, quoted: frozenset[str]) -> None:
    """Raise a RequestError at a number that is not finite or beyond 64 bits; it names the field.

    Args:
        quoted: names of the fields whose numbers are not checked.
    """
    level: list[tuple[Any, str, object]] = [(None, name[:100], value)]  # each with the entry that it is in
    while level:
        below: list[tuple[Any, str, object]] = []
        for entry in level:
            value = entry[2]
            if _is_wrong_number(value):
                path = _path(entry)
                raise RequestError(
                    f"{path}: it must be a finite number of at most 64 bits, not {value!s:.30}", param=path
                )
            if isinstance(value, dict):
                below += [(entry, f".{k[:100]}", v) for k, v in value.items() if k not in quoted]
            elif isinstance(value, list):
                below += [(entry, f"[{index}]", inner) for index, inner in enumerate(value)]
        level = below


def _path(entry: tuple[Any, str, object]) -> str:
    outer, step, _ = entry
    return (_path(outer) if outer else "") + step


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"the body is larger than {max_bytes} bytes; send less, or raise engine.max_body_bytes",
        413,
    )


OTHER_HOST = (
    "a server without a key answers requests to localhost only, and this one names another host; call it by "
    "127.0.0.1 or localhost, or start it with an API key"
)


def is_own_host(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return True if a request is addressed to this machine by a name of loopback."""
    hosts = [_name(value.decode("latin-1")) for field, value in headers if field == b"host"]
    return bool(hosts) and all(host in LOOPBACK for host in hosts)


def _name(host: str) -> str:
    """Return the name in a `Host` header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
