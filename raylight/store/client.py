"""The store's client: the same methods whether the store is an actor or an object in this process."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raylight.errors import StoreError
from raylight.store.call_batcher import Channel
from raylight.store.reading import StoreReader
from raylight.store.rows import (
    attempt_of,
    config_text,
    failure_text,
    generation_bytes,
    new_id,
    packed,
    request_row,
    resources_of,
    rollout_of,
    span_row,
    worker_of,
)
from raylight.types import (
    Attempt,
    AttemptStatus,
    CallKey,
    EnqueueRolloutRequest,
    Failure,
    Generation,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Span,
    Worker,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

SETTLE_TIMEOUT_S = 30.0
"""How long a finishing attempt waits for the records of its calls."""
ENQUEUE_AT_ONCE = 500
"""Rollouts in one message."""


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()
"""Default of an `update_*` method's parameter: leave it as it is. None is a value like any other."""


class StoreClient(StoreReader):
    """The store. All methods are asynchronous, and raise typed errors: UnknownIdError, InvalidTransitionError, StoreLostError.

    A client may be sent to other processes. What a caller asked for twice, because an answer got lost, happens once.

    Args:
        target: a StoreActor's handle, or a StoreService in this process.
    """

    def __init__(self, target: Any) -> None:
        self._channel = Channel(target)
        self._announcements = Channel(target)
        """A way of their own: an answer waits for its announcement, and that must not wait for what ended before."""

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
    ) -> Rollout:
        """Add a rollout with its first attempt, to be run by the caller at once; it never is in the queue."""
        row = request_row(_request(input, mode, resources_id, config, metadata, rollout_id))
        return rollout_of(await self._channel.call("start_rollout", row, new_id("at"), worker_id))

    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        rollout_id: str | None = None,
    ) -> Rollout:
        """Queue a rollout. Waits while the queue is full. With a `rollout_id` that is there already, nothing changes."""
        return (
            await self.enqueue_many_rollouts(
                [_request(input, mode, resources_id, config, metadata, rollout_id)]
            )
        )[0]

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        """Queue rollouts, in the order given. Waits while the queue is full."""
        rows = [request_row(request) for request in rollouts]
        queued: list[Any] = []
        for start in range(0, len(rows), ENQUEUE_AT_ONCE):
            queued += await self._channel.send("enqueue", rows[start : start + ENQUEUE_AT_ONCE])
        return [rollout_of(row) for row in queued]

    async def dequeue_rollout(self, worker_id: str | None = None, timeout: float = 0.0) -> Rollout | None:
        """Lease the oldest waiting rollout, with a new attempt; None if none came within `timeout` seconds."""
        found = await self.dequeue_many_rollouts(worker_id=worker_id, timeout=timeout)
        return found[0] if found else None

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, timeout: float = 0.0
    ) -> list[Rollout]:
        """Lease up to `limit` waiting rollouts, waiting up to `timeout` seconds for the first.

        A lease ends when neither a span, a call nor a heartbeat (`heartbeat`, `update_worker`) renewed it in time: then the rollout
        goes back to the queue.
        """
        rows = await self._channel.send("dequeue", worker_id, limit, timeout, uuid.uuid4().hex)
        return [rollout_of(row) for row in rows]

    async def update_rollout(
        self,
        rollout_id: str,
        input: Any = UNSET,
        mode: RolloutMode | None = UNSET,
        resources_id: str | None = UNSET,
        status: RolloutStatus = UNSET,
        config: RolloutConfig = UNSET,
        metadata: dict[str, Any] | None = UNSET,
    ) -> Rollout:
        """Change a rollout; a finished one whose status becomes "requeuing" is run again."""
        given: dict[str, Any] = {"mode": mode, "resources_id": resources_id, "status": status}
        values = {name: value for name, value in given.items() if value is not UNSET}
        checked = {
            name: value
            for name, value in (("mode", mode), ("metadata", metadata or {}))
            if value is not UNSET
        }
        EnqueueRolloutRequest.model_validate(
            {"input": None, **checked}
        )  # raises now, and not whenever the rollout is read
        if input is not UNSET:
            values["input"] = packed(input, "the input")
        if config is not UNSET:
            values["config"] = config_text(config or RolloutConfig())
        if metadata is not UNSET:
            values["metadata"] = packed(metadata or {}, "the metadata")
        return rollout_of(await self._channel.call("update_rollout", rollout_id, values))

    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        """Cancel a rollout unless it is decided; its runner is told with the next heartbeat."""
        return (await self.cancel_rollouts([rollout_id]))[0]

    async def cancel_rollouts(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """Cancel the undecided among these rollouts."""
        return [rollout_of(row) for row in await self._channel.call("cancel", list(rollout_ids))]

    # attempts

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> Rollout:
        """Another attempt by hand, to be run by the caller at once."""
        return rollout_of(await self._channel.call("start_attempt", rollout_id, new_id("at"), worker_id))

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
        """Change an attempt, or the "latest" one; a final status decides the rollout if it is the latest."""
        given: dict[str, Any] = {
            "worker_id": worker_id,
            "last_heartbeat_time": last_heartbeat_time,
            "metadata": metadata,
        }
        values = {name: value for name, value in given.items() if value is not UNSET}
        checked = {
            "rollout_id": rollout_id,
            "attempt_id": attempt_id,
            "sequence_id": 1,
            "start_time": 0.0,
            **values,
        }
        Attempt.model_validate(checked)  # raises now, and not whenever the attempt is read
        if status is not UNSET:
            values["status"] = status
        if metadata is not UNSET:
            values["metadata"] = packed(metadata, "the metadata")
        if failure is not None:
            values["failure"] = failure_text(failure)
        return attempt_of(await self._channel.call("update_attempt", rollout_id, attempt_id, values))

    async def finish_attempt(
        self,
        attempt_of: Rollout,
        status: AttemptStatus,
        failure: Failure | None = None,
        spans: Sequence[Span] = (),
        metadata: dict[str, Any] | None = None,
        timeout: float = SETTLE_TIMEOUT_S,
    ) -> Rollout:
        """Store an attempt's last spans and decide it, in one step, once all its calls to the engine are recorded.

        An attempt whose calls are not all recorded within `timeout` seconds is a failure of the infrastructure. One that was
        decided before (it ran out of time) stays as it is.
        """
        attempt = attempt_of.attempt
        assert attempt is not None, "only a dequeued rollout has an attempt to finish"
        ids, rows = (attempt.rollout_id, attempt.attempt_id), [span_row(span) for span in spans]
        values: dict[str, Any] = {"status": status, "failure": failure_text(failure) if failure else None}
        if metadata is not None:
            values["metadata"] = packed(metadata, "the metadata")
        clock = asyncio.get_running_loop().time
        end = clock() + timeout
        row = await self._channel.call("finish_attempt", *ids, values, rows, False)
        while row is None:
            settled = await self._channel.send("settle", attempt.attempt_id, end - clock())
            if not settled and status == "succeeded":
                lost = Failure(
                    kind="infrastructure",
                    error=f"LostGeneration: calls were not recorded within {timeout:g} s",
                )
                values |= {"status": "failed", "failure": failure_text(lost)}
            row = await self._channel.call("finish_attempt", *ids, values, rows, not settled)
        return rollout_of(row)

    # spans and calls

    async def add_span(self, span: Span) -> Span | None:
        """Store a span, with a sequence id if it has none; None if it is there already. It is a sign of life of its attempt."""
        (number,) = await self._channel.call("add_spans", [span_row(span)])
        return None if number is None else span.model_copy(update={"sequence_id": number})

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store spans, all or none; returns those that were not there already."""
        numbers = await self._channel.call("add_spans", [span_row(span) for span in spans])
        stored = zip(spans, numbers, strict=True)
        return [
            span.model_copy(update={"sequence_id": number}) for span, number in stored if number is not None
        ]

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        """Store a span of the OpenTelemetry SDK; None if it is there already."""
        return await self.add_span(
            Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id or 0)
        )

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """A number for a span of the attempt; numbers only grow."""
        return (await self.get_many_span_sequence_ids([(rollout_id, attempt_id)]))[0]

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> list[int]:
        """A number for a span of each attempt; an attempt that is named twice gets two."""
        return await self._channel.call("next_sequence_ids", [tuple(ids) for ids in rollout_attempt_ids])

    async def capture(
        self,
        opened: Sequence[tuple[CallKey, float]],
        closed: Sequence[tuple[CallKey, Generation | None, Span | None]],
        recorder: str = "",
    ) -> list[CallKey]:
        """Record that calls to the engine began (each with its time) and ended (each with what it sampled, and its span).

        Returns those that could not begin, because their attempt is decided, or unknown.

        Args:
            recorder: who will tell of the ends of those that begin; see `lose_recorder`.
        """
        began = [
            (key.rollout_id, key.attempt_id, key.call_id, start, recorder, key.request)
            for key, start in opened
        ]
        ended = [
            (
                key.rollout_id,
                key.attempt_id,
                key.call_id,
                generation_bytes(generation) if generation else None,
                span_row(span) if span else None,
            )
            for key, generation, span in closed
        ]
        channel = self._announcements if opened and not closed else self._channel
        return [CallKey(*ids) for ids in await channel.call("capture", began, ended)]

    async def lose_recorder(self, recorder: str) -> None:
        """A recorder is gone and will tell nothing any more. An attempt with calls of which it did not tell the end cannot succeed,
        and is not kept waiting, unless the same was asked again: then the first answer was not used.
        """
        await self._channel.call("lose_recorder", recorder)

    # resources and workers

    async def add_resources(self, resources: dict[str, Any]) -> ResourcesUpdate:
        """Store a new version of the named resources; it becomes the latest."""
        return resources_of(
            await self._channel.call("add_resources", new_id("rs"), packed(resources, "the resources"))
        )

    async def update_resources(self, resources_id: str, resources: dict[str, Any]) -> ResourcesUpdate:
        """Replace a version in its place; it becomes the latest."""
        return resources_of(
            await self._channel.call("update_resources", resources_id, packed(resources, "the resources"))
        )

    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | None = None) -> Worker:
        """A heartbeat: the worker lives, and so does all that it has."""
        worker, _ = await self._channel.call("update_worker", worker_id, _json(heartbeat_stats), None)
        return worker_of(worker)

    async def heartbeat(
        self, worker_id: str, heartbeat_stats: dict[str, Any], attempt_ids: Sequence[str]
    ) -> list[str]:
        """A heartbeat that names the attempts that the worker works on, so that one that never reached it is given to another.

        Returns those of them that nobody needs any more: cancelled, out of time, or begun again elsewhere.
        """
        _, over = await self._channel.call(
            "update_worker", worker_id, _json(heartbeat_stats), list(attempt_ids)
        )
        return over

    async def release_worker(self, worker_id: str, why: str) -> int:
        """A worker is gone for good: what it had goes back to the queue. Returns how many attempts that were."""
        return await self._channel.call("release_worker", worker_id, why)


def _json(stats: dict[str, Any] | None) -> str | None:
    try:
        return None if stats is None else json.dumps(stats)
    except (TypeError, ValueError) as error:
        raise StoreError(f"heartbeat_stats must be JSON: {error}") from None


def _request(
    input: Any,
    mode: RolloutMode | None,
    resources_id: str | None,
    config: RolloutConfig | None,
    metadata: dict[str, Any] | None,
    rollout_id: str | None,
) -> EnqueueRolloutRequest:
    return EnqueueRolloutRequest(
        input=input,
        mode=mode,
        resources_id=resources_id,
        config=config or RolloutConfig(),
        metadata=metadata or {},
        rollout_id=rollout_id,
    )
