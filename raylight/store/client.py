"""Client of the store; its methods are the same for an actor and for an object in this process."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from raylight.store.call_batcher import Channel
from raylight.store.call_rows import CallDeltas
from raylight.store.payloads import decode_payload, encode_payload
from raylight.store.reading import StoreReader
from raylight.store.rows import (
    N_STATE,
    ROLLOUT_METADATA,
    Row,
    attempt_from_row,
    config_from_json,
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
from raylight.types import (
    TRUNCATED,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Budget,
    CallKey,
    EnqueueRolloutRequest,
    Failure,
    Generation,
    JsonObject,
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

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from raylight.store.tables.budgets import Allowance

RECORDS_TIMEOUT_S = 30.0
"""Time that a finishing attempt waits for the records of its calls."""
ENQUEUE_BATCH = 500
"""Rollouts in one message."""


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()
"""Default of the parameters of `update_*` methods: leave the value unchanged. None is a value."""


class Session(NamedTuple):
    """A session: an attempt that an agent outside the run executes."""

    state: RolloutState
    """State of its rollout, with the session's own attempt."""
    config: RolloutConfig
    task: Any
    expires: float | None
    """Time at which it expires without a call or a heartbeat, in seconds since the epoch; None: never."""
    calls: int
    """Number of its recorded calls."""
    sampled_tokens: int
    """Number of tokens that they sampled."""

    @property
    def session_id(self) -> str:
        """Id of the session and of its attempt."""
        assert self.state.attempt is not None, "a session has an attempt"
        return self.state.attempt.attempt_id


