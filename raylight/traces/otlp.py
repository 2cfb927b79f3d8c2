"""The OTLP/HTTP endpoint `/v1/traces`: spans from other processes and languages, in protobuf or in JSON.

A span names its attempt by the resource attributes `agentlightning.rollout_id` and `agentlightning.attempt_id` or, where its
resource lacks them, by span attributes of these names; an address that is scoped to an attempt names it for all. Spans that name
no attempt, or one that the store does not take, are rejected one by one (OTLP's partial success); the others are stored.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from raylight.errors import InvalidTransitionError, OtlpError, SpanError, StoreLostError, UnknownIdError
from raylight.semconv import ATTEMPT_ID, ROLLOUT_ID, SPAN_SEQUENCE_ID
from raylight.types import Event, Link, OtelResource, Span, SpanContext, TraceStatus

logger = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
MAX_BYTES = 16 * 2**20
"""Limit of a body, as sent and once more as unpacked. A body made of empty spans takes some 80 times its size to parse."""
RETRY_AFTER_S = 2
"""What an exporter is told to wait while the store is down."""
MAX_SEQUENCE_ID = 2**63 - 1
STATUS = {0: "UNSET", 1: "OK", 2: "ERROR"}
IS_REMOTE = 0x200
"""Bit of a link's flags: the span that it points to is in another process."""

Sink = Callable[[list[Span]], Awaitable[Sequence[str] | None]]
"""Stores spans. It returns a reason for each span that it did not take (None, or no reason: it took all), or it raises one of
REFUSALS, or anything else if it is down: then the exporter is told to try again, and spans that were stored come again."""
REFUSALS = (UnknownIdError, SpanError, InvalidTransitionError)
"""Errors of the store by which it refuses spans for good."""
Scope = Callable[[], tuple[str, str] | None]
"""The (rollout id, attempt id) that the request's address and key are for; None for those of the whole run."""


def decode(body: bytes, content_type: str, content_encoding: str | None = None, max_bytes: int = MAX_BYTES) -> list[Span]:
    """Spans of an ExportTraceServiceRequest, in the order sent. Ids of rollout and attempt are "" where the body has none.

    Args:
        body: as it came over the wire.
        content_type: `application/x-protobuf` or `application/json`; parameters are ignored.
        content_encoding: None, `identity`, `gzip` or `deflate`.
        max_bytes: limit of the unpacked body.

    Raises:
        OtlpError: the body is malformed (400), too large (413), or of an unknown type or coding (415).
    """
    kind = media_type(content_type)
    request = _parse(_unpack(body, content_encoding, max_bytes), kind)
    return [span for group in request.resource_spans for span in _spans_of(group)]


def media_type(content_type: str) -> str:
    """PROTOBUF or JSON.

    Raises:
        OtlpError: it is neither (415).
    """
    kind = content_type.split(";")[0].strip().lower()
    if kind not in (PROTOBUF, JSON):
        raise OtlpError(f"content type {content_type!r:.80} is not known; send {PROTOBUF} or {JSON}", 415)
    return kind


def traces_route(sink: Sink, scope: Scope | None = None, max_bytes: int = MAX_BYTES, path: str = "/v1/traces") -> Route:
    """The route that takes spans in.

    It answers as OTLP/HTTP has it, in the encoding of the request: 200, with `partial_success` if spans were rejected; 4xx with a
    `google.rpc.Status` for a body that cannot be read; 503 with `Retry-After` while the store is down, and nothing else above 500.
    """

    async def traces(request: Request) -> Response:
        content_type = request.headers.get("content-type", "")
        kind = JSON
        try:
            kind = media_type(content_type)
            body = await _read(request, max_bytes)
            # a large body takes a while to decode, and the loop serves others
            spans = await asyncio.to_thread(decode, body, content_type, request.headers.get("content-encoding"), max_bytes)
        except OtlpError as error:
            return _answer(Status(message=_utf8(str(error))), kind, error.status)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        keyed, reasons = _key(spans, scope() if scope else None)
        try:
            reasons += await _store(sink, keyed)
        except Exception as error:
            logger.warning("%d spans could not be stored: %r", len(keyed), error, exc_info=not isinstance(error, StoreLostError))
            answer = Status(message="the store cannot take spans now; send them again")
            return _answer(answer, kind, 503, {"Retry-After": str(RETRY_AFTER_S)})
        return _answer(_outcome(reasons, len(spans)), kind)

    return Route(path, traces, methods=["POST"])


