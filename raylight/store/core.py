"""The store's rules, without Ray, network or wall clock.

Laws: a rollout is decided by its latest attempt only; an attempt succeeds only when every call that was opened for it has been
closed, so that no generation is missing; a record of a finished attempt is counted and dropped, never mixed into the next one.
"""

from __future__ import annotations

import uuid
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raylight.errors import InvalidTransitionError, UnknownRolloutError
from raylight.types import (
    ATTEMPT_FINISHED,
    ATTEMPT_TRANSITIONS,
    FINISHED,
    ROLLOUT_TRANSITIONS,
    WAITING,
    Attempt,
    AttemptStatus,
    CallKey,
    Failure,
    FinishedRollout,
    Generation,
    Rollout,
    RolloutRequest,
    RolloutStatus,
    Span,
    find_final_reward,
)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


@dataclass
class Record:
    """A rollout and what its latest attempt left behind."""

    rollout: Rollout
    spans: list[Span] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    open_calls: set[str] = field(default_factory=set)


class StoreCore:
    """State of all rollouts of a run.

    Args:
        clock: seconds since the epoch.
        make_id: gives a fresh id for a prefix.
    """

    def __init__(self, clock: Callable[[], float], make_id: Callable[[str], str] = new_id) -> None:
        self._clock = clock
        self._make_id = make_id
        self._records: dict[str, Record] = {}
        self._queue: deque[str] = deque()
        self._by_worker: dict[str, dict[str, None]] = {}
        """What each worker has, in the order in which it was taken."""
        self._gone: set[str] = set()
        """Workers that were released. Names are never reused; a poll that outlives its worker must not take anything."""
        self._resources: dict[str, dict[str, Any]] = {}
        self._latest_resources: str | None = None
        self._counts: Counter[str] = Counter()

    # rollouts

    def enqueue(self, requests: list[RolloutRequest]) -> list[Rollout]:
        """Queue rollouts; each gets an id and, where it names none, the latest resources."""
        now, made = self._clock(), []
        for request in requests:
            fields = {name: getattr(request, name) for name in RolloutRequest.model_fields}
            fields["resources_id"] = fields["resources_id"] or self._latest_resources
            rollout = Rollout(**fields, rollout_id=self._make_id("ro"), start_time=now)
            self._records[rollout.rollout_id] = Record(rollout)
            self._queue.append(rollout.rollout_id)
            made.append(rollout)
        self._counts["enqueued"] += len(made)
        return made

    @property
    def has_waiting(self) -> bool:
        return bool(self._queue)

    def dequeue(self, worker_id: str, limit: int) -> list[Rollout]:
        """Give up to `limit` waiting rollouts to a worker, oldest first, each with a new attempt."""
        taken: list[Rollout] = []
        if worker_id in self._gone:
            return taken
        while self._queue and len(taken) < limit:
            rollout_id = self._queue.popleft()
            record = self._records[rollout_id]
            if record.rollout.status not in WAITING:
                continue  # cancelled while it waited
            previous = record.rollout.attempt
            attempt = Attempt(
                rollout_id=rollout_id, attempt_id=self._make_id("at"), worker_id=worker_id, start_time=self._clock(),
                sequence_id=previous.sequence_id + 1 if previous else 1,
            )  # fmt: skip
            self._records[rollout_id] = Record(record.rollout.model_copy(update={"attempt": attempt}))
            self._set_status(rollout_id, "preparing")
            self._by_worker.setdefault(worker_id, {})[rollout_id] = None
            taken.append(self._records[rollout_id].rollout)
        return taken

    def finish_attempt(
        self, rollout_id: str, attempt_id: str, status: AttemptStatus, failure: Failure | None, spans: list[Span]
    ) -> Rollout:
        """Store an attempt's last spans and decide it, in one step.

        Raises:
            UnknownRolloutError: no such rollout, or the attempt is not its latest.
            InvalidTransitionError: the attempt is already decided, or succeeds while calls are still open.
        """
        record = self._latest(rollout_id, attempt_id)
        attempt = record.rollout.attempt
        assert attempt is not None
        if status not in ATTEMPT_FINISHED or status not in ATTEMPT_TRANSITIONS[attempt.status]:
            raise InvalidTransitionError(f"attempt {attempt_id}: {attempt.status} -> {status}")
        if status == "succeeded" and record.open_calls:
            raise InvalidTransitionError(f"attempt {attempt_id} succeeds while {len(record.open_calls)} calls are open")
        record.spans.extend(spans)
        attempt = attempt.model_copy(update={"status": status, "failure": failure, "end_time": self._clock()})
        record.rollout = record.rollout.model_copy(update={"attempt": attempt})
        if attempt.worker_id:
            self._by_worker[attempt.worker_id].pop(rollout_id, None)
        if failure:
            self._counts[f"attempts_failed_{failure.kind}"] += 1
        self._decide(record, attempt)
        return record.rollout

    def _decide(self, record: Record, attempt: Attempt) -> None:
        """The rollout follows its latest attempt: success, another try, or failure."""
        config, rollout_id = record.rollout.config, attempt.rollout_id
        if attempt.status == "succeeded":
            self._set_status(rollout_id, "succeeded")
        elif attempt.failure and attempt.failure.kind in config.retry_on and attempt.sequence_id < config.max_attempts:
            self._set_status(rollout_id, "requeuing")
            self._queue.append(rollout_id)
        else:
            self._set_status(rollout_id, "failed")

    def release_worker(self, worker_id: str, why: str) -> list[Rollout]:
        """A worker is gone: decide all that it had as failures of the infrastructure."""
        failure = Failure(kind="infrastructure", error=f"RunnerLost: {why}")
        self._gone.add(worker_id)
        held = list(self._by_worker.get(worker_id, ()))
        latest = [self._records[rollout_id].rollout.attempt for rollout_id in held]
        return [self.finish_attempt(a.rollout_id, a.attempt_id, "failed", failure, []) for a in latest if a]

    def cancel(self, rollout_ids: list[str]) -> None:
        """Cancel rollouts that are not yet decided; a decided one stays as it is."""
        for rollout_id in rollout_ids:
            if self._record(rollout_id).rollout.status not in FINISHED:
                self._set_status(rollout_id, "cancelled")

    def collect(self, rollout_ids: list[str]) -> list[FinishedRollout]:
        """What each decided rollout's latest attempt left: its reward and its generations in the order they began."""
        found = []
        for rollout_id in rollout_ids:
            record = self._record(rollout_id)
            generations = sorted(record.generations, key=lambda g: g.start_time)
            found.append(FinishedRollout(record.rollout, find_final_reward(record.spans), generations))
        return found

    def get(self, rollout_id: str) -> Rollout:
        return self._record(rollout_id).rollout

    # calls and generations

    def open_calls(self, keys: list[CallKey]) -> None:
        """Calls to the engine have begun; the first one sets the attempt running. A stale attempt's call is counted."""
        for key in keys:
            record = self._if_live(key)
            if record is None:
                self._counts["calls_late"] += 1
                continue
            record.open_calls.add(key.call_id)
            attempt = record.rollout.attempt
            if attempt and attempt.status == "preparing":
                record.rollout = record.rollout.model_copy(update={"attempt": attempt.model_copy(update={"status": "running"})})
                self._set_status(key.rollout_id, "running")

    def close_calls(self, closed: list[tuple[CallKey, Generation | None]]) -> None:
        """Calls have ended, each with its generation, or None where nothing was sampled."""
        for key, generation in closed:
            record = self._if_live(key)
            if record is None or key.call_id not in record.open_calls:
                self._counts["generations_late"] += generation is not None
                continue
            record.open_calls.discard(key.call_id)
            if generation is not None:
                record.generations.append(generation)
                self._counts["generations"] += 1

    def count_open_calls(self, rollout_id: str, attempt_id: str) -> int:
        return len(self._latest(rollout_id, attempt_id).open_calls)

    # resources

    def add_resources(self, resources: dict[str, Any]) -> str:
        """Store a new, immutable version of the named resources; it becomes the latest."""
        resources_id = self._make_id("rs")
        self._resources[resources_id] = dict(resources)
        self._latest_resources = resources_id
        return resources_id

    def get_resources(self, resources_id: str) -> dict[str, Any]:
        if resources_id not in self._resources:
            raise UnknownRolloutError(f"no resources {resources_id!r} in the store")
        return self._resources[resources_id]

    def statistics(self) -> dict[str, int]:
        """Counts by status, and of everything counted along the way."""
        by_status = Counter(f"rollouts_{r.rollout.status}" for r in self._records.values())
        return {**self._counts, **by_status}

    # inside

    def _record(self, rollout_id: str) -> Record:
        if rollout_id not in self._records:
            raise UnknownRolloutError(f"no rollout {rollout_id!r} in the store")
        return self._records[rollout_id]

    def _latest(self, rollout_id: str, attempt_id: str) -> Record:
        record = self._record(rollout_id)
        attempt = record.rollout.attempt
        if attempt is None or attempt.attempt_id != attempt_id:
            raise UnknownRolloutError(f"attempt {attempt_id!r} is not the latest of rollout {rollout_id!r}")
        return record

    def _if_live(self, key: CallKey) -> Record | None:
        """The record of a call's attempt, while that attempt is the latest and undecided."""
        record = self._records.get(key.rollout_id)
        attempt = record.rollout.attempt if record else None
        live = attempt is not None and attempt.attempt_id == key.attempt_id and attempt.status not in ATTEMPT_FINISHED
        return record if live else None

    def _set_status(self, rollout_id: str, status: RolloutStatus) -> None:
        record = self._records[rollout_id]
        before = record.rollout.status
        if before == "cancelled":
            return  # what still runs of a cancelled rollout changes nothing
        if status not in ROLLOUT_TRANSITIONS[before]:
            raise InvalidTransitionError(f"rollout {rollout_id}: {before} -> {status}")
        end = self._clock() if status in FINISHED else None
        record.rollout = record.rollout.model_copy(update={"status": status, "end_time": end})
