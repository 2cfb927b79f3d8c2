"""The OTLP/HTTP endpoint `/v1/traces`: spans from other processes and languages, in protobuf or JSON.

A span names its attempt by the resource attributes `agentlightning.rollout_id` and
`agentlightning.attempt_id`, or by span attributes of these names if its resource lacks them. The URL of an
attempt names it for all spans of the request. Spans are rejected one by one (OTLP's partial success) if they
cannot be read, name no attempt, or name one for which the store rejects them. The other spans are stored.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import json
import logging
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from raylight._utils.printable import encodable
from raylight.errors import (
    InvalidTransitionError,
    OtlpError,
    RewardError,
    SpanError,
    StoreLostError,
    UnknownIdError,
)
from raylight.semconv import ATTEMPT_ID, ROLLOUT_ID, SPAN_SEQUENCE_ID
from raylight.traces.reward_spans import has_reward
from raylight.types import (
    MAX_SEQUENCE_ID,
    Event,
    JsonObject,
    Link,
    OtelResource,
    Span,
    SpanContext,
    TraceStatus,
    span_json,
)

logger = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
MAX_BYTES = 4 * 2**20
"""Limit of a body in bytes, both compressed and decompressed. Parsing a body of empty spans takes about 80
times its size in memory."""
MAX_SPANS = 10_000
"""Maximum number of spans in a body. OpenTelemetry's exporters send at most 512 by default."""
MAX_COPIES = 16
"""Limit of the copies of resources, one per span, as a multiple of the limit of a body."""
SCOPES = ("scopeSpans", "scope_spans")
STATUS = {0: "UNSET", 1: "OK", 2: "ERROR"}
IS_REMOTE = 0x200
"""Bit of a link's flags: the linked span is in another process."""


def decode(
    body: bytes,
    content_type: str,
    content_encoding: str | None = None,
    max_bytes: int = MAX_BYTES,
    max_spans: int = MAX_SPANS,
) -> tuple[list[Span], list[str]]:
    """Decode an ExportTraceServiceRequest to spans, in the order sent, and one reason for each rejected span.

    Ids of rollout and attempt are "" if the body has none.

    Args:
        body: body of the request, possibly compressed.
        content_type: `application/x-protobuf` or `application/json`; parameters are ignored.
        content_encoding: None, `identity`, `gzip` or `deflate`.
        max_bytes: limit of the decompressed body, in bytes.
        max_spans: limit of the number of spans, including malformed ones.

    Raises:
        OtlpError: the body as a whole is malformed (400), too large (413), or of an unknown media type or
            content coding (415).
    """
    kind = media_type(content_type)
    data = _decompress(body, content_encoding, max_bytes)
    groups = _groups_of_protobuf(data) if kind == PROTOBUF else _groups_of_json(data)
    total = sum(group.count for group in groups)
    if total > max_spans:
        raise OtlpError(
            f"the body has {total} spans, and the limit is {max_spans}; send fewer spans at once", 413
        )
    if sum(group.shared.ByteSize() * group.count for group in groups) > MAX_COPIES * max_bytes:
        raise OtlpError(
            "the attributes of the resource are too large to copy to each of its spans; send fewer "
            "attributes or spans",
            413,
        )
    spans: list[Span] = []
    reasons: list[str] = []
    for group in groups:
        resource = OtelResource(
            attributes=_attributes(group.shared.resource.attributes), schema_url=group.shared.schema_url
        )
        for sent in itertools.chain(*group.scopes):
            try:
                span = _span(sent if isinstance(sent, ProtoSpan) else _span_of_json(sent), resource)
                span_json(span)
                has_reward(span)  # a reward that cannot be read is not stored in silence
                spans.append(span)
            except (OtlpError, SpanError, RewardError) as error:
                reasons.append(str(error))
    return spans, reasons


def media_type(content_type: str) -> str:
    """Return the media type of a content type, PROTOBUF or JSON.

    Raises:
        OtlpError: the media type is another one (415).
    """
    kind = content_type.split(";")[0].strip().lower()
    if kind not in (PROTOBUF, JSON):
        raise OtlpError(f"content type {content_type!r:.80} is not supported; send {PROTOBUF} or {JSON}", 415)
    return kind


