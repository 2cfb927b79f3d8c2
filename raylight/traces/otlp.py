"""The OTLP/HTTP endpoint `/v1/traces`: spans from other processes and languages, in protobuf or in JSON.

A span names its attempt by the resource attributes `agentlightning.rollout_id` and
`agentlightning.attempt_id` or, where its resource lacks them, by span attributes of these names; an address
that is scoped to an attempt names it for all. Spans that cannot be read, that name no attempt, or one that
the store does not take, are rejected one by one (OTLP's partial success); the others are stored.
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

MAX_DECODES = 2
"""Bodies that a route decodes at once. Each takes a thread, and all of them share the interpreter with the
event loop."""
CHUNK = 500
"""Spans that the sink is given at once, so that a large body does not hold up what else it does."""
RETRY_AFTER_S = 2
"""What an exporter is told to wait while the store is down."""

Sink = Callable[[list[Span]], Awaitable[Sequence[str] | None]]
"""Stores spans. It returns a reason for each span that it did not take (None, or no reason: it took all), or
it raises one of REFUSALS, or anything else if it is down: then the exporter is told to try again, and spans
that were stored come again."""
REFUSALS = (UnknownIdError, SpanError, InvalidTransitionError)
"""Errors of the store by which it refuses spans for good."""
Scope = Callable[[], tuple[str, str] | None]
"""The (rollout id, attempt id) that the request's address and key are for; None for those of the whole
run."""


def traces_route(
    sink: Sink,
    scope: Scope | None = None,
    max_bytes: int = MAX_BYTES,
    max_spans: int = MAX_SPANS,
    path: str = "/v1/traces",
) -> Route:
    """The route that takes spans in.

    It answers as OTLP/HTTP has it, in the encoding of the request: 200, with `partial_success` if spans were
    rejected; 4xx with a `google.rpc.Status` for a body that cannot be read; 503 with `Retry-After` while the
    store is down, and nothing else above 500.
    """

    decoding = asyncio.Semaphore(MAX_DECODES)

    async def traces(request: Request) -> Response:
        content_type = request.headers.get("content-type", "")
        kind = JSON
        try:
            kind = media_type(content_type)
            body = await _read(request, max_bytes)
            async with decoding:  # a large body takes a while to decode, and the loop serves others
                coding = request.headers.get("content-encoding")
                spans, reasons = await asyncio.to_thread(
                    decode, body, content_type, coding, max_bytes, max_spans
                )
        except OtlpError as error:
            return _answer(Status(message=_utf8(str(error))), kind, error.status)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        total = len(spans) + len(reasons)
        spans, unkeyed = _key(spans, scope() if scope else None)
        reasons += unkeyed
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
            answer = Status(message="the store cannot take spans now; send them again")
            return _answer(answer, kind, 503, {"Retry-After": str(RETRY_AFTER_S)})
        return _answer(_outcome(reasons, total), kind)

    return Route(path, traces, methods=["POST"])


async def _read(request: Request, max_bytes: int) -> bytes:
    """The body, as long as it stays within the limit."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise OtlpError(f"the body is larger than {max_bytes} bytes; send fewer spans at once", 413)
    return bytes(body)


def _key(spans: list[Span], scope: tuple[str, str] | None) -> tuple[list[Span], list[str]]:
    """Spans that name an attempt, or are given the scope's, and why the others are rejected."""
    keyed, reasons = [], []
    for span in spans:
        named = (
            (span.rollout_id or scope[0], span.attempt_id or scope[1])
            if scope
            else (span.rollout_id, span.attempt_id)
        )
        if scope and named != scope:
            reasons.append(
                f"it names attempt {named[1]:.80} of rollout {named[0]:.80}, which this address is not for"
            )
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
    # one bad attempt must not cost the others their spans; those that are stored already come again and are
    # ignored
    return [reason for group in by_attempt.values() for reason in await _store(sink, group)]


def _outcome(reasons: list[str], total: int) -> ExportTraceServiceResponse:
    """The answer to a body that was read; `partial_success` stays unset if every span was taken."""
    response = ExportTraceServiceResponse()
    if reasons:
        told = "; ".join(
            f"{count} of {total} spans: {reason:.300}" for reason, count in Counter(reasons).most_common(5)
        )
        logger.warning("rejected %s", told)
        response.partial_success.rejected_spans = len(reasons)
        response.partial_success.error_message = _utf8(told)
    return response


def _answer(
    message: Message, kind: str, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    content = message.SerializeToString() if kind == PROTOBUF else json_format.MessageToJson(message).encode()
    return Response(content, status, headers, kind)


def _utf8(text: str) -> str:
    """Protobuf takes no lone surrogates, which a message about a broken body may quote."""
    return text.encode("utf-8", "replace").decode()
