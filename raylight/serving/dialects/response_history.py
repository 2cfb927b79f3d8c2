"""Conversations that a request may continue by the id of an earlier response (`previous_response_id`)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from cachetools import LRUCache

from raylight.engines.capture_context import AttemptScope
from raylight.http.errors import RequestError

CAPACITY = 100_000_000
"""Size of all messages kept, in characters."""
OVERHEAD = 100
"""Size of a message besides its text, in characters."""


class ResponseHistory:
    """Conversations up to each response. The least recently used one is dropped first.

    Args:
        capacity: characters to keep. A conversation counts once for each of its responses.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._conversations: LRUCache[tuple[AttemptScope | None, str], list[dict[str, Any]]] = LRUCache(
            capacity, getsizeof=_size
        )

    def remember(self, scope: AttemptScope | None, response_id: str, messages: list[dict[str, Any]]) -> None:
        """Keep the chat messages up to a response, without instructions, which hold for one request only."""
        with suppress(ValueError):  # one conversation is larger than the cache
            self._conversations[scope, response_id] = messages

    def find(self, scope: AttemptScope | None, response_id: str) -> list[dict[str, Any]]:
        """Return the messages up to a response.

        Raises:
            RequestError: 404, another replica or attempt made the response, or it has been dropped.
        """
        try:
            return self._conversations[scope, response_id]
        except KeyError:
            raise RequestError(
                f"previous_response_id: there is no response {response_id!r} here. A replica remembers its "
                "own recent responses of the same attempt, unless they were made with store=false. Send the "
                "whole conversation as input.",
                404,
                "not_found_error",
            ) from None


def _size(value: Any) -> int:
    """Count the characters of messages."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values())) + OVERHEAD
    return sum(map(_size, value)) if isinstance(value, list) else 0