async def _read(request: Request, max_bytes: int) -> bytes:
    """The body, as long as it stays within the limit."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise OtlpError(f"the body is larger than {max_bytes} bytes; send fewer spans at once", 413)
    return bytes(body)


def _unpack(body: bytes, content_encoding: str | None, max_bytes: int) -> bytes:
    """Undo the content coding, without ever holding more than `max_bytes`."""
    coding = (content_encoding or "identity").strip().lower()
    if coding in ("", "identity"):
        data = body[: max_bytes + 1]
    elif coding in ("gzip", "x-gzip", "deflate"):
        data = _inflate(body, 31 if coding.endswith("gzip") else _deflate_window(body), max_bytes)
    else:
        raise OtlpError(f"content coding {content_encoding!r:.80} is not known; send gzip, deflate or none", 415)
    if len(data) > max_bytes:
        raise OtlpError(f"the unpacked body is larger than {max_bytes} bytes; send fewer spans at once", 413)
    return data


def _inflate(body: bytes, window: int, max_bytes: int) -> bytes:
    unpacker = zlib.decompressobj(window)
    try:
        data = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise OtlpError(f"the body cannot be unpacked: {error}") from None
    if len(data) <= max_bytes and (not unpacker.eof or unpacker.unused_data):
        raise OtlpError("the packed body is cut off, or something follows it")
    return data


def _deflate_window(body: bytes) -> int:
    """HTTP's deflate has zlib's header (a multiple of 31); some clients leave it out."""
    has_header = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS


def _parse(data: bytes, kind: str) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    try:
        if kind == PROTOBUF:
            request.ParseFromString(data)
        else:
            document = json.loads(data)
            if not isinstance(document, dict):
                raise OtlpError("the body is JSON, but not an object")
            _make_ids_base64(document)
            json_format.ParseDict(document, request, ignore_unknown_fields=True)
    except OtlpError:
        raise
    except Exception as error:  # whatever a parser raises is the body's fault; there are many kinds
        raise OtlpError(f"the body is not an ExportTraceServiceRequest: {str(error)[:300]}") from None
    return request


def _make_ids_base64(document: dict[str, Any]) -> None:
    """OTLP/JSON writes ids in hex, where protobuf's own JSON has base64."""
    for group in _members(document, "resourceSpans", "resource_spans"):
        for scope in _members(group, "scopeSpans", "scope_spans"):
            for span in _members(scope, "spans"):
                for holder in (span, *_members(span, "links")):
                    for name in ("traceId", "trace_id", "spanId", "span_id", "parentSpanId", "parent_span_id"):
                        if isinstance(holder.get(name), str):
                            holder[name] = base64.b64encode(_unhex(holder[name], name)).decode()


def _members(holder: dict[str, Any], *names: str) -> Iterator[dict[str, Any]]:
    """Objects of a list; what is no such list is left for the parser to complain about."""
    for name in names:
        if isinstance(found := holder.get(name), list):
            yield from (member for member in found if isinstance(member, dict))


def _unhex(text: str, name: str) -> bytes:
    try:
        return binascii.unhexlify(text)
    except ValueError:
        raise OtlpError(f"{name} {text!r:.60} is not hexadecimal") from None


def _spans_of(group: ResourceSpans) -> Iterator[Span]:
    shared = OtelResource(attributes=_attributes(group.resource.attributes), schema_url=group.schema_url)
    for scope in group.scope_spans:
        for span in scope.spans:
            yield _span(span, shared)


