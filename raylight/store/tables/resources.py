"""Table of the named resources: prompts, models and settings that agents receive, in versions."""

from __future__ import annotations

from collections.abc import Callable

from raylight.errors import UnknownIdError
from raylight.store.rows import RESOURCES, Row
from raylight.store.tables.journal import Journal


class Resources:
    """Named resources in the journal.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._clock = clock

    def add_resources(self, resources_id: str, body: bytes) -> Row:
        """Store a new version of the named resources; it becomes the latest."""
        now = self._clock()
        self._journal.execute(
            "INSERT OR IGNORE INTO resources (resources_id, version, create_time, update_time, updated, body)"
            " VALUES (?, 1, ?, ?, (SELECT COALESCE(MAX(updated), 0) + 1 FROM resources), ?)",
            (resources_id, now, now, body),
        )
        return self.get(resources_id)

    def update_resources(self, resources_id: str, body: bytes) -> Row:
        """Replace the content of a version and increase its version number; it becomes the latest.

        A version that does not exist is added.
        """
        if not self._journal.fetch_one("SELECT 1 FROM resources WHERE resources_id = ?", (resources_id,)):
            return self.add_resources(resources_id, body)
        if self.get(resources_id)[-1] != body:  # a client's retry changes nothing
            self._journal.execute(
                "UPDATE resources SET version = version + 1, update_time = ?, body = ? WHERE resources_id = "
                "?",
                (self._clock(), body, resources_id),
            )
        self._journal.execute(
            "UPDATE resources SET updated = (SELECT MAX(updated) + 1 FROM resources) WHERE resources_id = ?",
            (resources_id,),
        )
        return self.get(resources_id)

    def get(self, resources_id: str) -> Row:
        """Columns RESOURCES of a version.

        Raises:
            UnknownIdError: no resources have this id.
        """
        row = self._journal.fetch_one(
            f"SELECT {RESOURCES} FROM resources WHERE resources_id = ?", (resources_id,)
        )
        if row is None:
            raise UnknownIdError(f"no resources {resources_id!r} in the store")
        return row


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
