"""Conversion between the types of a client and the rows of the journal.

The store never interprets what users pass (inputs, metadata, resources, tokens). Clients write and read it as
bytes, so that the store needs none of the users' modules and spends no time on their data.
"""

from __future__ import annotations

import functools
import json
import operator
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from raylight.errors import SpanError, StoreError
from raylight.semconv import AGENT_REWARD, GRADE_SPAN_ID, REWARD_AGENT, REWARD_PREFIX
from raylight.store.payloads import decode_json, decode_payload, encode_payload, json_text
from raylight.traces.reward_spans import get_any_rewards
from raylight.types import (
    Attempt,
    AttemptedRollout,
    Attributes,
    EnqueueRolloutRequest,
    Failure,
    JsonObject,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutState,
    Span,
    StepGroups,
    Worker,
    span_json,
)

Row = tuple[Any, ...]

ATTEMPT = (
    "attempt_id, rollout_id, sequence_id, status, worker_id, start_time, end_time, last_heartbeat_time, "
    "failure, metadata"
)
ROLLOUT = "rollout_id, status, mode, group_id, resources_id, start_time, end_time"
SPAN = (
    "rollout_id, attempt_id, sequence_id, trace_id, span_id, parent_id, name, start_time, end_time, "
    "reward, base, body"
)
"""Columns of a span. `base` is NULL for the spans of agents. For the span of a captured call it is the id of
the span whose texts this one continues, or "" if its texts are complete."""
SPAN_FIELDS = SPAN.split(", ")[:9]
"""Columns that are fields of `Span`."""
_plain_fields = operator.attrgetter(*SPAN_FIELDS)
ATTEMPT_ID, SPAN_ID, REWARD, BASE = map(SPAN.split(", ").index, ("attempt_id", "span_id", "reward", "base"))
"""Positions of columns in SPAN."""
RESOURCES = "resources_id, version, create_time, update_time, body"
ROLLOUT_STATE = ", ".join(
    [f"r.{name}" for name in ROLLOUT.split(", ")]
    + ["(SELECT version FROM resources WHERE resources_id = r.resources_id)"]
    + [f"a.{name}" for name in ATTEMPT.split(", ")]
)
"""Columns of a rollout and its latest attempt, without what may be large."""
ROLLOUT_WITH_INPUT = f"{ROLLOUT_STATE}, r.config, r.metadata, r.input"
LATEST = "rollouts r LEFT JOIN attempts a ON a.rollout_id = r.rollout_id AND a.sequence_id = r.n_attempts"
"""SQL table of the rollouts with their latest attempts."""
REWARD_SPAN = (
    f"COALESCE((SELECT rowid FROM spans WHERE attempt_id = a.attempt_id AND span_id = '{GRADE_SPAN_ID}'), "
    "(SELECT rowid FROM spans WHERE attempt_id = a.attempt_id AND reward IS NOT NULL AND name != "
    f"'{AGENT_REWARD}' ORDER BY sequence_id DESC LIMIT 1))"
)
"""SQL expression of an attempt `a`: the row of its grade, which may have no reward, or of its last reward."""
N_ROLLOUT = len(ROLLOUT.split(", ")) + 1
"""Number of the columns of ROLLOUT_STATE that belong to the rollout."""
N_STATE = N_ROLLOUT + len(ATTEMPT.split(", "))
ROLLOUT_METADATA = "rollout_metadata"
"""Key, among the values of an attempt that ends, of the metadata that its rollout gets if it is decided."""


def new_id(prefix: str) -> str:
    """Return a new id.

    Ids begin with the time, so that a large journal appends to its indexes instead of writing all over them.
    """
    return f"{prefix}-{time.time_ns() // 1_000_000:011x}{secrets.token_hex(5)}"


@functools.lru_cache(maxsize=1024)
def config_from_json(text: str) -> RolloutConfig:
    """Parse a rollout's config."""
    return RolloutConfig(**decode_json(text))


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


def state_from_row(row: Row) -> RolloutState:
    """Status of a rollout, from columns ROLLOUT_STATE."""
    return RolloutState(**_state_fields(row))


def step_groups_from_json(text: str) -> StepGroups:
    """Groups of a training step, from their JSON in the table."""
    return StepGroups(*map(tuple, decode_json(text)))


def rollout_from_row(row: Row) -> Rollout:
    """Rollout, with its latest attempt if it has one, from columns ROLLOUT_WITH_INPUT."""
    config, metadata, task = row[N_STATE:]
    return _rollout(
        row,
        config=config_from_json(config),
        metadata=decode_payload(metadata),
        input=decode_payload(task),
    )


def requested_rollout(request: EnqueueRolloutRequest, row: Row) -> Rollout:
    """Rollout, from the request that added it and columns ROLLOUT_STATE."""
    return _rollout(row, config=request.config, metadata=request.metadata, input=request.input)


def _rollout(row: Row, **rest: Any) -> Rollout:
    return (Rollout if row[N_ROLLOUT] is None else AttemptedRollout)(**_state_fields(row), **rest)


def _state_fields(row: Row) -> JsonObject:
    fields = dict(zip((*ROLLOUT.split(", "), "resources_version"), row, strict=False))
    return fields | {"attempt": None if row[N_ROLLOUT] is None else attempt_from_row(row[N_ROLLOUT:N_STATE])}


