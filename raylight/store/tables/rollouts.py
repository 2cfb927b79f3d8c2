"""Table of the rollouts, and the queue of those that wait for a worker. No Ray, no network, no wall clock.

Laws:
- A rollout is enqueued once, however often a client repeats the request because a response got lost.
- A status changes only as the transition tables allow.
- A cancelled rollout stays cancelled until a user queues it again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from raylight.errors import UnknownIdError
from raylight.store.rows import (
    LATEST,
    N_ROLLOUT,
    N_STATE,
    ROLLOUT,
    ROLLOUT_STATE,
    ROLLOUT_WITH_INPUT,
    Row,
    config_from_json,
)
from raylight.store.tables.journal import Journal
from raylight.store.tables.run_clock import RunClock
from raylight.store.tables.transitions import InfrastructureLosses, check_manual_transition
from raylight.types import FINISHED, WAITING, RolloutConfig, RolloutStatus

ResourcesVersion = tuple[str | None, int | None]
"""Id and version of resources; None without any."""
NO_ATTEMPT = (None,) * (N_STATE - N_ROLLOUT)
"""Columns of the latest attempt, in ROLLOUT_STATE of a rollout without one."""

_BEGIN_ATTEMPT = (
    "UPDATE rollouts SET status = 'preparing', queue = NULL, not_before = NULL, end_time = NULL, "
    f"n_attempts = n_attempts + 1 WHERE rollout_id = ? RETURNING {ROLLOUT}, (SELECT version FROM resources v "
    "WHERE v.resources_id = rollouts.resources_id), config, metadata, input, n_attempts"
)


@dataclass
class CommitEvents:
    """Events of the current transaction; after the commit, the service wakes those that wait for them."""

    decided: set[str] = field(default_factory=set)
    """Ids of rollouts that finished."""
    queued: bool = False
    """True if a rollout joined the queue, or a worker's poll must be evaluated again."""
    dequeued: bool = False
    """True if a rollout left the queue."""
    calls_closed: bool = False
    """True if a call to the engine ended, or nothing awaits its record any more."""
    deadline: float | None = None
    """The earliest deadline that was set, in seconds that the run has lived."""

    def add_deadline(self, deadline: float | None) -> None:
        """Keep the earlier of this deadline and those before."""
        if deadline is not None:
            self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)