def _decompress(body: bytes, content_encoding: str | None, max_bytes: int) -> bytes:
    """Decompress a body, without ever holding more than `max_bytes`."""
    coding = (content_encoding or "identity").strip().lower()
    if coding in ("", "identity"):
        data = body[: max_bytes + 1]
    elif coding in ("gzip", "x-gzip", "deflate"):
        data = _inflate(body, 31 if coding.endswith("gzip") else _deflate_window(body), max_bytes)
    else:
        raise OtlpError(
            f"content coding {content_encoding!r:.80} is not supported; send gzip, deflate or none", 415
        )
    if len(data) > max_bytes:
        raise OtlpError(
            f"the decompressed body is larger than {max_bytes} bytes; send fewer spans at once", 413
        )
    return data


def _inflate(body: bytes, window: int, max_bytes: int) -> bytes:
    decompressor = zlib.decompressobj(window)
    try:
        data = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise OtlpError(f"the body cannot be decompressed: {error}") from None
    if len(data) <= max_bytes and (not decompressor.eof or decompressor.unused_data):
        raise OtlpError("the compressed body is truncated or followed by other data")
    return data


def _deflate_window(body: bytes) -> int:
    """Return the zlib window of a deflate body. Some clients omit zlib's header (a multiple of 31)."""
    has_header = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS


@dataclass(frozen=True)
class _Group:
    """A resource with its spans: protobuf messages, or JSON objects that are still to be parsed one by
    one."""

    shared: ResourceSpans
    scopes: Sequence[Sequence[object]]

    @property
    def count(self) -> int:
        """Number of spans."""
        return sum(map(len, self.scopes))


def _groups_of_protobuf(data: bytes) -> list[_Group]:
    request = ExportTraceServiceRequest()
    try:
        request.ParseFromString(data)
    except Exception as error:  # parsers raise many types, and all mean a malformed body
        raise _malformed(error) from None
    groups = []
    for sent in request.resource_spans:
        if scopes := [scope.spans for scope in sent.scope_spans if scope.spans]:
            groups.append(_Group(ResourceSpans(resource=sent.resource, schema_url=sent.schema_url), scopes))
    return groups


def _groups_of_json(data: bytes) -> list[_Group]:
    try:
        document = json.loads(data)
        if not isinstance(document, dict):
            raise OtlpError("the body is JSON, but not an object")
        groups = []
        for sent in _members(document, "resourceSpans", "resource_spans"):
            scopes = [spans for scope in _members(sent, *SCOPES) if (spans := _listed(scope, "spans"))]
            if scopes:
                shared = {name: value for name, value in sent.items() if name not in SCOPES}
                parsed = json_format.ParseDict(shared, ResourceSpans(), ignore_unknown_fields=True)
                groups.append(_Group(parsed, scopes))
    except OtlpError:
        raise
    except Exception as error:  # as above
        raise _malformed(error) from None
    return groups


def _malformed(error: object) -> OtlpError:
    return OtlpError(f"the body is not an ExportTraceServiceRequest: {str(error)[:300]}")


def _members(holder: JsonObject, *names: str) -> list[JsonObject]:
    """Return a list of objects under one of several names."""
    members = _listed(holder, *names)
    if not all(isinstance(member, dict) for member in members):
        raise _malformed(f"{names[0]} has an entry that is not an object")
    return members


def _listed(holder: JsonObject, *names: str) -> list[Any]:
    """Return the list under one of several names; empty if there is none."""
    members: object = next((holder[name] for name in names if holder.get(name) is not None), [])
    if not isinstance(members, list):
        raise _malformed(f"{names[0]} is not a list")
    return members


def _span_of_json(raw: object) -> ProtoSpan:
    if not isinstance(raw, dict):
        raise OtlpError(f"{raw!r:.60} is not a span")
    _make_ids_base64(raw)
    try:
        return json_format.ParseDict(raw, ProtoSpan(), ignore_unknown_fields=True)
    except Exception as error:  # as above
        raise OtlpError(f"a span cannot be read: {str(error)[:300]}") from None


def _make_ids_base64(span: JsonObject) -> None:
    """Convert ids from hexadecimal, as in OTLP/JSON, to base64, as protobuf's JSON parser needs."""
    links = span.get("links")
    for holder in (
        span,
        *(link for link in (links if isinstance(links, list) else ()) if isinstance(link, dict)),
    ):
        for name in ("traceId", "trace_id", "spanId", "span_id", "parentSpanId", "parent_span_id"):
            if isinstance(holder.get(name), str):
                holder[name] = base64.b64encode(_unhex(holder[name], name)).decode()


