"""Server-sent events, read and written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class ServerSentEvent:
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
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """Return the events that are complete with this piece."""
        self._buffer += data
        if self._at_start:
            if len(self._buffer) < 3 and BYTE_ORDER_MARK.startswith(self._buffer):
                return []  # it may become a byte order mark
            self._buffer = self._buffer.removeprefix(BYTE_ORDER_MARK)
            self._at_start = False
        lines = self._lines()
        return [
            event for line in lines if (event := self._read_line(line.decode("utf-8", "replace"))) is not None
        ]

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

    def _read_line(self, line: str) -> ServerSentEvent | None:
        if not line:
            name, data = self._name, self._data
            self._name, self._data = None, []
            return ServerSentEvent(name, "\n".join(data)) if data else None
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value or None
        return None


def sse_bytes(data: str | dict[str, Any], event: str | None = None) -> bytes:
    """Encode an event for sending."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    name = f"event: {event}\n" if event is not None else ""
    lines = "".join(f"data: {line}\n" for line in text.split("\n"))
    return f"{name}{lines}\n".encode()
