"""uvicorn's protocol of HTTP with a time limit for headers, and a limit of connections that wait for them.

uvicorn itself waits for headers as long as a client likes, and each connection takes an open file.
"""

from __future__ import annotations

import asyncio
import resource
from typing import ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_TIMEOUT_S = 10.0
"""Longest time that a client may take to send the headers of a request."""
MAX_WAITING = 65_536


def max_waiting() -> int:
    """Return the most connections without a request, half of the open files; the oldest ends for another."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_WAITING if limit == resource.RLIM_INFINITY else min(limit // 2, MAX_WAITING)


class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Protocol of a connection that is closed if it sends no whole headers in time, or as one of too many."""

    waiting: ClassVar[dict[ImpatientProtocol, asyncio.TimerHandle]] = {}
    """Connections that wait for the headers of a request, the oldest first, with the ends of their times."""

    def connection_made(self, transport: object) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self not in self.waiting:  # a part of the next request
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        while len(self.waiting) >= max_waiting():
            next(iter(self.waiting))._close()
        self.waiting[self] = self.loop.call_later(HEADER_TIMEOUT_S, self._close)

    def _stop_waiting(self) -> None:
        if (timer := self.waiting.pop(self, None)) is not None:
            timer.cancel()

    def _close(self) -> None:
        self._stop_waiting()
        self.transport.close()
