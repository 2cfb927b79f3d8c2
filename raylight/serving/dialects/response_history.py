"""Earlier responses that a request may name by id: as `previous_response_id`, or item by item."""

from __future__ import annotations

from contextlib import suppress
from sys import getsizeof
from typing import Any

from cachetools import LRUCache

from raylight.engines.capture_context import AttemptScope
from raylight.http.errors import RequestError

CAPACITY = 128 * 2**20
"""Memory of all conversations kept, and of all items, in bytes."""
OVERHEAD = 300
"""Memory of an object besides its values, in bytes."""


class ResponseHistory:
    """Conversations up to each response, and the items of each response.

    The least recently used ones are dropped first.

    Args:
        capacity: bytes to keep of conversations, and of items. A conversation counts once for each of its
            responses, although these share its messages.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._conversations: LRUCache[tuple[AttemptScope | None, str], list[dict[str, Any]]] = LRUCache(
            capacity, getsizeof=_size
        )
        self._items: LRUCache[tuple[AttemptScope | None, str], dict[str, Any]] = LRUCache(
            capacity, getsizeof=_size
        )

    def remember(self, scope: AttemptScope | None, response_id: str, messages: list[dict[str, Any]]) -> None:
        """Keep the chat messages up to a response, without instructions, which hold for one request only."""
        with suppress(ValueError):  # one conversation is larger than the cache
            self._conversations[scope, response_id] = messages

    def remember_items(self, scope: AttemptScope | None, items: list[dict[str, Any]]) -> None:
        """Keep the output items of a response."""
        for item in items:
            with suppress(ValueError):  # one item is larger than the cache
                self._items[scope, item["id"]] = item

    def find(self, scope: AttemptScope | None, response_id: str) -> list[dict[str, Any]]:
        """Return the messages up to a response.

        Raises:
            RequestError: 400, another replica or attempt made the response, or it has been dropped.
        """
        try:
            return self._conversations[scope, response_id]
        except KeyError:
            error = _missing("previous_response_id", f"response {response_id!r:.200}")
            raise RequestError(error, code="previous_response_not_found") from None

    def resolve_references(self, scope: AttemptScope | None, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request in whose input earlier items stand for the references to them.

        Raises:
            RequestError: 404, an item is missing, for the reasons of `find`.
        """
        given = body.get("input")
        if not isinstance(given, list) or not any(map(_is_reference, given)):
            return body
        items = list(given)
        for index, item in enumerate(given):
            if _is_reference(item):
                try:
                    items[index] = self._items[scope, item["id"]]
                except KeyError:
                    error = _missing(f"input[{index}]", f"item {item['id']!r:.200}")
                    raise RequestError(error, 404, "not_found_error", param=f"input[{index}]") from None
        return body | {"input": items}


def _is_reference(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and isinstance(item.get("id"), str)
        and (item.get("type") == "item_reference" or item.keys() == {"id"})
    )


def _missing(field: str, what: str) -> str:
    return (
        f"{field}: there is no {what} here. A replica remembers its own recent responses of the same "
        "attempt, unless they were made with store=false. Send the whole conversation as input."
    )


def _size(value: Any) -> int:
    """Return the memory of messages, in bytes."""
    if isinstance(value, dict):
        return sum(map(_size, value.values())) + OVERHEAD
    if isinstance(value, list):
        return sum(map(_size, value)) + OVERHEAD
    return getsizeof(value)
