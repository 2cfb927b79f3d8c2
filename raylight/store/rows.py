"""Conversion between the types of a client and the rows of the journal.

The store never interprets what users pass (inputs, metadata, resources, tokens). Clients write and read it as
bytes, so that the store needs none of the users' modules and spends no time on their data.
"""

from __future__ import annotations

import functools
import json
import pickle
import secrets
import time
from typing import Any

import numpy as np

from raylight.errors import StoreError
from raylight.store.payloads import decode_payload, encode_payload
from raylight.traces.rewards import get_reward_value
from raylight.types import (
    Attempt,
    AttemptedRollout,
    CallKey,
    EnqueueRolloutRequest,
    Failure,
    Generation,
    HistoryNote,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Span,
    Worker,
    span_json,
)

Row = tuple[Any, ...]

ATTEMPT = (
    "attempt_id, rollout_id, sequence_id, status, worker_id, start_time, end_time, last_heartbeat_time, "
    "failure, metadata"
)
ROLLOUT = "rollout_id, status, mode, group_id, resources_id, start_time, end_time, config, metadata, input"
SPAN = (
    "rollout_id, attempt_id, sequence_id, trace_id, span_id, parent_id, name, start_time, end_time, "
    "reward, body"
)
RESOURCES = "resources_id, version, create_time, update_time, body"
ROLLOUT_WITH_ATTEMPT = ", ".join(
    [f"r.{name}" for name in ROLLOUT.split(", ")]
    + ["(SELECT version FROM resources WHERE resources_id = r.resources_id)"]
    + [f"a.{name}" for name in ATTEMPT.split(", ")]
)
LATEST = "rollouts r LEFT JOIN attempts a ON a.rollout_id = r.rollout_id AND a.sequence_id = r.n_attempts"
"""SQL table of the rollouts with their latest attempts."""
N_ROLLOUT = len(ROLLOUT.split(", ")) + 1
"""Number of the columns of ROLLOUT_WITH_ATTEMPT that belong to the rollout."""


def new_id(prefix: str) -> str:
    """Return a new id.

    Ids begin with the time, so that a large journal appends to its indexes instead of writing all over them.
    """
    return f"{prefix}-{time.time_ns() // 1_000_000:011x}{secrets.token_hex(5)}"


@functools.lru_cache(maxsize=1024)
def config_from_json(text: str) -> RolloutConfig:
    """Parse a rollout's config."""
    return RolloutConfig(**json.loads(text))


@functools.lru_cache(maxsize=1024)
def config_json(config: RolloutConfig) -> str:
    """A rollout's config as JSON."""
    return config.model_dump_json()


def request_row(request: EnqueueRolloutRequest, place: str = "") -> Row:
    """`(rollout_id, input, mode, group_id, resources_id, config, metadata)` of a request.

    The client generates the id, so that the store recognises a retry.

    Args:
        place: of the request, for messages, such as "rollouts[3].".

    Raises:
        StoreError: the input or the metadata cannot be stored, or the id holds a zero character.
    """
    if request.rollout_id and "\0" in request.rollout_id:
        raise StoreError(
            f"the rollout id {request.rollout_id!r} holds a zero character, which SQLite cannot look up; "
            "choose another id"
        )
    return (
        request.rollout_id or new_id("ro"),
        encode_payload(request.input, f"{place}input"),
        request.mode,
        request.group_id,
        request.resources_id,
        config_json(request.config),
        encode_payload(request.metadata, f"{place}metadata"),
    )


def rollout_from_row(row: Row) -> Rollout:
    """Rollout, with its latest attempt if it has one, from columns ROLLOUT_WITH_ATTEMPT."""
    return Rollout(**_rollout_fields(row)) if row[N_ROLLOUT] is None else attempted_rollout_from_row(row)


def attempted_rollout_from_row(row: Row) -> AttemptedRollout:
    """Rollout with its latest attempt, from columns ROLLOUT_WITH_ATTEMPT."""
    return AttemptedRollout(**_rollout_fields(row), attempt=attempt_from_row(row[N_ROLLOUT:]))


def _rollout_fields(row: Row) -> dict[str, Any]:
    rollout_id, status, mode, group_id, resources_id, start, end, config, metadata, task, version = row[
        :N_ROLLOUT
    ]
    return {
        "rollout_id": rollout_id,
        "status": status,
        "mode": mode,
        "group_id": group_id,
        "resources_id": resources_id,
        "start_time": start,
        "end_time": end,
        "config": config_from_json(config),
        "metadata": decode_payload(metadata),
        "input": decode_payload(task),
        "resources_version": version,
    }


def failure_json(failure: Failure) -> str:
    """A failure as JSON.

    Error messages may hold characters that are not Unicode, which pydantic's own JSON refuses.
    """
    return json.dumps(failure.model_dump())


