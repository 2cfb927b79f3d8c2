"""Signs of life in a stream whose engine is silent: its weights change, or the request waits for its turn.

Clients and proxies end a connection that is silent for longer than their read timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from starlette.types import Message, Send

from raylight._utils.aio import cancel_all, pause
from raylight.http.sse import is_event_stream

KEEP_ALIVE_S = 15.0
"""Seconds of silence after which something is sent, as the standard on server-sent events recommends."""
COMMENT = b": keep-alive\n\n"
"""Comment of a stream, which clients skip."""
EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
LONGEST_END = max(map(len, EVENT_ENDS))


class KeepAliveSend:
    """An ASGI `send` that sends a comment or an event of its own after each `interval_s` without a message.

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
