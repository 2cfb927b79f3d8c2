"""Rollouts in the journal, and the queue of those that wait. No Ray, no network, no wall clock.

Laws: a rollout is enqueued once, whatever a client that lost an answer repeats; a status changes by the tables only; what is
cancelled stays so until somebody puts it back by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raylight.errors import UnknownIdError
from raylight.store.journal import Journal
from raylight.store.rows import LATEST, ROLLOUT_WITH_ATTEMPT, Row, config_of
from raylight.store.rules import Losses, check_by_hand
from raylight.types import FINISHED, WAITING, RolloutConfig, RolloutStatus


@dataclass
class Changes:
    """What happened since somebody last looked, for those who wait."""

    decided: set[str] = field(default_factory=set)
    """Rollouts that were finished."""
    queued: bool = False
    """Rollouts came into the queue."""
    taken: bool = False
    """Rollouts left it."""
    closed: bool = False
    """Calls ended."""
    deadline: float | None = None
    """The earliest deadline that was set."""

    def deadline_set(self, deadline: float | None) -> None:
        if deadline is not None:
            self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)


class Rollouts:
    """Rollouts without their attempts.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._clock = clock
        self.changes = Changes()
        last = journal.one(
            "SELECT MAX(queue) FROM rollouts WHERE queue IS NOT NULL"
        )  # once, of those that wait
        self._last_in_queue = (last and last[0]) or 0

    @property
    def waiting(self) -> int:
        """Rollouts in the queue."""
        return self._journal.counted("rollouts_queuing") + self._journal.counted("rollouts_requeuing")

    def enqueue(self, requests: list[Row]) -> list[Row]:
        """Queue rollouts; one whose id is there already stays as it is. Returns them in the order given.

        Raises:
            UnknownIdError: a request names resources that are not in the store; none is queued then.
        """
        for request in requests:
            self.insert(request, "queuing")
        return [self.get(request[0]) for request in requests]

    def check(self, requests: list[Row]) -> None:
        """Raise UnknownIdError if a request names resources that are not in the store."""
        for resources_id in {request[4] for request in requests if request[4]}:
            self._must_know(resources_id)

    def _must_know(self, resources_id: str) -> None:
        if not self._journal.one("SELECT 1 FROM resources WHERE resources_id = ?", (resources_id,)):
            raise UnknownIdError(f"no resources {resources_id!r} in the store")

    def insert(self, request: Row, status: RolloutStatus) -> bool:
        """Add a rollout; False if its id is there already."""
        rollout_id, task, mode, group_id, resources_id, config, metadata = request
        if self._journal.one("SELECT 1 FROM rollouts WHERE rollout_id = ?", (rollout_id,)):
            return False
        if resources_id:
            self._must_know(resources_id)
        self._journal.execute(
            "INSERT INTO rollouts (rollout_id, status, mode, group_id, resources_id, start_time, config, metadata, input, queue)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                rollout_id,
                status,
                mode,
                group_id,
                resources_id or self._latest_resources_id(),
                self._clock(),
                config,
                metadata,
                task,
                self._back_of_queue() if status in WAITING else None,
            ),
        )
        return True

    def first_in_queue(self, limit: int, suspect: bool = False) -> list[str]:
        """The oldest waiting rollouts, of those that are suspected or of the others."""
        found = self._journal.execute(
            "SELECT rollout_id FROM rollouts WHERE queue IS NOT NULL AND suspect = ? ORDER BY queue LIMIT ?",
            (suspect, limit),
        )
        return [rollout_id for (rollout_id,) in found.fetchall()]

    def take(self, rollout_id: str) -> tuple[RolloutConfig, int]:
        """Another attempt begins, out of the queue or by hand; returns the limits that hold for it, and its number."""
        found = self._journal.one(
            "UPDATE rollouts SET status = 'preparing', queue = NULL, end_time = NULL, n_attempts = n_attempts + 1"
            " WHERE rollout_id = ? RETURNING config, n_attempts",
            (rollout_id,),
        )
        assert found is not None, "it was looked up before"
        self.changes.taken = True
        return config_of(found[0]), found[1]

    def cancel(self, rollout_ids: list[str]) -> list[Row]:
        """Cancel the undecided among these rollouts; a decided one stays as it is."""
        for rollout_id in rollout_ids:
            if (before := self.status(rollout_id)) not in FINISHED:
                self.set_status(rollout_id, before, "cancelled")
        return [self.get(rollout_id) for rollout_id in rollout_ids]

    def update(self, rollout_id: str, values: dict[str, Any]) -> Row:
        """Change columns of a rollout; a status follows the table of what may be done by hand.

        Raises:
            InvalidTransitionError: the table does not have this change.
            UnknownIdError: no such rollout, or no such resources.
        """
        before = self.status(rollout_id)
        columns = {name: value for name, value in values.items() if name != "status"}
        if columns.get("resources_id"):
            self._must_know(columns["resources_id"])
        if columns:
            changes = ", ".join(f"{name} = ?" for name in columns)
            self._journal.execute(
                f"UPDATE rollouts SET {changes} WHERE rollout_id = ?", (*columns.values(), rollout_id)
            )
        status = values.get("status", before)
        if status != before:
            check_by_hand(rollout_id, before, status)
            self.set_status(rollout_id, before, status)
        return self.get(rollout_id)

    def get(self, rollout_id: str) -> Row:
        """Columns ROLLOUT_WITH_ATTEMPT of a rollout.

        Raises:
            UnknownIdError: there is none of this id.
        """
        found = self._journal.one(
            f"SELECT {ROLLOUT_WITH_ATTEMPT} FROM {LATEST} WHERE r.rollout_id = ?", (rollout_id,)
        )
        if found is None:
            raise UnknownIdError(f"no rollout {rollout_id!r} in the store")
        return found

    def status(self, rollout_id: str) -> RolloutStatus:
        return self.column(rollout_id, "status")

    def undecided(self, rollout_ids: list[str]) -> list[str]:
        """Those of the rollouts that are not finished.

        Raises:
            UnknownIdError: one is not there.
        """
        found = self._journal.execute(
            "SELECT j.key, r.rollout_id, r.status FROM json_each(?) j LEFT JOIN rollouts r ON r.rollout_id = j.value",
            (json.dumps(rollout_ids),),
        ).fetchall()
        for key, rollout_id, _ in found:
            if (
                rollout_id is None or rollout_id != rollout_ids[key]
            ):  # none, or that of a text that SQLite cut off at a NUL
                raise UnknownIdError(f"no rollout {rollout_ids[key]!r} in the store")
        return [rollout_id for _, rollout_id, status in found if status not in FINISHED]

    def config(self, rollout_id: str) -> RolloutConfig:
        return config_of(self.column(rollout_id, "config"))

    def column(self, rollout_id: str, name: str) -> Any:
        found = self._journal.one(f"SELECT {name} FROM rollouts WHERE rollout_id = ?", (rollout_id,))
        if found is None:
            raise UnknownIdError(f"no rollout {rollout_id!r} in the store")
        return found[0]

    def fate(self, rollout_id: str) -> tuple[RolloutStatus, RolloutConfig, Losses]:
        """What its attempts can change or depend on: its status, its config, and how many of them the infrastructure lost."""
        found = self._journal.one(
            "SELECT status, config, lost, charged FROM rollouts WHERE rollout_id = ?", (rollout_id,)
        )
        assert found is not None, "an attempt has a rollout"
        return found[0], config_of(found[1]), Losses(found[2], found[3])

    def set_losses(self, rollout_id: str, losses: Losses) -> None:
        self._journal.execute(
            "UPDATE rollouts SET lost = ?, charged = ? WHERE rollout_id = ?", (*losses, rollout_id)
        )

    def suspect(self, rollout_id: str, suspected: bool) -> None:
        """Suspect a rollout of having brought its runner down, or acquit it."""
        self._journal.execute("UPDATE rollouts SET suspect = ? WHERE rollout_id = ?", (suspected, rollout_id))

    def set_status(self, rollout_id: str, before: RolloutStatus, status: RolloutStatus) -> None:
        """Change a rollout's status, and its place in the queue with it."""
        queue = self._back_of_queue() if status in WAITING else None
        end = self._clock() if status in FINISHED else None
        self._journal.execute(
            "UPDATE rollouts SET status = ?, queue = ?, end_time = ? WHERE rollout_id = ?",
            (status, queue, end, rollout_id),
        )
        if status in FINISHED:
            self.changes.decided.add(rollout_id)
        self.changes.taken |= before in WAITING and status not in WAITING

    def _latest_resources_id(self) -> str | None:
        found = self._journal.one("SELECT resources_id FROM resources ORDER BY updated DESC LIMIT 1")
        return found[0] if found else None

    def _back_of_queue(self) -> int:
        self.changes.queued = True
        self._last_in_queue += 1
        return self._last_in_queue