def _span(span: ProtoSpan, resource: OtelResource) -> Span:
    own = _attributes(span.attributes)
    return Span(
        rollout_id=_text(resource.attributes.get(ROLLOUT_ID)) or _text(own.get(ROLLOUT_ID)),
        attempt_id=_text(resource.attributes.get(ATTEMPT_ID)) or _text(own.get(ATTEMPT_ID)),
        # one number for all spans of a resource says little, so that a span's own goes first
        sequence_id=_sequence_id(own.get(SPAN_SEQUENCE_ID, resource.attributes.get(SPAN_SEQUENCE_ID))),
        trace_id=_id(span.trace_id, 16, "trace_id", span.name),
        span_id=_id(span.span_id, 8, "span_id", span.name),
        parent_id=_id(span.parent_span_id, 8, "parent_span_id", span.name) if any(span.parent_span_id) else None,
        name=span.name,
        status=TraceStatus(
            status_code=STATUS.get(span.status.code, "UNSET"),  # type: ignore[arg-type]
            description=span.status.message or None,
        ),
        attributes=own,
        events=[
            Event(name=event.name, attributes=_attributes(event.attributes), timestamp=_seconds(event.time_unix_nano))
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


def _id(value: bytes, size: int, what: str, name: str) -> str:
    if len(value) != size or not any(value):
        raise OtlpError(f"the {what} of span {name!r:.80} is {value.hex()[:64]!r}; it takes {size} bytes that are not all zero")
    return value.hex()


def _seconds(nanoseconds: int) -> float | None:
    """OTLP writes a time that is not known as 0."""
    return nanoseconds / 1e9 if nanoseconds else None


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _sequence_id(value: Any) -> int:
    """A sequence number, or 0 (the store gives the next one) if there is none that can be used."""
    if value is None or value == "":
        return 0
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if not 0 <= number <= MAX_SEQUENCE_ID:
        logger.warning("%s %r is not a number from 0 to %d; the store gives another", SPAN_SEQUENCE_ID, value, MAX_SEQUENCE_ID)
        return 0
    return number


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    """A plain value; bytes become hex, as in agent-lightning."""
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


def _key(spans: list[Span], scope: tuple[str, str] | None) -> tuple[list[Span], list[str]]:
    """Spans that name an attempt, or are given the scope's, and why the others are rejected."""
    keyed, reasons = [], []
    for span in spans:
        named = (span.rollout_id or scope[0], span.attempt_id or scope[1]) if scope else (span.rollout_id, span.attempt_id)
        if scope and named != scope:
            reasons.append(f"it names attempt {named[1]:.80} of rollout {named[0]:.80}, which this address is not for")
        elif not all(named):
            reasons.append(f"it names no attempt; set the resource attributes {ROLLOUT_ID} and {ATTEMPT_ID}")
        else:
            span.rollout_id, span.attempt_id = named
            keyed.append(span)
    return keyed, reasons


async def _store(sink: Sink, spans: list[Span]) -> list[str]:
    """Hand spans to the sink; returns a reason for each that it refused."""
    if not spans:
        return []
    try:
        return list(await sink(spans) or ())
    except REFUSALS as error:
        by_attempt: dict[tuple[str, str], list[Span]] = {}
        for span in spans:
            by_attempt.setdefault((span.rollout_id, span.attempt_id), []).append(span)
        if len(by_attempt) == 1:
            return [str(error)] * len(spans)
    # one bad attempt must not cost the others their spans; those that are stored already come again and are ignored
    return [reason for group in by_attempt.values() for reason in await _store(sink, group)]


def _outcome(reasons: list[str], total: int) -> ExportTraceServiceResponse:
    """The answer to a body that was read; `partial_success` stays unset if every span was taken."""
    response = ExportTraceServiceResponse()
    if reasons:
        told = "; ".join(f"{count} of {total} spans: {reason:.300}" for reason, count in Counter(reasons).most_common(5))
        logger.warning("rejected %s", told)
        response.partial_success.rejected_spans = len(reasons)
        response.partial_success.error_message = _utf8(told)
    return response


def _answer(message: Message, kind: str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    content = message.SerializeToString() if kind == PROTOBUF else json_format.MessageToJson(message).encode()
    return Response(content, status, headers, kind)


def _utf8(text: str) -> str:
    """Protobuf takes no lone surrogates, which a message about a broken body may quote."""
    return text.encode("utf-8", "replace").decode()
