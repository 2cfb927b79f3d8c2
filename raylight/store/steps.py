"""Table of the training steps: the groups of rollouts that each step trains on, and those that it drops."""

from __future__ import annotations

from raylight.store.journal import Journal


class Steps:
    """Training steps in the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def record(self, lineage: str, step: int, groups: str) -> str:
        """Store the groups of a step as JSON, unless the step has some already; return those that are
        stored."""
        self._journal.execute(
            "INSERT OR IGNORE INTO steps (lineage, step, groups) VALUES (?, ?, ?)", (lineage, step, groups)
        )
        row = self._journal.fetch_one(
            "SELECT groups FROM steps WHERE lineage = ? AND step = ?", (lineage, step)
        )
        assert row is not None, "it was stored just now"
        return row[0]
