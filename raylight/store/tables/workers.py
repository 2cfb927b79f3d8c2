"""Table of the workers that dequeue rollouts.

A worker is busy while it executes an attempt, else idle. It is unknown before it polls the queue or begins an
attempt for the first time, and after it was released.
"""

from __future__ import annotations

from collections.abc import Callable

from raylight.store.rows import Row
from raylight.store.tables.journal import Journal

_WORKER = """
SELECT w.worker_id,
    IIF(w.gone OR COALESCE(w.last_dequeue_time, w.last_busy_time) IS NULL, 'unknown',
        IIF(a.attempt_id IS NULL, 'idle', 'busy')) AS status,
    w.heartbeat_stats, w.last_heartbeat_time, w.last_dequeue_time, w.last_busy_time, w.last_idle_time,
    a.rollout_id AS current_rollout_id, a.attempt_id AS current_attempt_id
FROM workers w LEFT JOIN attempts a ON a.attempt_id = (
    SELECT attempt_id FROM attempts WHERE worker_id = w.worker_id AND status IN ('preparing', 'running')
    ORDER BY start_time DESC LIMIT 1
)
"""
WORKERS = f"({_WORKER})"
"""SQL table of the workers with their status and current attempt."""


class Workers:
    """Workers in the journal.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._clock = clock

    def record_dequeue(self, worker_id: str) -> bool:
        """Record that a worker polls the queue; False if it was released.

        The poll of a released worker may outlive its process, and must not receive a rollout.
        """
        row = self._journal.fetch_one(
            "INSERT INTO workers (worker_id, last_dequeue_time) VALUES (?, ?) ON CONFLICT DO UPDATE SET "
            "last_dequeue_time = excluded.last_dequeue_time RETURNING gone",
            (worker_id, self._clock()),
        )
        return row == (0,)

    def is_released(self, worker_id: str | None) -> bool:
        """True if `mark_released` was called for the worker."""
        return self._journal.fetch_one("SELECT gone FROM workers WHERE worker_id = ?", (worker_id,)) == (1,)

    def is_runner(self, worker_id: str | None) -> bool:
        """True if the worker sends statistics with its heartbeats, as runners do, and was not released."""
        query = "SELECT 1 FROM workers WHERE worker_id = ? AND NOT gone AND heartbeat_stats IS NOT NULL"
        return self._journal.fetch_one(query, (worker_id,)) is not None

    def mark_released(self, worker_id: str) -> None:
        """Record that a worker will not come back."""
        self._journal.execute(
            "INSERT INTO workers (worker_id, gone) VALUES (?, 1) ON CONFLICT DO UPDATE SET gone = 1",
            (worker_id,),
        )

    def record_heartbeat(self, worker_id: str, stats: str | None) -> Row:
        """Record a heartbeat and its statistics (JSON); returns columns of WORKERS."""
        self._journal.execute(
            "INSERT INTO workers (worker_id, heartbeat_stats, last_heartbeat_time) VALUES (?, ?, ?) ON "
            "CONFLICT DO UPDATE SET heartbeat_stats = COALESCE(excluded.heartbeat_stats, heartbeat_stats), "
            "last_heartbeat_time = excluded.last_heartbeat_time",
            (worker_id, stats, self._clock()),
        )
        row = self._journal.fetch_one(f"{_WORKER} WHERE w.worker_id = ?", (worker_id,))
        assert row is not None, "the statement above wrote this row"
        return row

    def mark_busy(self, worker_id: str, now: float) -> None:
        """Record that the worker began an attempt."""
        self._journal.execute(
            "INSERT INTO workers (worker_id, last_busy_time) VALUES (?, ?) ON CONFLICT DO UPDATE SET "
            "last_busy_time = excluded.last_busy_time",
            (worker_id, now),
        )

    def mark_idle(self, worker_id: str, now: float) -> None:
        """Record that the worker ended its last attempt; no effect while it has others."""
        self._journal.execute(
            "UPDATE workers SET last_idle_time = ? WHERE worker_id = ? AND NOT EXISTS (SELECT 1 FROM "
            "attempts WHERE worker_id = ? AND status IN ('preparing', 'running'))",
            (now, worker_id, worker_id),
        )