def failure_json(failure: Failure) -> str:
    """A failure as JSON.

    Error messages may hold characters that are not Unicode, which pydantic's own JSON refuses.
    """
    return json.dumps(failure.model_dump())


def failure_from_json(text: str | None) -> Failure | None:
    """Parse a failure; None for None."""
    return Failure(**decode_json(text)) if text else None


def attempt_from_row(row: Row) -> Attempt:
    """Attempt, from columns ATTEMPT."""
    *plain, failure, metadata = row
    return Attempt(
        **dict(zip(ATTEMPT.split(", "), plain, strict=False)),
        failure=failure_from_json(failure),
        metadata=decode_payload(metadata) if metadata is not None else None,
    )


def span_row(span: Span) -> Row:
    """Columns SPAN of a span that an agent recorded.

    Raises:
        SpanError: the span cannot be stored (see `span_json`).
    """
    rewards = get_any_rewards(span)
    return (*_plain_fields(span), rewards[0].value if rewards else None, None, span_json(span))


def call_span_row(
    span: Span, attributes: Attributes, base: str = "", shared: dict[str, int] | None = None
) -> Row:
    """Columns SPAN of a captured call's span, which has attributes alone.

    Args:
        attributes: the span's, without what it shares with the base.
        base: see SPAN.
        shared: number of characters that an attribute shares with the base's.

    Raises:
        SpanError: the span cannot be stored.
    """
    body = {"status": {"status_code": span.status.status_code}, "attributes": attributes}
    try:
        text = json_text([shared, body] if base else body)
        "".join((span.name, span.span_id, span.trace_id, span.parent_id or "")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SpanError(f"the span of the call {span.trace_id!r} cannot be stored: {error}") from None
    return (*_plain_fields(span), None, base, text)


def spans_from_rows(rows: Sequence[Row], bases: Sequence[Row] = ()) -> list[Span]:
    """Spans, from columns SPAN.

    Args:
        bases: rows that are bases of these rows or of one another, as far as they are not among them.
    """
    texts = SharedTexts((*bases, *rows))
    return [_span_from_row(row, texts.body(row)) for row in rows]


def _span_from_row(row: Row, body: JsonObject) -> Span:
    attributes = body.get("attributes", {})
    if row[REWARD] is None and REWARD_AGENT in attributes:  # it came after the attempt was decided
        kept = {
            key: attributes[key] for key in attributes if not key.startswith((REWARD_PREFIX, REWARD_AGENT))
        }
        body = body | {"attributes": kept}
    return Span(**dict(zip(SPAN_FIELDS, row, strict=False)), **body)


class SharedTexts:
    """Attributes of spans that begin with other spans' attributes.

    Args:
        rows: columns SPAN of all spans, and of their bases.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {(row[ATTEMPT_ID], row[SPAN_ID]): row for row in rows}
        self._parsed: dict[tuple[str, str], tuple[dict[str, int], JsonObject]] = {}
        self._complete: dict[tuple[str, str], JsonObject] = {}

    def body(self, row: Row) -> JsonObject:
        """Fields of a span that have no column, with complete attributes."""
        span_id = (row[ATTEMPT_ID], row[SPAN_ID])
        if span_id not in self._complete:
            shared, body = self._parse(span_id)
            attributes = body.get("attributes", {})
            for name, length in shared.items():
                attributes[name] = self._first((row[ATTEMPT_ID], row[BASE]), name, length) + attributes[name]
            self._complete[span_id] = body
        return self._complete[span_id]

    def _first(self, span_id: tuple[str, str], name: str, length: int) -> str:
        """The first characters of an attribute."""
        parts: list[str] = []
        while length > 0:
            shared, body = self._parse(span_id)
            inherited = 0 if span_id in self._complete else shared.get(name, 0)
            if length > inherited:
                parts.append(body["attributes"][name][: length - inherited])
            span_id, length = (span_id[0], self._rows[span_id][BASE]), min(length, inherited)
        return "".join(reversed(parts))

    def _parse(self, span_id: tuple[str, str]) -> tuple[dict[str, int], JsonObject]:
        """Numbers of shared characters, and the body as it is stored."""
        if span_id not in self._parsed:
            if (row := self._rows.get(span_id)) is None:
                raise StoreError(
                    f"the store's file is damaged: it lacks the span {span_id[1]!r}, which another span "
                    "continues; use a copy of the file"
                )
            parsed = decode_json(row[-1])
            self._parsed[span_id] = (parsed[0], parsed[1]) if row[BASE] else ({}, parsed)
        return self._parsed[span_id]


def resources_from_row(row: Row) -> ResourcesUpdate:
    """Version of the named resources, from columns RESOURCES."""
    *plain, body = row
    fields = dict(zip(RESOURCES.split(", "), plain, strict=False))
    return ResourcesUpdate(**fields, resources=decode_payload(body))


def stats_json(stats: JsonObject | None) -> str | None:
    """A worker's statistics as JSON.

    Raises:
        StoreError: JSON cannot represent them.
    """
    try:
        return None if stats is None else json.dumps(stats)
    except (TypeError, ValueError) as error:
        raise StoreError(f"heartbeat_stats must be JSON: {error}") from None


def worker_from_row(row: Row) -> Worker:
    """Worker, from columns of WORKERS, which are its fields in their order."""
    fields = dict(zip(Worker.model_fields, row, strict=True))
    stats = fields["heartbeat_stats"]
    return Worker(**fields | {"heartbeat_stats": decode_json(stats) if stats else None})
