"""Versions of the named resources, and what is known of the workers."""

from __future__ import annotations

from collections.abc import Callable

from raylight.errors import UnknownIdError
from raylight.store.attempts import Attempts
from raylight.store.journal import Journal
from raylight.store.rows import RESOURCES, Row

_WORKER = """
SELECT w.worker_id, IIF(w.gone, 'unknown', IIF(a.attempt_id IS NULL, 'idle', 'busy')) AS status, w.heartbeat_stats,
    w.last_heartbeat_time, w.last_dequeue_time, w.last_busy_time, w.last_idle_time,
    a.rollout_id AS current_rollout_id, a.attempt_id AS current_attempt_id
FROM workers w LEFT JOIN attempts a ON a.attempt_id = (
    SELECT attempt_id FROM attempts WHERE worker_id = w.worker_id AND status IN ('preparing', 'running')
    ORDER BY start_time DESC LIMIT 1
)
"""
WORKERS = f"({_WORKER})"
"""A table of workers with their status, which follows from their attempts."""


class Shelves:
    """Resources and workers.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, journal: Journal, attempts: Attempts, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._attempts = attempts
        self._clock = clock

    def add_resources(self, resources_id: str, body: bytes) -> Row:
        """Store a new version of the named resources; it becomes the latest."""
        now = self._clock()
        self._journal.execute(
            "INSERT OR IGNORE INTO resources (resources_id, version, create_time, update_time, updated, body)"
            " VALUES (?, 1, ?, ?, (SELECT COALESCE(MAX(updated), 0) + 1 FROM resources), ?)",
            (resources_id, now, now, body),
        )
        return self.resources(resources_id)

    def update_resources(self, resources_id: str, body: bytes) -> Row:
        """Replace a version in its place, under a higher version number; it becomes the latest.

        Raises:
            UnknownIdError: there is none of this id.
        """
        if self.resources(resources_id)[-1] != body:  # the second try of a client changes nothing
            self._journal.execute(
                "UPDATE resources SET version = version + 1, update_time = ?, body = ? WHERE resources_id = ?",
                (self._clock(), body, resources_id),
            )
        self._journal.execute(
            "UPDATE resources SET updated = (SELECT MAX(updated) + 1 FROM resources) WHERE resources_id = ?", (resources_id,)
        )
        return self.resources(resources_id)

    def resources(self, resources_id: str) -> Row:
        found = self._journal.one(f"SELECT {RESOURCES} FROM resources WHERE resources_id = ?", (resources_id,))
        if found is None:
            raise UnknownIdError(f"no resources {resources_id!r} in the store")
        return found

    def latest_resources(self) -> Row | None:
        return self._journal.one(f"SELECT {RESOURCES} FROM resources ORDER BY updated DESC LIMIT 1")

    def update_worker(self, worker_id: str, stats: str | None, attempt_ids: list[str] | None) -> tuple[Row, list[str]]:
        """A heartbeat with `stats` as JSON: renews the leases of `attempt_ids` (None: of all that the worker has).

        Returns the worker, and those of its attempts that nobody needs any more.
        """
        over = self._attempts.renew_leases(worker_id, attempt_ids)
        self._journal.execute(
            "INSERT INTO workers (worker_id, heartbeat_stats, last_heartbeat_time) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET"
            " heartbeat_stats = COALESCE(excluded.heartbeat_stats, heartbeat_stats),"
            " last_heartbeat_time = excluded.last_heartbeat_time",
            (worker_id, stats, self._clock()),
        )
        found = self._journal.one(f"{_WORKER} WHERE w.worker_id = ?", (worker_id,))
        assert found is not None, "it was written a moment ago"
        return found, over

    def statistics(self) -> dict[str, int]:
        """Counts by status, and of everything counted along the way."""
        counts = dict(self._journal.execute("SELECT name, value FROM counts").fetchall())
        for table in ("resources", "workers"):
            (counts[f"total_{table}"],) = self._journal.execute(f"SELECT COUNT(*) FROM {table}").fetchone()
        return {name: value for name, value in counts.items() if value}
