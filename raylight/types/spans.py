"""Spans in the data model of OpenTelemetry, each assigned to an attempt."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from raylight.errors import SpanError
from raylight.semconv import VIRTUAL
from raylight.types.json_object import JsonObject

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

AttributeValue = Any
"""A str, bool, int, float, or a sequence of one of these."""
Attributes = dict[str, AttributeValue]
StatusCode = Literal["UNSET", "OK", "ERROR"]
MAX_SEQUENCE_ID = 2**62
"""Exclusive upper limit of sequence ids; the numbers above are reserved for later spans."""
MAX_SPANS = 100_000
"""Maximum number of spans without a reward of one attempt. Further ones are dropped and counted."""
MAX_REWARD_SPANS = 10_000
"""Maximum number of spans with a reward of one attempt. An attempt with more fails, as their rewards are
lost."""


class ExtensibleModel(BaseModel):
    """Base class of spans and their parts: fields that other versions of OpenTelemetry add are kept."""

    model_config = ConfigDict(extra="allow")


class TraceStatus(ExtensibleModel):
    """Outcome of a span's operation."""

    status_code: StatusCode = "UNSET"
    description: str | None = None


class Event(ExtensibleModel):
    """An event at one moment of a span."""

    name: str
    attributes: Attributes = Field(default_factory=dict)
    timestamp: float | None = None


class SpanContext(ExtensibleModel):
    """Ids of a span, as hexadecimal text."""

    trace_id: str
    span_id: str
    is_remote: bool = False
    trace_state: dict[str, str] = Field(default_factory=dict)


class Link(ExtensibleModel):
    """A link from one span to another."""

    context: SpanContext
    attributes: Attributes | None = None


class OtelResource(ExtensibleModel):
    """Description of the process that produced a span."""

    attributes: Attributes = Field(default_factory=dict)
    schema_url: str = ""


class SpanCoreFields(BaseModel):
    """A span that is not yet assigned to an attempt."""

    name: str
    status: TraceStatus = Field(default_factory=lambda: TraceStatus(status_code="OK"))
    attributes: Attributes = Field(default_factory=dict)
    start_time: float | None = None
    end_time: float | None = None


class Span(ExtensibleModel):
    """One recorded operation or event of an attempt.

    Times are in seconds since the epoch. Ids are hexadecimal text, as in OpenTelemetry.
    """

    rollout_id: str = ""
    attempt_id: str = ""
    sequence_id: int = 0
    """Position within the attempt. 0: the store assigns the next number."""
    trace_id: str
    span_id: str
    """Unique id within the attempt. The store ignores a second span with the same id."""
    parent_id: str | None = None
    name: str
    status: TraceStatus = Field(default_factory=TraceStatus)
    attributes: Attributes = Field(default_factory=dict)
    events: list[Event] = Field(default_factory=list)
    links: list[Link] = Field(default_factory=list)
    start_time: float | None = None
    end_time: float | None = None
    resource: OtelResource = Field(default_factory=OtelResource)

    @property
    def context(self) -> SpanContext:
        """Ids of this span."""
        return SpanContext(trace_id=self.trace_id, span_id=self.span_id)

    @property
    def parent(self) -> SpanContext | None:
        """Ids of the parent span; None for a root span."""
        return SpanContext(trace_id=self.trace_id, span_id=self.parent_id) if self.parent_id else None

    @classmethod
    def from_attributes(cls, *, attributes: Attributes, name: str | None = None, **fields: Any) -> Self:
        """Create a span by hand. Missing ids are generated; other missing fields get their defaults."""
        defaults: dict[str, Any] = {
            "trace_id": secrets.token_hex(16),
            "span_id": secrets.token_hex(8),
            "status": TraceStatus(status_code="OK"),
        }
        fields = {key: value for key, value in fields.items() if value is not None}
        return cls(name=name or VIRTUAL, attributes=attributes, **(defaults | fields))

    @classmethod
    def from_core_fields(
        cls, core: SpanCoreFields, *, rollout_id: str = "", attempt_id: str = "", sequence_id: int = 0
    ) -> Self:
        """Assign core fields to an attempt."""
        now = time.time()
        return cls.from_attributes(
            attributes=core.attributes,
            name=core.name,
            status=core.status,
            start_time=core.start_time or now,
            end_time=core.end_time or core.start_time or now,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
        )

    @classmethod
    def from_opentelemetry(
        cls, src: ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int = 0
    ) -> Self:
        """Convert a span of the OpenTelemetry SDK, and assign it to an attempt.

        Raises:
            ValueError: the span has no context.
        """
        context = src.get_span_context()
        if context is None:
            raise ValueError(
                f"span {src.name!r} has no context, and so no id; start it with a tracer of a provider"
            )
        return cls(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            trace_id=f"{context.trace_id:032x}",
            span_id=f"{context.span_id:016x}",
            parent_id=f"{src.parent.span_id:016x}" if src.parent else None,
            name=src.name,
            status=TraceStatus(status_code=src.status.status_code.name, description=src.status.description),  # type: ignore[arg-type]
            attributes=plain_attributes(src.attributes),
            events=[
                Event(
                    name=event.name,
                    attributes=plain_attributes(event.attributes),
                    timestamp=seconds(event.timestamp),
                )
                for event in src.events
            ],
            links=[
                Link(
                    context=SpanContext(
                        trace_id=f"{link.context.trace_id:032x}",
                        span_id=f"{link.context.span_id:016x}",
                        is_remote=link.context.is_remote,
                        trace_state=dict(link.context.trace_state.items())
                        if link.context.trace_state
                        else {},
                    ),
                    attributes=plain_attributes(link.attributes) if link.attributes else None,
                )
                for link in src.links
            ],
            start_time=seconds(src.start_time),
            end_time=seconds(src.end_time),
            resource=_convert_resource(src.resource),
        )


