"""Table of the last message of each client with its results: a repeated message gets the same results.

A client is a `CallBatcher`: one event loop of one process. It sends its next message after the results of the
last one, so that one row per client is enough. The rows of clients that sent nothing for long are dropped.
"""

from __future__ import annotations

import itertools
from typing import Any

import raylight.errors
from raylight.errors import StoreError
from raylight.store.payloads import decode_payload, encode_payload
from raylight.store.tables.journal import Journal

CallResult = tuple[bool, Any]
"""`(True, result)` of a call that succeeded, `(False, error)` of one that failed."""
MAX_CLIENTS = 10_000
"""Clients whose last message is kept. Ray repeats a message at once after a restart of the store, long before
as many other clients have sent one."""
PRUNE_EVERY = 1_000
"""Messages between two removals of old rows."""


class AnsweredMessages:
    """Last message of each client in the journal.

    Args:
        max_clients: see `MAX_CLIENTS`.
    """

    def __init__(self, journal: Journal, max_clients: int = MAX_CLIENTS) -> None:
        self._journal = journal
        self._max_clients = max_clients
        last = journal.fetch_one("SELECT MAX(used) FROM clients")
        self._numbers: dict[str, int] = {}
        """Number of the last message of the clients that sent one to this object; it may be too high, for a
        message whose transaction was undone."""
        self._positions = itertools.count(((last and last[0]) or 0) + 1)

    def find(self, client_id: str, number: int) -> list[CallResult] | None:
        """Results of a message that was executed before; None for a new message.

        Raises:
            StoreError: a later message of the client was executed, which overtook this one after the client
                had given it up.
        """
        if self._numbers.get(client_id, number) < number:
            return None
        row = self._journal.fetch_one("SELECT number, results FROM clients WHERE client_id = ?", (client_id,))
        if row is None or row[0] < number:
            return None
        if row[0] > number:
            raise StoreError(
                f"message {number} of a client arrived after its message {row[0]}; it was not executed"
            )
        return [(succeeded, _decode(succeeded, result)) for succeeded, result in decode_payload(row[1])]

    def add(self, client_id: str, number: int, results: list[CallResult]) -> None:
        """Store the results of a client's message in place of its previous message's."""
        position = next(self._positions)
        data = encode_payload([[succeeded, _encode(succeeded, result)] for succeeded, result in results])
        self._journal.execute(
            "INSERT INTO clients VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET number = excluded.number, "
            "results = excluded.results, used = excluded.used",
            (client_id, number, data, position),
        )
        self._numbers[client_id] = number
        if position % PRUNE_EVERY == 0:
            self._numbers.clear()  # of the clients that are gone
            self._journal.execute(
                "DELETE FROM clients WHERE used <= (SELECT used FROM clients ORDER BY used DESC LIMIT 1 "
                "OFFSET ?)",
                (self._max_clients,),
            )


def _encode(succeeded: bool, result: object) -> object:
    """Return a result, or class and text of an error."""
    return result if succeeded else [type(result).__name__, str(result)]


def _decode(succeeded: bool, result: Any) -> Any:
    return result if succeeded else getattr(raylight.errors, result[0])(result[1])