def _unhex(text: str, name: str) -> bytes:
    try:
        return binascii.unhexlify(text)
    except ValueError:
        raise OtlpError(f"{name} {text!r:.60} is not hexadecimal") from None


def _span(span: ProtoSpan, resource: OtelResource) -> Span:
    own = _attributes(span.attributes)
    return Span(
        rollout_id=_text(resource.attributes.get(ROLLOUT_ID)) or _text(own.get(ROLLOUT_ID)),
        attempt_id=_text(resource.attributes.get(ATTEMPT_ID)) or _text(own.get(ATTEMPT_ID)),
        # the span's own number takes precedence, as a resource's is the same for all its spans
        sequence_id=_sequence_id(own.get(SPAN_SEQUENCE_ID, resource.attributes.get(SPAN_SEQUENCE_ID))),
        trace_id=_id(span.trace_id, 16, "trace_id", span.name),
        span_id=_id(span.span_id, 8, "span_id", span.name),
        parent_id=_id(span.parent_span_id, 8, "parent_span_id", span.name)
        if any(span.parent_span_id)
        else None,
        name=span.name,
        status=TraceStatus(
            status_code=STATUS.get(span.status.code, "UNSET"),  # type: ignore[arg-type]
            description=span.status.message or None,
        ),
        attributes=own,
        events=[
            Event(
                name=event.name,
                attributes=_attributes(event.attributes),
                timestamp=_seconds(event.time_unix_nano),
            )
            for event in span.events
        ],
        links=[_link(link, span.name) for link in span.links],
        start_time=_seconds(span.start_time_unix_nano),
        end_time=_seconds(span.end_time_unix_nano),
        resource=resource,
    )


def _link(link: ProtoSpan.Link, name: str) -> Link:
    states = (entry.partition("=") for entry in link.trace_state.split(",") if "=" in entry)
    context = SpanContext(
        trace_id=_id(link.trace_id, 16, "trace_id of a link", name),
        span_id=_id(link.span_id, 8, "span_id of a link", name),
        is_remote=bool(link.flags & IS_REMOTE),
        trace_state={key.strip(): value.strip() for key, _, value in states},
    )
    return Link(context=context, attributes=_attributes(link.attributes) or None)


def _id(value: bytes, size: int, field: str, name: str) -> str:
    if len(value) != size or not any(value):
        raise OtlpError(
            f"the {field} of span {name!r:.80} is {value.hex()[:64]!r}; it must have {size} bytes that are "
            "not all zero"
        )
    return value.hex()


def _seconds(nanoseconds: int) -> float | None:
    """Convert nanoseconds to seconds. OTLP writes an unknown time as 0."""
    return nanoseconds / 1e9 if nanoseconds else None


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _sequence_id(value: object) -> int:
    """Return a sequence number, or 0 (the store assigns the next one) if the value is missing or invalid."""
    if value is None or value == "":
        return 0
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if not 0 <= number < MAX_SEQUENCE_ID:
        logger.warning(
            "%s %.40r is not a number from 0 to 2**62; the store assigns another", SPAN_SEQUENCE_ID, value
        )
        return 0
    return number


def _attributes(pairs: Sequence[KeyValue]) -> JsonObject:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> object:
    """Convert to a plain value. Bytes become hexadecimal text, as in agent-lightning."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return getattr(value, kind)


READ_TIMEOUT_S = 30.0
"""Longest time in which a body arrives."""
MAX_DECODES = 2
"""Maximum number of bodies decoded concurrently. Each decode occupies a thread, which competes with the event
loop for the interpreter."""
CHUNK = 500
"""Maximum number of spans per call of the sink, so that a large body does not block its other work."""
RETRY_AFTER_S = 2
"""Seconds in the `Retry-After` header while the store is down."""

Sink = Callable[[list[Span]], Awaitable[object]]
"""Function that stores spans, normally `StoreClient.add_many_spans`.