def failure_from_json(text: str | None) -> Failure | None:
    """Parse a failure; None for None."""
    return Failure(**json.loads(text)) if text else None


def attempt_from_row(row: Row) -> Attempt:
    """Attempt, from columns ATTEMPT."""
    attempt_id, rollout_id, sequence_id, status, worker_id, start, end, heartbeat, failure, metadata = row
    return Attempt(
        attempt_id=attempt_id,
        rollout_id=rollout_id,
        sequence_id=sequence_id,
        status=status,
        worker_id=worker_id,
        start_time=start,
        end_time=end,
        last_heartbeat_time=heartbeat,
        failure=failure_from_json(failure),
        metadata=decode_payload(metadata) if metadata is not None else None,
    )


_SPAN_COLUMNS = {
    "rollout_id",
    "attempt_id",
    "sequence_id",
    "trace_id",
    "span_id",
    "parent_id",
    "name",
    "start_time",
    "end_time",
}


def span_row(span: Span) -> Row:
    """Columns SPAN of a span.

    Raises:
        SpanError: the span cannot be stored (see `span_json`).
    """
    body = span_json(span, exclude=_SPAN_COLUMNS)
    return (
        span.rollout_id,
        span.attempt_id,
        span.sequence_id,
        span.trace_id,
        span.span_id,
        span.parent_id,
        span.name,
        span.start_time,
        span.end_time,
        get_reward_value(span),
        body,
    )


def span_from_row(row: Row) -> Span:
    """Span, from columns SPAN."""
    rollout_id, attempt_id, sequence_id, trace_id, span_id, parent_id, name, start, end, _, body = row
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence_id,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        name=name,
        start_time=start,
        end_time=end,
        **json.loads(body),
    )


def generation_bytes(call: Generation) -> bytes:
    """A generation without its key; its arrays as bytes."""
    return pickle.dumps(
        (
            call.model,
            call.prompt_ids.tobytes(),
            call.output_ids.tobytes(),
            call.logprobs.tobytes(),
            call.weight_versions.tobytes(),
            call.finish_reason,
            call.start_time,
            call.end_time,
            call.sampling,
            call.agent,
            tuple(call.history) if call.history else None,
            call.policy_logprobs.tobytes(),
            call.allowed.tobytes(),
        ),
        protocol=5,
    )


def generation_from_row(call_id: str, rollout_id: str, attempt_id: str, data: bytes) -> Generation:
    """Generation of a call, from its key and `generation_bytes`."""
    fields = pickle.loads(data)
    fields += (None, b"", b"")[len(fields) - 10 :]  # absent in stores of earlier versions
    model, prompt, output, logprobs, versions, reason, start, end, sampling, agent = fields[:10]
    history, policy_logprobs, allowed = fields[10:]
    return Generation(
        key=CallKey(rollout_id, attempt_id, call_id),
        model=model,
        prompt_ids=np.frombuffer(prompt, np.int32),
        output_ids=np.frombuffer(output, np.int32),
        logprobs=np.frombuffer(logprobs, np.float32),
        weight_versions=np.frombuffer(versions, np.int64),
        finish_reason=reason,
        start_time=start,
        end_time=end,
        sampling=sampling,
        agent=agent,
        history=HistoryNote(*history) if history else None,
        policy_logprobs=np.frombuffer(policy_logprobs, np.float32),
        allowed=np.frombuffer(allowed, np.int32),
    )


def resources_from_row(row: Row) -> ResourcesUpdate:
    """Version of the named resources, from columns RESOURCES."""
    resources_id, version, created, updated, body = row
    return ResourcesUpdate(
        resources_id=resources_id,
        version=version,
        create_time=created,
        update_time=updated,
        resources=decode_payload(body),
    )


def stats_json(stats: dict[str, Any] | None) -> str | None:
    """A worker's statistics as JSON.

    Raises:
        StoreError: JSON cannot represent them.
    """
    try:
        return None if stats is None else json.dumps(stats)
    except (TypeError, ValueError) as error:
        raise StoreError(f"heartbeat_stats must be JSON: {error}") from None


def worker_from_row(row: Row) -> Worker:
    """Worker, from columns of WORKERS."""
    worker_id, status, stats, heartbeat, dequeue, busy, idle, rollout_id, attempt_id = row
    return Worker(
        worker_id=worker_id,
        status=status,
        heartbeat_stats=json.loads(stats) if stats else None,
        last_heartbeat_time=heartbeat,
        last_dequeue_time=dequeue,
        last_busy_time=busy,
        last_idle_time=idle,
        current_rollout_id=rollout_id,
        current_attempt_id=attempt_id,
    )