class Rollouts:
    """Rollouts in the journal, without their attempts."""

    def __init__(self, journal: Journal, clock: RunClock) -> None:
        self._journal = journal
        self._clock = clock
        self.events = CommitEvents()
        last = journal.fetch_one("SELECT MAX(queue) FROM rollouts WHERE queue IS NOT NULL")
        self._last_position = (last and last[0]) or 0

    # the queue

    @property
    def n_waiting(self) -> int:
        """Number of rollouts in the queue."""
        return self._journal.counter("rollouts_queuing") + self._journal.counter("rollouts_requeuing")

    def enqueue(self, requests: list[Row]) -> list[tuple[bool, Row]]:
        """Queue rollouts; a rollout that exists stays as it is.

        Returns for each, in the given order, True if it is new, and columns ROLLOUT_STATE.

        Raises:
            UnknownIdError: a request names resources that are not in the store; no rollout was queued.
        """
        rows: list[tuple[bool, Row]] = []
        latest = self.latest_resources()
        for request in requests:
            new = self.insert(request, "queuing", latest)
            rows.append((new is not None, new or self.state(request[0])))
        return rows

    def check_requests(self, requests: list[Row]) -> None:
        """Raise UnknownIdError if a request names resources that are not in the store."""
        for resources_id in {request[4] for request in requests if request[4]}:
            self._check_resources(resources_id)

    def _check_resources(self, resources_id: str) -> int:
        """Version of resources; raises UnknownIdError."""
        row = self._journal.fetch_one("SELECT version FROM resources WHERE resources_id = ?", (resources_id,))
        if row is None:
            raise UnknownIdError(f"no resources {resources_id!r} in the store")
        return row[0]

    def insert(self, request: Row, status: RolloutStatus, latest: ResourcesVersion) -> Row | None:
        """Add a rollout, and return its columns ROLLOUT_STATE; None if its id exists.

        Args:
            latest: version of the resources of a request that names none.
        """
        rollout_id, task, mode, group_id, resources_id, config, metadata = request
        version = self._check_resources(resources_id) if resources_id else latest[1]
        resources_id, now = resources_id or latest[0], self._clock()
        position = self._next_position() if status in WAITING else None
        added = self._journal.execute(
            "INSERT INTO rollouts (rollout_id, status, mode, group_id, resources_id, start_time, config, "
            "metadata, input, queue) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (rollout_id) DO "
            "NOTHING",
            (rollout_id, status, mode, group_id, resources_id, now, config, metadata, task, position),
        )
        if not added.rowcount:
            return None
        self._journal.increment("total_rollouts")
        self._count(None, status)
        return (rollout_id, status, mode, group_id, resources_id, now, None, version, *NO_ATTEMPT)

    def oldest_waiting(self, limit: int, suspect: bool = False) -> list[tuple[str, RolloutStatus]]:
        """Ids and statuses of the oldest rollouts in the queue that are not held back, either of the crash
        suspects or of the others."""
        return self._journal.execute(
            "SELECT rollout_id, status FROM rollouts WHERE queue IS NOT NULL AND not_before IS NULL AND "
            "suspect = ? ORDER BY queue LIMIT ?",
            (suspect, limit),
        ).fetchall()

    def begin_attempt(self, rollout_id: str, before: RolloutStatus) -> tuple[Row, Row, int]:
        """Take a rollout out of the queue for another attempt.

        Returns the columns of ROLLOUT_WITH_INPUT before and after its attempt's columns, and the number of
        the attempt.
        """
        row = self._journal.fetch_one(_BEGIN_ATTEMPT, (rollout_id,))
        assert row is not None, "the caller looked the rollout up"
        self._count(before, "preparing")
        self.events.dequeued = True
        return row[:N_ROLLOUT], row[N_ROLLOUT:-1], row[-1]

    def next_release(self) -> float | None:
        """The earliest time at which a rollout may be dequeued, in seconds that the run has lived."""
        row = self._journal.fetch_one("SELECT MIN(not_before) FROM rollouts WHERE not_before IS NOT NULL")
        return row[0] if row else None

    def release_held_back(self) -> None:
        """Let workers take the rollouts whose delay is over."""
        released = self._journal.execute(
            "UPDATE rollouts SET not_before = NULL WHERE not_before <= ?", (self._clock.lived(),)
        )
        self.events.queued |= released.rowcount > 0

    # changes by a user

    def cancel(self, rollout_ids: list[str], waiting_only: bool = False) -> list[Row]:
        """Cancel the rollouts that are not finished, and return columns ROLLOUT_STATE of all.

        Args:
            waiting_only: cancel only those in the queue.
        """
        for rollout_id in rollout_ids:
            before = self.status(rollout_id)
            if before in WAITING or not (waiting_only or before in FINISHED):
                self.set_status(rollout_id, before, "cancelled", self._clock())
        return [self.state(rollout_id) for rollout_id in rollout_ids]

    def update(self, rollout_id: str, values: dict[str, Any]) -> None:
        """Change columns of a rollout; a status changes as MANUAL_TRANSITIONS allows.

        Raises:
            InvalidTransitionError: the table does not allow the change of status.
            UnknownIdError: no rollout, or no resources, of this id.
        """
        before = self.status(rollout_id)
        columns = {name: value for name, value in values.items() if name != "status"}
        if columns.get("resources_id"):
            self._check_resources(columns["resources_id"])
        if columns:
            changes = ", ".join(f"{name} = ?" for name in columns)
            self._journal.execute(
                f"UPDATE rollouts SET {changes} WHERE rollout_id = ?", (*columns.values(), rollout_id)
            )
        status = values.get("status", before)
        if status != before:
            check_manual_transition(rollout_id, before, status)
            self.set_status(rollout_id, before, status, self._clock())
            if status == "requeuing":
                self._forget_attempts(rollout_id)

    def _forget_attempts(self, rollout_id: str) -> None:
        """Give a rollout that is queued again by hand the retries of a new one."""
        self._journal.execute(
            "UPDATE rollouts SET lost = n_attempts, charged = 0 WHERE rollout_id = ?", (rollout_id,)
        )
        self._journal.execute("UPDATE attempts SET charged = 0 WHERE rollout_id = ?", (rollout_id,))

    # reading

    def state(self, rollout_id: str) -> Row:
        """Columns ROLLOUT_STATE of a rollout; raises UnknownIdError."""
        return self._columns(rollout_id, ROLLOUT_STATE)

    def with_input(self, rollout_id: str) -> Row:
        """Columns ROLLOUT_WITH_INPUT of a rollout; raises UnknownIdError."""
        return self._columns(rollout_id, ROLLOUT_WITH_INPUT)

    def _columns(self, rollout_id: str, columns: str) -> Row:
        row = self._journal.fetch_one(f"SELECT {columns} FROM {LATEST} WHERE r.rollout_id = ?", (rollout_id,))
        if row is None:
            raise UnknownIdError(f"no rollout {rollout_id!r} in the store")
        return row

    def status(self, rollout_id: str) -> RolloutStatus:
        """Status of a rollout; raises UnknownIdError."""
        return self._column(rollout_id, "status")

    def config(self, rollout_id: str) -> RolloutConfig:
        """Limits of a rollout; raises UnknownIdError."""
        return config_from_json(self._column(rollout_id, "config"))

    def _column(self, rollout_id: str, name: str) -> Any:
        row = self._journal.fetch_one(f"SELECT {name} FROM rollouts WHERE rollout_id = ?", (rollout_id,))
        if row is None:
            raise UnknownIdError(f"no rollout {rollout_id!r} in the store")
        return row[0]

    def undecided(self, rollout_ids: list[str], final: bool = False) -> list[str]:
        """Filter the rollouts that are not finished.

        Args:
            final: keep those too that failed because their attempt is unresponsive, and may still succeed.

        Raises:
            UnknownIdError: a rollout does not exist.
        """
        is_silent = "a.status = 'unresponsive'" if final else "0"
        rows = self._journal.execute(
            f"SELECT j.key, r.rollout_id, r.status, {is_silent} FROM json_each(?) j LEFT JOIN rollouts r ON "
            "r.rollout_id = j.value LEFT JOIN attempts a ON a.rollout_id = r.rollout_id AND a.sequence_id = "
            "r.n_attempts",
            (json.dumps(rollout_ids),),
        ).fetchall()
        for index, rollout_id, *_ in rows:
            # unknown, or another rollout, because SQLite cut the id off at a zero character
            if rollout_id is None or rollout_id != rollout_ids[index]:
                raise UnknownIdError(f"no rollout {rollout_ids[index]!r} in the store")
        return [
            rollout_id
            for _, rollout_id, status, is_silent in rows
            if status not in FINISHED or (status == "failed" and is_silent)
        ]

    # changes by its attempts

    def decision_inputs(self, rollout_id: str) -> tuple[RolloutStatus, RolloutConfig, InfrastructureLosses]:
        """Status, config and losses of a rollout, from which a change of its latest attempt decides it."""
        row = self._journal.fetch_one(
            "SELECT status, config, lost, charged FROM rollouts WHERE rollout_id = ?", (rollout_id,)
        )
        assert row is not None, "an attempt has a rollout"
        return row[0], config_from_json(row[1]), InfrastructureLosses(row[2], row[3])

    def set_losses(self, rollout_id: str, losses: InfrastructureLosses) -> None:
        """Store how many attempts of a rollout the infrastructure lost."""
        self._journal.execute(
            "UPDATE rollouts SET lost = ?, charged = ? WHERE rollout_id = ?", (*losses, rollout_id)
        )

    def set_suspect(self, rollout_id: str, suspect: bool) -> None:
        """Mark a rollout as suspected of crashing its runner, or clear the mark."""
        self._journal.execute("UPDATE rollouts SET suspect = ? WHERE rollout_id = ?", (suspect, rollout_id))

    def set_status(
        self, rollout_id: str, before: RolloutStatus, status: RolloutStatus, now: float, delay: float = 0.0
    ) -> None:
        """Change a rollout's status and its position in the queue.

        Args:
            now: `end_time` of a rollout that is finished.
            delay: seconds for which no worker may take the rollout from the queue.
        """
        position = self._next_position() if status in WAITING else None
        not_before = self._clock.lived() + delay if delay else None
        self.events.add_deadline(not_before)
        end = now if status in FINISHED else None
        self._journal.execute(
            "UPDATE rollouts SET status = ?, queue = ?, not_before = ?, end_time = ? WHERE rollout_id = ?",
            (status, position, not_before, end, rollout_id),
        )
        self._count(before, status)
        if status in FINISHED:
            self.events.decided.add(rollout_id)
        self.events.dequeued |= before in WAITING and status not in WAITING

    def _count(self, before: RolloutStatus | None, status: RolloutStatus) -> None:
        """Count a rollout under its new status, no longer under that before."""
        if before is not None:
            self._journal.increment(f"rollouts_{before}", by=-1)
        self._journal.increment(f"rollouts_{status}")

    def latest_resources(self) -> ResourcesVersion:
        """The resources that were added or updated last."""
        row = self._journal.fetch_one(
            "SELECT resources_id, version FROM resources ORDER BY updated DESC LIMIT 1"
        )
        return (row[0], row[1]) if row else (None, None)

    def _next_position(self) -> int:
        self.events.queued = True
        self._last_position += 1
        return self._last_position
