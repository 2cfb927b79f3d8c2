"""Server-sent events, read and written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class ServerSentEvent:
    """One event."""

    event: str | None
    data: str
    """Several lines of data are joined by newlines."""


class SseReader:
    """Reads events from bytes that may be cut anywhere, as the standard says: comments, ids and retries are skipped, and an event
    that no blank line ends is none."""

    def __init__(self) -> None:
        self._rest = b""
        self._at_start = True
        self._after_return = False
        self._name: str | None = None
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """The events that are complete with this piece."""
        self._rest += data
        if self._at_start:
            if len(self._rest) < 3 and BYTE_ORDER_MARK.startswith(self._rest):
                return []  # it may become a byte order mark
            self._rest = self._rest.removeprefix(BYTE_ORDER_MARK)
            self._at_start = False
        lines = self._lines()
        return [event for line in lines if (event := self._take(line.decode("utf-8", "replace"))) is not None]

    def _lines(self) -> list[bytes]:
        """The complete lines, without their ends. A carriage return ends one at once, and a newline right after it none."""
        if self._after_return and self._rest:
            self._rest = self._rest.removeprefix(b"\n")
            self._after_return = False
        if b"\r" in self._rest:
            self._after_return = self._rest.endswith(b"\r")
            self._rest = self._rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = self._rest.split(b"\n")
        return lines

    def _take(self, line: str) -> ServerSentEvent | None:
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
    """An event as it goes over the wire."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    name = f"event: {event}\n" if event is not None else ""
    lines = "".join(f"data: {line}\n" for line in text.split("\n"))
    return f"{name}{lines}\n".encode()
