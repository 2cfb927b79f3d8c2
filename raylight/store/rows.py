"""Between the nouns of a client and the rows of the journal.

The store itself never looks into what users gave (inputs, metadata, resources, tokens): it keeps bytes, which clients make and
read, so that it needs none of their modules and spends no time on them.
"""

from __future__ import annotations

import functools
import json
import pickle
import secrets
import time
from array import array
from typing import Any

import cloudpickle

from raylight.errors import StoreError
from raylight.traces.rewards import get_reward_value
from raylight.types import (
    Attempt,
    CallKey,
    EnqueueRolloutRequest,
    Failure,
    Generation,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Span,
    Worker,
    span_json,
)

Row = tuple[Any, ...]

ATTEMPT = "attempt_id, rollout_id, sequence_id, status, worker_id, start_time, end_time, last_heartbeat_time, failure, metadata"
ROLLOUT = "rollout_id, status, mode, group_id, resources_id, start_time, end_time, config, metadata, input"
SPAN = "rollout_id, attempt_id, sequence_id, trace_id, span_id, parent_id, name, start_time, end_time, reward, body"
RESOURCES = "resources_id, version, create_time, update_time, body"
ROLLOUT_WITH_ATTEMPT = ", ".join(
    [f"r.{name}" for name in ROLLOUT.split(", ")]
    + ["(SELECT version FROM resources WHERE resources_id = r.resources_id)"]
    + [f"a.{name}" for name in ATTEMPT.split(", ")]
)
LATEST = "rollouts r LEFT JOIN attempts a ON a.rollout_id = r.rollout_id AND a.sequence_id = r.n_attempts"
N_ROLLOUT = len(ROLLOUT.split(", ")) + 1


def new_id(prefix: str) -> str:
    """A new id. It begins with the time, so that a large journal writes at the end of its indexes and not all over them."""
    return f"{prefix}-{time.time_ns() // 1_000_000:011x}{secrets.token_hex(5)}"


def packed(value: Any, what: str = "this value") -> bytes:
    """Anything that a client gave, as bytes; functions and classes of its script travel by value.

    Raises:
        StoreError: it cannot be pickled.
    """
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # whatever the value's own classes raise
        raise StoreError(
            f"{what} ({type(value).__name__}) cannot be pickled, so that no runner could get it: {type(error).__name__}: {error}. "
            "Give plain data, and open files, connections and locks in the agent"
        ) from error


unpacked = pickle.loads


@functools.lru_cache(maxsize=1024)
def config_of(text: str) -> RolloutConfig:
    return RolloutConfig(**json.loads(text))


@functools.lru_cache(maxsize=1024)
def config_text(config: RolloutConfig) -> str:
    values = config.model_dump(mode="json")
    return json.dumps(values | {"retry_condition": sorted(values["retry_condition"])})


def request_row(request: EnqueueRolloutRequest) -> Row:
    """`(rollout_id, input, mode, group_id, resources_id, config, metadata)`; the id is made here, so that a retry is recognised.

    Raises:
        StoreError: the input or the metadata cannot be pickled, or the id cannot be looked for.
    """
    if request.rollout_id and "\0" in request.rollout_id:
        raise StoreError(f"a rollout's id holds no zero character: {request.rollout_id!r}")
    return (
        request.rollout_id or new_id("ro"),
        packed(request.input, "the input"),
        request.mode,
        request.group_id,
        request.resources_id,
        config_text(request.config),
        packed(request.metadata, "the metadata"),
    )


def rollout_of(row: Row) -> Rollout:
    """A rollout with its latest attempt, from columns ROLLOUT_WITH_ATTEMPT."""
    rollout_id, status, mode, group_id, resources_id, start, end, config, metadata, task, version = row[
        :N_ROLLOUT
    ]
    return Rollout(
        rollout_id=rollout_id,
        status=status,
        mode=mode,
        group_id=group_id,
        resources_id=resources_id,
        start_time=start,
        end_time=end,
        config=config_of(config),
        metadata=unpacked(metadata),
        input=unpacked(task),
        resources_version=version,
        attempt=attempt_of(row[N_ROLLOUT:]) if row[N_ROLLOUT] is not None else None,
    )


def failure_text(failure: Failure) -> str:
    """As JSON; messages of exceptions may hold what is not Unicode, which pydantic would refuse."""
    return json.dumps(failure.model_dump())


def failure_of(text: str | None) -> Failure | None:
    return Failure(**json.loads(text)) if text else None


def attempt_of(row: Row) -> Attempt:
    """An attempt, from columns ATTEMPT."""
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
        failure=failure_of(failure),
        metadata=unpacked(metadata) if metadata is not None else None,
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
    """A span as columns SPAN.

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


def span_of(row: Row) -> Span:
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
    """A generation without its key's call id; tokens as 32-bit integers, log-probs in double precision."""
    return pickle.dumps(
        (
            call.model,
            array("i", call.prompt_ids).tobytes(),
            array("i", call.output_ids).tobytes(),
            array("d", call.logprobs).tobytes(),
            array("q", call.weight_versions).tobytes(),
            call.finish_reason,
            call.start_time,
            call.end_time,
            call.sampling,
            call.agent,
        ),
        protocol=5,
    )


def generation_of(call_id: str, rollout_id: str, attempt_id: str, data: bytes) -> Generation:
    model, prompt, output, logprobs, versions, reason, start, end, sampling, agent = pickle.loads(data)
    return Generation(
        key=CallKey(rollout_id, attempt_id, call_id),
        model=model,
        prompt_ids=_numbers("i", prompt),
        output_ids=_numbers("i", output),
        logprobs=_numbers("d", logprobs),
        weight_versions=_numbers("q", versions),
        finish_reason=reason,
        start_time=start,
        end_time=end,
        sampling=sampling,
        agent=agent,
    )


def _numbers(kind: str, data: bytes) -> list[Any]:
    numbers = array(kind)
    numbers.frombytes(data)
    return numbers.tolist()


def resources_of(row: Row) -> ResourcesUpdate:
    resources_id, version, created, updated, body = row
    return ResourcesUpdate(
        resources_id=resources_id,
        version=version,
        create_time=created,
        update_time=updated,
        resources=unpacked(body),
    )


def worker_of(row: Row) -> Worker:
    """A worker, from the columns of `Queries.workers`."""
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
