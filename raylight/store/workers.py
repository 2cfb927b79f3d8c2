"""Workers in the journal: those that take rollouts, and what they have."""

from __future__ import annotations

from collections.abc import Callable

from raylight.store.journal import Journal
from raylight.store.live import LIVE_ATTEMPT, WORKED_ON, LiveAttempt
from raylight.store.rows import Row

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


class Workers:
    """Workers.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._clock = clock

    def seen(self, worker_id: str) -> bool:
        """Note that a worker asked; False for one that was released: a poll that outlives its worker must not take anything."""
        found = self._journal.one(
            "INSERT INTO workers (worker_id, last_dequeue_time) VALUES (?, ?)"
            " ON CONFLICT DO UPDATE SET last_dequeue_time = excluded.last_dequeue_time RETURNING gone",
            (worker_id, self._clock()),
        )
        return found == (0,)

    def is_gone(self, worker_id: str | None) -> bool:
        """Whether it was dismissed."""
        return self._journal.one("SELECT gone FROM workers WHERE worker_id = ?", (worker_id,)) == (1,)

    def dismiss(self, worker_id: str) -> None:
        """It is gone for good."""
        self._journal.execute(
            "INSERT INTO workers (worker_id, gone) VALUES (?, 1) ON CONFLICT DO UPDATE SET gone = 1",
            (worker_id,),
        )

    def held_by(self, worker_id: str) -> list[LiveAttempt]:
        """Attempts that it works on, oldest first."""
        found = self._journal.execute(
            f"{LIVE_ATTEMPT} WHERE a.worker_id = ? AND {WORKED_ON} ORDER BY a.start_time", (worker_id,)
        )
        return [LiveAttempt._make(row) for row in found.fetchall()]

    def heartbeat(self, worker_id: str, stats: str | None) -> Row:
        """It says that it lives, with figures as JSON; returns columns of WORKERS."""
        self._journal.execute(
            "INSERT INTO workers (worker_id, heartbeat_stats, last_heartbeat_time) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET"
            " heartbeat_stats = COALESCE(excluded.heartbeat_stats, heartbeat_stats),"
            " last_heartbeat_time = excluded.last_heartbeat_time",
            (worker_id, stats, self._clock()),
        )
        found = self._journal.one(f"{_WORKER} WHERE w.worker_id = ?", (worker_id,))
        assert found is not None, "it was written a moment ago"
        return found

    def busy(self, worker_id: str, now: float) -> None:
        """It began an attempt."""
        self._journal.execute(
            "INSERT INTO workers (worker_id, last_busy_time) VALUES (?, ?)"
            " ON CONFLICT DO UPDATE SET last_busy_time = excluded.last_busy_time",
            (worker_id, now),
        )

    def idle(self, worker_id: str, now: float) -> None:
        """It ended an attempt; noted if that was its last."""
        if not self._journal.one(
            f"SELECT 1 FROM attempts a WHERE a.worker_id = ? AND {WORKED_ON} LIMIT 1", (worker_id,)
        ):
            self._journal.execute(
                "UPDATE workers SET last_idle_time = ? WHERE worker_id = ?", (now, worker_id)
            )