class StoreClient(StoreReader):
    """Client of a store, which reads and writes.

    All methods are asynchronous and raise typed errors: UnknownIdError, InvalidTransitionError,
    StoreLostError.

    A client can be pickled and sent to other processes. A request that is repeated because its response got
    lost is executed once.

    Args:
        target: a StoreActor's handle, or a StoreService in this process.
    """

    def __init__(self, target: object) -> None:
        super().__init__(target)
        self._announcements = Channel(target)
        """Channel of calls that begin: their response waits for it, and must not wait for earlier records."""
        self._deltas = CallDeltas()

    # rollouts

    async def start_rollout(
        self,
        input: object,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: JsonObject | None = None,
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
        input: object,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: JsonObject | None = None,
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
        input: object = UNSET,
        mode: RolloutMode | None = UNSET,
        resources_id: str | None = UNSET,
        status: RolloutStatus = UNSET,
        config: RolloutConfig = UNSET,
        metadata: JsonObject | None = UNSET,
    ) -> RolloutState:
        """Change a rollout. The status "requeuing" runs a finished rollout again."""
        passed: dict[str, object] = {"mode": mode, "resources_id": resources_id, "status": status}
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
        """Cancel the given rollouts that are undecided, or only those in the queue; returns the states
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
        metadata: JsonObject | None = UNSET,
        failure: Failure | None = None,
    ) -> Attempt:
        """Change an attempt, or the "latest" one; the final status of the latest one decides the rollout."""
        passed: dict[str, object] = {
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
        rollout_metadata: JsonObject | None = None,
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
            rollout_metadata: the rollout's metadata as the attempt leaves it. It is stored if the attempt
                decides the rollout: another one begins with what the rollout had. None: it is unchanged.
        """
        attempt = rollout.attempt
        assert attempt is not None, "only a dequeued rollout has an attempt to finish"
        ids, rows = (attempt.rollout_id, attempt.attempt_id), [span_row(span) for span in spans]
        values: dict[str, object] = {"status": status, "failure": failure_json(failure) if failure else None}
        if metadata := (losses or {}) | ({TRUNCATED: truncated} if truncated else {}):
            values["metadata"] = encode_payload(metadata, "metadata")
        if rollout_metadata is not None:
            values[ROLLOUT_METADATA] = encode_payload(rollout_metadata, "rollout.metadata")
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

    async def add_resources(self, resources: Mapping[str, object]) -> ResourcesUpdate:
        """Store a new version of the named resources; it becomes the latest."""
        return resources_from_row(
            await self._channel.call("add_resources", new_id("rs"), encode_payload(resources, "resources"))
        )

    async def update_resources(self, resources_id: str, resources: Mapping[str, object]) -> ResourcesUpdate:
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

    async def update_worker(self, worker_id: str, heartbeat_stats: JsonObject | None = None) -> Worker:
        """Record a heartbeat of a worker, and renew the leases of all its attempts."""
        worker, _ = await self._channel.call("update_worker", worker_id, stats_json(heartbeat_stats), None)
        return worker_from_row(worker)

    async def heartbeat(
        self, worker_id: str, heartbeat_stats: JsonObject, attempt_ids: Sequence[str]
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

    # spans and calls

    async def add_span(self, span: Span) -> Span | None:
        """Store a span, and assign a sequence id if it has none; None if it is stored already.

        It counts as activity of its attempt.
        """
        (sequence_id,) = await self._channel.call("add_spans", [span_row(span)])
        return None if sequence_id is None else span.model_copy(update={"sequence_id": sequence_id})

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store spans, all or none; returns those that were not stored before."""
        sequence_ids = await self._channel.call("add_spans", [span_row(span) for span in spans])
        return [
            span.model_copy(update={"sequence_id": sequence_id})
            for span, sequence_id in zip(spans, sequence_ids, strict=True)
            if sequence_id is not None
        ]

    async def grade(self, spans: Sequence[Span]) -> None:
        """Store spans of a group reward for decided attempts, all or none.

        Their rewards count, unlike rewards of other spans that come after the decision. An attempt that has a
        grade keeps it, unless that has no reward.
        """
        await self._channel.call("grade", [span_row(span) for span in spans])

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        """Store a span of the OpenTelemetry SDK; None if it is stored already."""
        return await self.add_span(
            Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id or 0)
        )

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Reserve a sequence id for a span of the attempt; ids only grow."""
        return (await self.get_many_span_sequence_ids([(rollout_id, attempt_id)]))[0]

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> list[int]:
        """Reserve a sequence id for a span of each attempt, or of the "latest". One listed twice gets two."""
        return await self._channel.call("next_sequence_ids", [tuple(ids) for ids in rollout_attempt_ids])

    async def capture(
        self,
        opened: Sequence[tuple[CallKey, float]],
        closed: Sequence[tuple[CallKey, Generation | None, Span | None]],
        recorder: str = "",
    ) -> list[CallKey]:
        """Record that calls to the engine began (each with its time) and ended (each with its generation and
        its span).

        Returns the calls that must not begin, because their attempt is decided or unknown.

        Args:
            recorder: name of the replica that will record the end of the calls that begin; see
                `lose_recorder`.
        """
        opened_rows = [
            (key.rollout_id, key.attempt_id, key.call_id, start, recorder, key.request)
            for key, start in opened
        ]
        channel = self._announcements if opened and not closed else self._channel
        try:
            closed_rows = [self._deltas.encode(*call) for call in closed]
            rejected, without_base, ignored = await channel.call("capture", opened_rows, closed_rows)
            self._deltas.forget(attempt_id for _, attempt_id, _ in ignored)
            complete = []
            missing = {CallKey(*ids) for ids in without_base}
            for call in (call for call in closed if call[0] in missing):
                self._deltas.forget([call[0].attempt_id])  # the store does not have its base
                complete.append(self._deltas.encode(*call))
            if complete:
                await channel.call("capture", [], complete)
        except BaseException:  # it is not known which calls the store has
            self._deltas.forget(key.attempt_id for key, *_ in closed)
            raise
        return [CallKey(*ids) for ids in rejected]

    async def write_images(self, images: Mapping[str, bytes]) -> None:
        """Store the files of images, by digest, before the calls that name them; a stored one stays.

        Raises:
            DiskError: the disk is full, read-only or gone.
        """
        await self._channel.send("write_images", dict(images))

    async def check_budgets(
        self, rollout_id: str, attempt_id: str, unrecorded: Mapping[str, int]
    ) -> Allowance:
        """Return the budget that an attempt has spent, the tokens that are left, and which of the given calls
        are recorded; see `Budgets.check`."""
        return await self._announcements.call("check_budgets", rollout_id, attempt_id, dict(unrecorded))

    async def lose_recorder(self, recorder: str) -> None:
        """Stop waiting for the records of a recorder that is gone.

        An attempt with a call whose end it did not record cannot succeed, and fails without waiting. A call
        that the agent retried elsewhere is dropped: the agent never received the first response.
        """
        await self._channel.call("lose_recorder", recorder)

    # sessions

    async def begin_session(self, task: object, group: str | None = None) -> Session | None:
        """Take a free place that the run offers; None if there is none.

        Raises:
            InvalidTransitionError: the group has another task.
            StoreError: the task cannot be stored.
        """
        row = await self._channel.call("begin_session", new_id("se"), encode_payload(task, "task"), group)
        return None if row is None else _session(row)

    async def get_session(self, session_id: str) -> Session:
        """Return a session."""
        return _session(await self._channel.call("session_state", session_id))

    async def renew_session(self, session_id: str) -> Session:
        """Renew a session that has not ended, as each of its calls does."""
        return _session(await self._channel.call("renew_session", session_id))

    async def stop_time(self) -> None:
        """Let no attempt or session expire until `continue_time`: the run is not there yet to serve them."""
        await self._channel.call("stop_time")

    async def continue_time(self) -> None:
        """Let the time of attempts and sessions go on."""
        await self._channel.call("continue_time")

    async def has_open_call(self, session_id: str) -> bool:
        """Return True if a call of a session has begun and is not recorded yet."""
        return not await self._channel.send("wait_for_records", session_id, 0.0)

    async def wait_until_final(self, rollout_ids: Sequence[str]) -> None:
        """Wait until all of these rollouts are decided for good: not only failed because their session
        expired, which may still be rewarded."""
        await self._channel.send("wait_until_decided", list(rollout_ids), None, None, True)

    # requests to the driver of a run

    async def ask_driver(self, run: str, request: JsonObject, timeout: float) -> JsonObject | None:
        """Send a request to the driver of a run; returns its reply, or None after `timeout` seconds."""
        return await self._channel.send("ask_driver", run, uuid.uuid4().hex, request, timeout)

    async def next_driver_request(
        self, run: str, known: Sequence[str], timeout: float
    ) -> tuple[str, JsonObject] | None:
        """Wait for a request to the driver of a run; returns its key and content, None after `timeout`
        seconds.

        Args:
            known: keys of the requests that the driver is executing.
        """
        return await self._channel.send("next_driver_request", run, list(known), timeout)

    async def reply_to_request(self, key: str, reply: JsonObject) -> None:
        """Reply to a request of `next_driver_request`."""
        await self._channel.send("reply_to_request", key, reply)


def _request(
    input: object,
    mode: RolloutMode | None,
    resources_id: str | None,
    config: RolloutConfig | None,
    metadata: JsonObject | None,
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


def _session(row: Row) -> Session:
    config, task, *rest = row[N_STATE:]
    return Session(state_from_row(row[:N_STATE]), config_from_json(config), decode_payload(task), *rest)