It raises one of PERMANENT_ERRORS if it stored none of them, because one cannot be stored. Any other error
means that the store is down: the exporter is asked to retry, and spans that were stored are received again.
"""
PERMANENT_ERRORS = (UnknownIdError, SpanError, InvalidTransitionError)
"""Errors with which the store rejects spans permanently."""
Scope = Callable[[], tuple[str, str] | None]
"""Function that returns the (rollout id, attempt id) of the request's URL; None if the URL is the run's."""


def traces_route(
    sink: Sink,
    scope: Scope | None = None,
    max_bytes: int = MAX_BYTES,
    max_spans: int = MAX_SPANS,
) -> Route:
    """Return the route that receives spans.

    Responses follow OTLP/HTTP, in the encoding of the request: 200, with `partial_success` if spans were
    rejected; 4xx with a `google.rpc.Status` if the body cannot be read; 503 with `Retry-After` while the
    store is down. No other 5xx occurs.

    Args:
        sink: stores the spans.
        scope: returns the attempt of the request's URL.
        max_bytes: limit of a body, in bytes.
        max_spans: limit of the spans in a body.
    """

    decoding = asyncio.Semaphore(MAX_DECODES)

    async def traces(request: Request) -> Response:
        content_type = request.headers.get("content-type", "")
        kind = JSON
        try:
            kind = media_type(content_type)
            body = await _read(request, max_bytes)
            async with decoding:  # in a thread: decoding a large body would block the event loop
                coding = request.headers.get("content-encoding")
                spans, reasons = await asyncio.to_thread(
                    decode, body, content_type, coding, max_bytes, max_spans
                )
        except OtlpError as error:
            return _answer(Status(message=encodable(str(error))), kind, error.status)
        except ClientDisconnect:
            return Response(status_code=400)  # the client has gone, and does not read it
        total = len(spans) + len(reasons)
        spans, unassigned = _assign_attempts(spans, scope() if scope else None)
        reasons += unassigned
        try:
            for start in range(0, len(spans), CHUNK):
                reasons += await _store(sink, spans[start : start + CHUNK])
        except Exception as error:
            logger.warning(
                "%d spans could not be stored: %r",
                len(spans),
                error,
                exc_info=not isinstance(error, StoreLostError),
            )
            answer = Status(message="the store cannot store spans now; send them again")
            return _answer(answer, kind, 503, {"Retry-After": str(RETRY_AFTER_S)})
        return _answer(_outcome(reasons, total), kind)

    return Route("/v1/traces", traces, methods=["POST"])


async def _read(request: Request, max_bytes: int) -> bytes:
    """Read the body, up to the limit."""
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise OtlpError(
                        f"the body is larger than {max_bytes} bytes; send fewer spans at once", 413
                    )
    except TimeoutError:
        raise OtlpError(f"the body did not arrive within {READ_TIMEOUT_S:g} s; send it again", 408) from None
    return bytes(body)


def _assign_attempts(spans: list[Span], scope: tuple[str, str] | None) -> tuple[list[Span], list[str]]:
    """Return the spans that name an attempt or get the scope's, and the reasons for rejecting the others."""
    assigned, reasons = [], []
    default = scope or ("", "")
    for span in spans:
        named = (span.rollout_id or default[0], span.attempt_id or default[1])
        if scope and named != scope:
            reasons.append(
                f"it names attempt {named[1]:.80} of rollout {named[0]:.80}, but this URL belongs to another"
            )
        elif not all(named):
            reasons.append(f"it names no attempt; set the resource attributes {ROLLOUT_ID} and {ATTEMPT_ID}")
        else:
            span.rollout_id, span.attempt_id = named
            assigned.append(span)
    return assigned, reasons


async def _store(sink: Sink, spans: list[Span]) -> list[str]:
    """Pass spans to the sink. Return one reason for each rejected span."""
    if not spans:
        return []
    try:
        await sink(spans)
        return []
    except PERMANENT_ERRORS as error:
        by_attempt: dict[tuple[str, str], list[Span]] = {}
        for span in spans:
            by_attempt.setdefault((span.rollout_id, span.attempt_id), []).append(span)
        if len(by_attempt) == 1:
            return [str(error)] * len(spans)
    # one rejected attempt must not affect the others; the store ignores spans that it has already
    return [reason for group in by_attempt.values() for reason in await _store(sink, group)]


def _outcome(reasons: list[str], total: int) -> ExportTraceServiceResponse:
    """Return the response to a body that was read, with `partial_success` if spans were rejected."""
    response = ExportTraceServiceResponse()
    if reasons:
        summary = "; ".join(
            f"{count} of {total} spans: {reason:.300}" for reason, count in Counter(reasons).most_common(5)
        )
        logger.warning("rejected %s", summary)
        response.partial_success.rejected_spans = len(reasons)
        response.partial_success.error_message = encodable(summary)
    return response


def _answer(
    message: Message, kind: str, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    content = message.SerializeToString() if kind == PROTOBUF else json_format.MessageToJson(message).encode()
    return Response(content, status, headers, kind)
