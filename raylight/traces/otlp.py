"""The OTLP/HTTP endpoint `/v1/traces`: spans from other processes and languages, in protobuf or JSON.

A span names its attempt by the resource attributes `agentlightning.rollout_id` and
`agentlightning.attempt_id`, or by span attributes of these names if its resource lacks them. The URL of an
attempt names it for all spans of the request. Spans are rejected one by one (OTLP's partial success) if they
cannot be read, name no attempt, or name one for which the store rejects them. The other spans are stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from raylight.errors import InvalidTransitionError, OtlpError, SpanError, StoreLostError, UnknownIdError
from raylight.semconv import ATTEMPT_ID, ROLLOUT_ID
from raylight.traces.otlp_body import JSON, MAX_BYTES, MAX_SPANS, PROTOBUF, decode, media_type
from raylight.types import Span

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 30.0
"""Longest time in which a body arrives."""
MAX_DECODES = 2
"""Maximum number of bodies decoded concurrently. Each decode occupies a thread, which competes with the event
loop for the interpreter."""
CHUNK = 500
"""Maximum number of spans per call of the sink, so that a large body does not block its other work."""
RETRY_AFTER_S = 2
"""Seconds in the `Retry-After` header while the store is down."""

Sink = Callable[[list[Span]], Awaitable[Sequence[str] | None]]
"""Function that stores spans.

It returns one reason per rejected span (None or nothing: all were stored), or raises one of PERMANENT_ERRORS.
Any other error means that the store is down: the exporter is asked to retry, and spans that were stored are
received again.
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
    path: str = "/v1/traces",
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
        path: path of the route.
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
            return _answer(Status(message=_utf8(str(error))), kind, error.status)
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

    return Route(path, traces, methods=["POST"])


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
    for span in spans:
        named = (
            (span.rollout_id or scope[0], span.attempt_id or scope[1])
            if scope
            else (span.rollout_id, span.attempt_id)
        )
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
        return list(await sink(spans) or ())
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
        response.partial_success.error_message = _utf8(summary)
    return response


def _answer(
    message: Message, kind: str, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    content = message.SerializeToString() if kind == PROTOBUF else json_format.MessageToJson(message).encode()
    return Response(content, status, headers, kind)


def _utf8(text: str) -> str:
    """Replace lone surrogates, which a message may quote from a malformed body and protobuf rejects."""
    return text.encode("utf-8", "replace").decode()
