"""Client of the store; its methods are the same for an actor and for an object in this process."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from typing import Any

from raylight.store.call_batcher import Channel
from raylight.store.call_deltas import CallDeltas
from raylight.store.payloads import encode_payload
from raylight.store.reading import StoreReader
from raylight.store.record_writer import RecordWriter
from raylight.store.rows import (
    Row,
    attempt_from_row,
    config_json,
    failure_json,
    new_id,
    request_row,
    requested_rollout,
    resources_from_row,
    rollout_from_row,
    span_row,
    state_from_row,
    stats_json,
    step_groups_from_json,
    worker_from_row,
)
from raylight.store.session_client import SessionClient
from raylight.types import (
    TRUNCATED,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Budget,
    EnqueueRolloutRequest,
    Failure,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutState,
    RolloutStatus,
    Span,
    StepGroups,
    Worker,
)

RECORDS_TIMEOUT_S = 30.0
"""Time that a finishing attempt waits for the records of its calls."""
ENQUEUE_BATCH = 500
"""Rollouts in one message."""


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()
"""Default of the parameters of `update_*` methods: leave the value unchanged. None is a value."""


class StoreClient(StoreReader, RecordWriter, SessionClient):
    """Client of a store.

    All methods are asynchronous and raise typed errors: UnknownIdError, InvalidTransitionError,
    StoreLostError.

    A client can be pickled and sent to other processes. A request that is repeated because its response got
    lost is executed once.

    Args:
        target: a StoreActor's handle, or a StoreService in this process.
    """

    def __init__(self, target: Any) -> None:
        self._channel = Channel(target)
        self._announcements = Channel(target)
        self._deltas = CallDeltas()

    @property
    def is_in_process(self) -> bool:
        """True if the store runs in this process, where other processes cannot reach it."""
        from raylight.store.service import StoreService

        return isinstance(self._channel.target, StoreService)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreClient, (self._channel.target,)

    # rollouts

    async def start_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
        rollout_id: str | None = None,
        group_id: str | None = None,
    ) -> AttemptedRollout:
        """Add a rollout with a first attempt that the caller executes; the rollout is never queued."""
        request = _request(input, mode, resources_id, config, metadata, rollout_id, group_id)
        row = await self._channel.call("start_rollout", request_row(request), new_id("at"), worker_id)
        return _attempted(requested_rollout(request, row))

    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        rollout_id: str | None = None,
        group_id: str | None = None,
    ) -> Rollout:
        """Queue a rollout; waits while the queue is full.

        A rollout that exists under `rollout_id` is unchanged.

        Args:
            group_id: group of rollouts of the same task, whose rewards are compared with one another (GRPO).
        """
        request = _request(input, mode, resources_id, config, metadata, rollout_id, group_id)
        return (await self.enqueue_many_rollouts([request]))[0]

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        """Queue rollouts in the given order; waits while the queue is full."""
        queued: list[tuple[bool, Row]] = []
        for start in range(0, len(rollouts), ENQUEUE_BATCH):  # encoded when the queue has room for them
            rows = [
                request_row(request, f"rollouts[{start + number}].")
                for number, request in enumerate(rollouts[start : start + ENQUEUE_BATCH])
            ]
            queued += await self._channel.send("enqueue", rows)
        known = [row[0] for is_new, row in queued if not is_new]
        stored = {
            rollout.rollout_id: rollout
            for rollout in (await self.query_rollouts(rollout_id_in=known) if known else [])
        }
        return [
            requested_rollout(request, row) if is_new else stored[row[0]]
            for request, (is_new, row) in zip(rollouts, queued, strict=True)
        ]

    async def dequeue_rollout(
        self, worker_id: str | None = None, timeout: float = 0.0
    ) -> AttemptedRollout | None:
        """Lease the oldest waiting rollout, with a new attempt; None if none arrived within `timeout`
        seconds."""
        rollouts = await self.dequeue_many_rollouts(worker_id=worker_id, timeout=timeout)
        return rollouts[0] if rollouts else None

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, timeout: float = 0.0
    ) -> list[AttemptedRollout]:
        """Lease up to `limit` waiting rollouts, waiting up to `timeout` seconds for the first.

        A span, a call or a heartbeat (`heartbeat`, `update_worker`) renews the lease. When it expires, the
        rollout goes back to the queue.
        """
        rows = await self._channel.send("dequeue", worker_id, limit, timeout, new_id("rq"))
        return [_attempted(rollout_from_row(row)) for row in rows]

    async def update_rollout(
        self,
        rollout_id: str,
        input: Any = UNSET,
        mode: RolloutMode | None = UNSET,
        resources_id: str | None = UNSET,
        status: RolloutStatus = UNSET,
        config: RolloutConfig = UNSET,
        metadata: dict[str, Any] | None = UNSET,
    ) -> RolloutState:
        """Change a rollout. The status "requeuing" runs a finished rollout again."""
        passed: dict[str, Any] = {"mode": mode, "resources_id": resources_id, "status": status}
        values = {name: value for name, value in passed.items() if value is not UNSET}
        checked = {
            name: value
            for name, value in (("mode", mode), ("metadata", metadata or {}))
            if value is not UNSET
        }
        EnqueueRolloutRequest.model_validate({"input": None, **checked})  # raise now, not when it is read
        if input is not UNSET:
            values["input"] = encode_payload(input, "input")
        if config is not UNSET:
            values["config"] = config_json(config or RolloutConfig())
        if metadata is not UNSET:
            values["metadata"] = encode_payload(metadata or {}, "metadata")
        return state_from_row(await self._channel.call("update_rollout", rollout_id, values))

    async def cancel_rollout(self, rollout_id: str) -> RolloutState:
        """Cancel a rollout unless it is decided; its runner learns it from the next heartbeat's response."""
        return (await self.cancel_rollouts([rollout_id]))[0]

    async def cancel_rollouts(
        self, rollout_ids: Sequence[str], waiting_only: bool = False
    ) -> list[RolloutState]:
        """Cancel those of these rollouts that are not decided, or only those in the queue; returns the states
        of all."""
        rows = await self._channel.call("cancel", list(rollout_ids), waiting_only)
        return [state_from_row(row) for row in rows]

    # attempts

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Begin another attempt, which the caller executes."""
        state = state_from_row(await self._channel.call("start_attempt", rollout_id, new_id("at"), worker_id))
        rollout = await self.get_rollout_by_id(rollout_id)
        return _attempted(rollout.model_copy(update=dict(state)))

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus = UNSET,
        worker_id: str = UNSET,
        last_heartbeat_time: float = UNSET,
        metadata: dict[str, Any] | None = UNSET,
        failure: Failure | None = None,
    ) -> Attempt:
        """Change an attempt, or the "latest" one; the final status of the latest one decides the rollout."""
        passed: dict[str, Any] = {
            "worker_id": worker_id,
            "last_heartbeat_time": last_heartbeat_time,
            "metadata": metadata,
        }
        values = {name: value for name, value in passed.items() if value is not UNSET}
        ids = {"rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": 1, "start_time": 0.0}
        Attempt.model_validate(ids | values)  # raise now, not when it is read
        if status is not UNSET:
            values["status"] = status
        if metadata is not UNSET:
            values["metadata"] = encode_payload(metadata, "metadata")
        if failure is not None:
            values["failure"] = failure_json(failure)
        return attempt_from_row(await self._channel.call("update_attempt", rollout_id, attempt_id, values))

    async def finish_attempt(
        self,
        rollout: RolloutState,
        status: AttemptStatus,
        failure: Failure | None = None,
        spans: Sequence[Span] = (),
        losses: dict[str, int] | None = None,
        timeout: float = RECORDS_TIMEOUT_S,
        truncated: Budget | None = None,
    ) -> RolloutState:
        """Store an attempt's last spans and decide it, in one transaction, once all its calls to the engine
        are recorded.

        If a call is not recorded within `timeout` seconds, the attempt fails as lost to the infrastructure.
        An attempt that was decided before (by a timeout, for example) is unchanged.

        Args:
            rollout: the dequeued rollout with the attempt to finish.
            losses: counts of what the attempt recorded and the runner could not keep (`spans_dropped`,
                `rewards_lost`), for the attempt's metadata and the store's counters.
            truncated: budget that truncated the attempt, for its metadata.
        """
        attempt = rollout.attempt
        assert attempt is not None, "only a dequeued rollout has an attempt to finish"
        ids, rows = (attempt.rollout_id, attempt.attempt_id), [span_row(span) for span in spans]
        values: dict[str, Any] = {"status": status, "failure": failure_json(failure) if failure else None}
        if metadata := (losses or {}) | ({TRUNCATED: truncated} if truncated else {}):
            values["metadata"] = encode_payload(metadata, "metadata")
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        row = await self._channel.call("finish_attempt", *ids, values, rows, False, losses)
        while row is None:
            recorded = await self._channel.send("wait_for_records", attempt.attempt_id, deadline - clock())
            if not recorded and status == "succeeded":
                lost = Failure(
                    kind="infrastructure",
                    error=f"LostGeneration: calls were not recorded within {timeout:g} s",
                )
                values |= {"status": "failed", "failure": failure_json(lost)}
            row = await self._channel.call("finish_attempt", *ids, values, rows, not recorded, losses)
        return state_from_row(row)

    async def find_truncation(
        self, rollout: RolloutState, timeout: float = RECORDS_TIMEOUT_S
    ) -> Budget | None:
        """Return the budget that truncated an attempt whose agent has ended, once all its calls are recorded,
        or after `timeout` seconds; None if none did."""
        attempt = rollout.attempt
        assert attempt is not None, "only a dequeued rollout has an attempt"
        await self._channel.send("wait_for_records", attempt.attempt_id, timeout)
        return await self._channel.call("truncation", attempt.rollout_id, attempt.attempt_id)

    async def report_outage(self, source: str, since: float | None, reason: str = "") -> int:
        """Report that a served model is away since a time, or back (None); see `Outages.report`.

        The caller is on the store's machine.
        """
        return await self._channel.call("report_outage", source, since, reason)

    # resources and workers

    async def add_resources(self, resources: dict[str, Any]) -> ResourcesUpdate:
        """Store a new version of the named resources; it becomes the latest."""
        return resources_from_row(
            await self._channel.call("add_resources", new_id("rs"), encode_payload(resources, "resources"))
        )

    async def update_resources(self, resources_id: str, resources: dict[str, Any]) -> ResourcesUpdate:
        """Replace the content of a version, or add one under a new id; it becomes the latest."""
        return resources_from_row(
            await self._channel.call("update_resources", resources_id, encode_payload(resources, "resources"))
        )

    async def record_step(self, lineage: str, step: int, groups: StepGroups) -> StepGroups:
        """Record the groups that a training step takes; return those that were recorded first.

        Args:
            lineage: prefix of the names of the groups' rollouts.
        """
        stored = await self._channel.call("record_step", lineage, step, json.dumps(groups))
        return step_groups_from_json(stored)

    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | None = None) -> Worker:
        """Record a heartbeat of a worker, and renew the leases of all its attempts."""
        worker, _ = await self._channel.call("update_worker", worker_id, stats_json(heartbeat_stats), None)
        return worker_from_row(worker)

    async def heartbeat(
        self, worker_id: str, heartbeat_stats: dict[str, Any], attempt_ids: Sequence[str]
    ) -> list[str]:
        """Record a heartbeat that lists the worker's attempts; the lease of an attempt that never reached it
        is not renewed.

        Returns the obsolete attempts: cancelled, timed out, or started again elsewhere.
        """
        _, obsolete = await self._channel.call(
            "update_worker", worker_id, stats_json(heartbeat_stats), list(attempt_ids)
        )
        return obsolete

    async def retire_worker(self, worker_id: str) -> None:
        """Lease nothing more to a worker, which may finish what it executes. Its polls end with
        WorkerGoneError."""
        await self._channel.call("retire_worker", worker_id)

    async def release_worker(self, worker_id: str, reason: str, planned: bool = False) -> int:
        """Mark a worker as gone for good; its attempts go back to the queue. Returns their number.

        Args:
            planned: the worker was taken away; False if it died, perhaps because of one of its attempts.
        """
        return await self._channel.call("release_worker", worker_id, reason, planned)

    # requests to the driver of a run

    async def ask_driver(self, run: str, request: dict[str, Any], timeout: float) -> dict[str, Any] | None:
        """Send a request to the driver of a run; returns its reply, or None after `timeout` seconds."""
        return await self._channel.send("ask_driver", run, uuid.uuid4().hex, request, timeout)

    async def next_driver_request(
        self, run: str, known: Sequence[str], timeout: float
    ) -> tuple[str, dict[str, Any]] | None:
        """Wait for a request to the driver of a run; returns its key and content, None after `timeout`
        seconds.

        Args:
            known: keys of the requests that the driver is executing.
        """
        return await self._channel.send("next_driver_request", run, list(known), timeout)

    async def reply_to_request(self, key: str, reply: dict[str, Any]) -> None:
        """Reply to a request of `next_driver_request`."""
        await self._channel.send("reply_to_request", key, reply)


def _request(
    input: Any,
    mode: RolloutMode | None,
    resources_id: str | None,
    config: RolloutConfig | None,
    metadata: dict[str, Any] | None,
    rollout_id: str | None,
    group_id: str | None,
) -> EnqueueRolloutRequest:
    return EnqueueRolloutRequest(
        input=input,
        mode=mode,
        resources_id=resources_id,
        config=config,  # type: ignore[arg-type]  # None: the defaults
        metadata=metadata,  # type: ignore[arg-type]
        rollout_id=rollout_id,
        group_id=group_id,
    )


def _attempted(rollout: Rollout) -> AttemptedRollout:
    assert isinstance(rollout, AttemptedRollout), "it has an attempt"
    return rollout