_PARTS = ("status", "attributes", "events", "links", "resource")
"""Fields of a span that are neither text nor numbers."""


def span_json(span: Span) -> str:
    """Return the parts of a span that are not empty as JSON: status, attributes, events, links, resource, and
    further fields.

    Raises:
        SpanError: the store cannot hold the span: an attribute is not JSON, its name or an id is not valid
            Unicode, or its sequence id is out of range.
    """
    try:
        parts = {name: part for name in _PARTS if (part := _without_defaults(getattr(span, name)))}
        body = _ENCODER.encode(parts | (span.model_extra or {}))
        for text in (span.name, span.span_id, span.trace_id, span.parent_id or ""):
            if not text.isascii():
                text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SpanError(
            f"span {span.name!r} cannot be stored: {error}; an attribute is a string, a number, a bool or a "
            "list of these"
        ) from None
    if not 0 <= span.sequence_id < MAX_SEQUENCE_ID:
        raise SpanError(
            f"span {span.name!r} has the sequence id {span.sequence_id}; give a number from 1 to 2**62, or "
            "0 for the next one"
        )
    return body


def _without_defaults(part: object) -> Any:
    """Return the fields of a model that differ from their defaults; another value as it is."""
    return part.model_dump(exclude_defaults=True) if isinstance(part, BaseModel) else part


class _PartEncoder(json.JSONEncoder):
    """Encoder of the models and dataclasses within the parts of a span."""

    def default(self, value: Any) -> Any:
        if isinstance(value, BaseModel):
            return _without_defaults(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        return super().default(value)


_ENCODER = _PartEncoder()


_last_resource: tuple[Resource, OtelResource] | None = None


def _convert_resource(resource: Resource) -> OtelResource:
    """Convert a resource of OpenTelemetry; one conversion for all spans of a provider, which share it."""
    global _last_resource
    last = _last_resource  # another thread may replace it
    if last is None or last[0] is not resource:
        attributes = plain_attributes(resource.attributes)
        last = resource, OtelResource(attributes=attributes, schema_url=resource.schema_url or "")
        _last_resource = last
    return last[1]


SCALARS = frozenset({str, int, float, bool, type(None)})


def plain_attributes(attributes: Mapping[str, object] | None) -> Attributes:
    """Return a copy of attributes that JSON can represent.

    Bytes, which OpenTelemetry allows, become hexadecimal text, as they do in spans received over OTLP.
    """
    if not attributes:
        return {}
    return {key: value if type(value) in SCALARS else _plain(value) for key, value in attributes.items()}


def _plain(value: object) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple | list):  # fast path for long lists of numbers
        return value if SCALARS.issuperset(map(type, value)) else type(value)(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return plain_attributes(value)
    return value


def seconds(nanoseconds: int | None) -> float | None:
    """Convert nanoseconds to seconds."""
    return None if nanoseconds is None else nanoseconds / 1e9


class Triplet(BaseModel):
    """One call of a model: its prompt, its response, and the reward of the response."""

    prompt: Any
    """Usually `{"token_ids": [...]}`, with the raw messages if they are known, and the URLs of their images.
    `StoreClient.read_images` returns the files of `raylight-image:` URLs, by the digests after the colon."""
    response: Any
    reward: float | None = None
    metadata: JsonObject = Field(default_factory=dict)
