"""Recorders that are gone, and the calls that were open in them.

Law: a call that was open in a lost recorder may have been answered. It is forgotten only if its client says
that it sent the request again, to another recorder; otherwise its attempt cannot succeed.
"""

from __future__ import annotations

from raylight.store.journal import Journal
from raylight.types import REPEATED

_USE_REPETITION = (
    "UPDATE calls SET request = ? WHERE rowid = (SELECT rowid FROM calls WHERE request = ? AND "
    "attempt_id = ? AND recorder != ? AND start_time >= ? LIMIT 1)"
)


class LostRecorders:
    """The recorders that are gone.

    Kept in memory only: after a restart of the store, the open calls of a lost recorder run into their time
    limit.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, recorder: str) -> bool:
        return recorder in self._names

    def add(self, recorder: str) -> None:
        """Mark a recorder as lost."""
        self._names.add(recorder)
        self._forget_repeated("recorder = ?", (recorder,))

    def opened(self, attempt_id: str, call_id: str) -> bool:
        """Return True if one of them opened a call."""
        if not self._names:
            return False
        row = self._journal.fetch_one(
            "SELECT recorder FROM calls WHERE attempt_id = ? AND call_id = ?", (attempt_id, call_id)
        )
        return row is not None and row[0] in self._names

    def forget_repeated_calls(self, attempt_id: str) -> None:
        """Delete the open calls of an attempt that were sent again elsewhere."""
        if self._names:
            self._forget_repeated("attempt_id = ?", (attempt_id,))

    def _forget_repeated(self, condition: str, values: tuple[str, ...]) -> None:
        """Delete open calls that were sent again; each repetition takes the place of one of them."""
        names = sorted(self._names)
        calls = self._journal.execute(
            f"SELECT rowid, request, attempt_id, recorder, start_time FROM calls WHERE {condition} AND "
            f"generation IS NULL AND request != '' AND recorder IN ({', '.join('?' * len(names))})",
            (*values, *names),
        ).fetchall()
        for row, request, *others in calls:
            repetition = request.removesuffix(REPEATED) + REPEATED
            if self._journal.execute(_USE_REPETITION, (request, repetition, *others)).rowcount:
                self._journal.execute("DELETE FROM calls WHERE rowid = ?", (row,))
                self._journal.increment("calls_repeated")
