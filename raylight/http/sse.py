"""Server-sent events, read and written."""

from __future__ import annotations

from typing import NamedTuple

from starlette.types import Message

from raylight.store.payloads import json_text
from raylight.types import JsonObject

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ServerSentEvent(NamedTuple):
    """One event of a stream."""

    event: str | None
    data: str
    """The lines of data, joined by newlines."""


class SseReader:
    """Reads events from bytes that may be cut anywhere, by the WHATWG standard on server-sent events.

    Comments, ids and retries are skipped. An event without a blank line at its end is dropped.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._at_start = True
        self._ends_with_return = False
        self._name: str | None = None
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """Return the events that are complete with this piece."""
        self._buffer += data
        if self._at_start:
            if len(self._buffer) < 3 and BYTE_ORDER_MARK.startswith(self._buffer):
                return []  # it may become a byte order mark
            self._buffer = self._buffer.removeprefix(BYTE_ORDER_MARK)
            self._at_start = False
        events: list[ServerSentEvent] = []
        for line in self._lines():
            if line:
                self._read_field(line)
                continue
            if self._data:
                events.append(ServerSentEvent(self._name, b"\n".join(self._data).decode("utf-8", "replace")))
                self._data = []
            self._name = None
        return events

    def _lines(self) -> list[bytes]:
        """Return the complete lines without their ends: a newline, a carriage return, or both."""
        if self._ends_with_return and self._buffer:
            self._buffer = self._buffer.removeprefix(b"\n")
            self._ends_with_return = False
        if b"\r" in self._buffer:
            self._ends_with_return = self._buffer.endswith(b"\r")
            self._buffer = self._buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._buffer = self._buffer.split(b"\n")
        return lines

    def _read_field(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace") or None


def is_event_stream(start: Message) -> bool:
    """Return True if the start of an answer, an ASGI message, begins a stream of events."""
    return start["status"] < 400 and any(
        name.lower() == b"content-type" and value.strip().lower().startswith(b"text/event-stream")
        for name, value in start.get("headers", ())
    )


def sse_bytes(data: str | JsonObject, event: str | None = None) -> bytes:
    """Encode an event for sending."""
    text = data if isinstance(data, str) else json_text(data)
    name = f"event: {event}\n" if event is not None else ""
    lines = "".join(f"data: {line}\n" for line in text.split("\n"))
    return f"{name}{lines}\n".encode()
