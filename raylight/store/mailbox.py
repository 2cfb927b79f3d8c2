"""Requests to the driver of a run, which is no actor that others could call, and its replies.

Nothing is stored: Ray repeats the calls without a response when the store's actor restarts, and with them a
request gets here again.
"""

from __future__ import annotations

import collections
from typing import Any

from raylight._utils.aio import BroadcastCondition

REMEMBERED_REPLIES = 64
"""Replies that are kept for a repetition of their request."""

Request = tuple[str, dict[str, Any]]
"""Name of a run, and the content of a request to its driver."""


class Mailbox:
    """Requests and replies, by key; `StoreClient` documents the methods."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._replies: collections.OrderedDict[str, dict[str, Any]] = collections.OrderedDict()
        self._mail_changed = BroadcastCondition()
        self._mail_closed = False

    async def ask_driver(
        self, run: str, key: str, request: dict[str, Any], timeout: float
    ) -> dict[str, Any] | None:
        """Wait for the reply to a request; None after `timeout` seconds, with which the request ends."""
        if key not in self._replies:
            self._requests[key] = run, request
            self._mail_changed.notify_all()
        try:
            await self._mail_changed.wait_for(lambda: self._mail_closed or key in self._replies, timeout)
        finally:
            self._requests.pop(key, None)
        return self._replies.get(key)

    async def next_driver_request(
        self, run: str, known: list[str], timeout: float
    ) -> tuple[str, dict[str, Any]] | None:
        """Wait for a request to the driver of a run that is not among the known ones."""

        def unknown() -> list[str]:
            return [key for key, (asked, _) in self._requests.items() if asked == run and key not in known]

        await self._mail_changed.wait_for(lambda: self._mail_closed or bool(unknown()), timeout)
        return next(((key, self._requests[key][1]) for key in unknown()), None)

    def close_mail(self) -> None:
        """End all waits, without a result."""
        self._mail_closed = True
        self._mail_changed.notify_all()

    async def reply_to_request(self, key: str, reply: dict[str, Any]) -> None:
        """Reply to a request. A request that is repeated later gets the reply at once."""
        self._requests.pop(key, None)
        self._replies[key] = reply
        while len(self._replies) > REMEMBERED_REPLIES:
            self._replies.popitem(last=False)
        self._mail_changed.notify_all()
