"""Conversations that a later request may continue by the id of a response (`previous_response_id`)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from raylight.engines.capture_context import AttemptScope
from raylight.http.errors import RequestError

CAPACITY = 100_000_000
"""Characters of messages."""


class EarlierResponses:
    """What led to each response, its own words included. The least recently used are forgotten first.

    Args:
        capacity: characters to keep; a conversation counts anew with each of its responses.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[tuple[AttemptScope | None, str], tuple[list[dict[str, Any]], int]] = (
            OrderedDict()
        )
        self._size = 0

    def remember(self, scope: AttemptScope | None, response_id: str, messages: list[dict[str, Any]]) -> None:
        """Keep the chat messages up to a response, without instructions, which hold for one request only."""
        size = sum(_size(message) for message in messages)
        self._size += size - self._kept.get((scope, response_id), ([], 0))[1]
        self._kept[scope, response_id] = messages, size
        while self._size > self._capacity:
            _, (_, freed) = self._kept.popitem(last=False)
            self._size -= freed

    def find(self, scope: AttemptScope | None, response_id: str) -> list[dict[str, Any]]:
        """The messages up to a response.

        Raises:
            RequestError: 404, it was made elsewhere, or is forgotten.
        """
        found = self._kept.get((scope, response_id))
        if found is None:
            raise RequestError(
                f"previous_response_id: there is no response {response_id!r} here; a replica remembers its own recent ones "
                "of the same attempt, unless they were made with store=false: send the whole conversation as input",
                404,
                "not_found_error",
            )
        self._kept.move_to_end((scope, response_id))
        return found[0]


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values())) + 100
    return sum(map(_size, value)) if isinstance(value, list) else 0
