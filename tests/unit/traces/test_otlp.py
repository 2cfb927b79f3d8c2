"""The OTLP/HTTP endpoint: accepted and rejected bodies, and a real exporter."""

import asyncio
import base64
import contextlib
import gzip
import json
import logging
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from google.protobuf import json_format
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, StatusCode, TraceFlags
from opentelemetry.trace import Status as SdkStatus
from scripted_models import listening
from starlette.applications import Starlette
from starlette.testclient import TestClient
from unit_helpers import make_rollout, until

from raylight.errors import (
    InvalidTransitionError,
    OtlpError,
    SpanError,
    StoreError,
    StoreLostError,
    UnknownIdError,
)
from raylight.semconv import ATTEMPT_ID, ROLLOUT_ID, SPAN_SEQUENCE_ID
from raylight.traces import otlp
from raylight.traces.otlp import JSON, PROTOBUF, _make_ids_base64, traces_route
from raylight.traces.otlp import decode as decode_all
from raylight.traces.tracer import OtelTracer
from raylight.types import Span

TRACE, SPAN, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"


def attributes(**values: Any) -> list[dict[str, Any]]:
    return [{"key": key, "value": value} for key, value in values.items()]


def keys(rollout: str | None = "r", attempt: str | None = "a", sequence: Any = None) -> list[dict[str, Any]]:
    named = {ROLLOUT_ID: rollout, ATTEMPT_ID: attempt, SPAN_SEQUENCE_ID: sequence}
    return [
        {"key": key, "value": {"stringValue": value}} for key, value in named.items() if value is not None
    ]


def span_json(**changes: Any) -> dict[str, Any]:
    return {"traceId": TRACE, "spanId": SPAN, "name": "call"} | changes


def document(*spans: dict[str, Any], resource: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    attributes = keys() if resource is None else resource
    return {"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": [{"spans": spans}]}]}


def as_json(*spans: dict[str, Any], resource: list[dict[str, Any]] | None = None) -> bytes:
    return json.dumps(document(*spans, resource=resource)).encode()


def as_protobuf(*spans: dict[str, Any], resource: list[dict[str, Any]] | None = None) -> bytes:
    built = json.loads(as_json(*spans, resource=resource))
    for span in built["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        _make_ids_base64(span)
    request = json_format.ParseDict(built, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    return request.SerializeToString()


def decode(*arguments: Any, **settings: Any) -> list[Span]:
    """Decode a body in which every span is valid."""
    spans, reasons = decode_all(*arguments, **settings)
    assert reasons == []
    return spans


# ---- reading


FULL = span_json(
    parentSpanId=PARENT,
    startTimeUnixNano="1544712660300000000",
    endTimeUnixNano=1544712661300000000,
    attributes=attributes(
        s={"stringValue": "x"},
        i={"intValue": "9007199254740993"},
        j={"intValue": 7},
        d={"doubleValue": 0.5},
        b={"boolValue": False},
        raw={"bytesValue": base64.b64encode(b"\xff\x00").decode()},
        many={"arrayValue": {"values": [{"intValue": "1"}, {"stringValue": "2"}]}},
        nested={"kvlistValue": {"values": attributes(traceId={"stringValue": "not hex"})}},
        none={},
    ),
    events=[{"name": "e", "timeUnixNano": "1000000000", "attributes": attributes(k={"boolValue": True})}],
    links=[{"traceId": TRACE, "spanId": PARENT, "traceState": "a=1, b=2", "flags": 0x300}],
    status={"code": 2, "message": "bad"},
    kind=3,
    unknownField={"of": "a later version"},
)


@pytest.mark.parametrize(("encode", "kind"), [(as_json, JSON), (as_protobuf, PROTOBUF)])
def test_everything_of_a_span(encode: Callable[..., bytes], kind: str) -> None:
    (span,) = decode(encode(FULL), f"{kind}; charset=utf-8")
    assert (span.rollout_id, span.attempt_id, span.sequence_id) == ("r", "a", 0)
    assert (span.trace_id, span.span_id, span.parent_id, span.name) == (TRACE, SPAN, PARENT, "call")
    assert (span.start_time, span.end_time) == (1544712660.3, 1544712661.3)
    assert span.attributes == {
        "s": "x",
        "i": 9007199254740993,
        "j": 7,
        "d": 0.5,
        "b": False,
        "raw": "ff00",
        "many": [1, "2"],
        "nested": {"traceId": "not hex"},
        "none": None,
    }
    assert span.status.model_dump() == {"status_code": "ERROR", "description": "bad"}
    assert span.events[0].model_dump() == {"name": "e", "attributes": {"k": True}, "timestamp": 1.0}
    context = span.links[0].context
    assert (context.trace_id, context.span_id, context.is_remote) == (TRACE, PARENT, True)
    assert context.trace_state == {"a": "1", "b": "2"}
    assert span.links[0].attributes is None
    assert span.resource.attributes == {ROLLOUT_ID: "r", ATTEMPT_ID: "a"}


def test_what_is_not_there_is_empty() -> None:
    (span,) = decode(as_json(span_json(parentSpanId="", startTimeUnixNano="0")), JSON)
    assert (span.parent_id, span.start_time, span.end_time) == (None, None, None)
    assert (span.events, span.links) == ([], [])
    assert span.status.model_dump() == {"status_code": "UNSET", "description": None}


def test_snake_case_and_names_of_enums_are_read_too() -> None:
    snake = {
        "trace_id": TRACE.upper(),
        "span_id": SPAN,
        "parent_span_id": PARENT,
        "name": "n",
        "start_time_unix_nano": "5",
        "status": {"code": "STATUS_CODE_OK"},
        "kind": "SPAN_KIND_CLIENT",
    }
    resource = {"attributes": [{"key": ROLLOUT_ID, "value": {"string_value": "r"}}]}
    body = {"resource_spans": [{"resource": resource, "scope_spans": [{"spans": [snake]}]}]}
    (span,) = decode(json.dumps(body).encode(), JSON)
    assert (span.rollout_id, span.trace_id, span.parent_id) == ("r", TRACE, PARENT)
    assert span.status.status_code == "OK"


@pytest.mark.parametrize(
    ("resource", "own", "found"),
    [
        (keys("r", "a", "7"), [], ("r", "a", 7)),
        ([], keys("r", "a", "7"), ("r", "a", 7)),
        (keys("r", None), keys(None, "a"), ("r", "a", 0)),
        (keys("r", "a", "1"), keys("x", "y", "2"), ("r", "a", 2)),
        (keys("", "", ""), keys("r", "a", ""), ("r", "a", 0)),
        ([], [], ("", "", 0)),
        (keys("r", "a", "-1"), [], ("r", "a", 0)),
        (keys("r", "a", "many"), [], ("r", "a", 0)),
        (keys("r", "a", str(2**62)), [], ("r", "a", 0)),
        (keys("r", "a", str(2**63)), [], ("r", "a", 0)),
        (keys("r", "a", str(2**62 - 1)), [], ("r", "a", 2**62 - 1)),
        (
            attributes(**{ROLLOUT_ID: {"intValue": "5"}, SPAN_SEQUENCE_ID: {"intValue": "9"}}),
            [],
            ("5", "", 9),
        ),
    ],
)
def test_where_the_ids_come_from(resource: list[Any], own: list[Any], found: tuple[str, str, int]) -> None:
    (span,) = decode(as_json(span_json(attributes=own), resource=resource), JSON)
    assert (span.rollout_id, span.attempt_id, span.sequence_id) == found


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip", "deflate", "raw deflate", "identity", "", None])
def test_codings(coding: str | None) -> None:
    body = as_protobuf(span_json())
    raw = zlib.compressobj(wbits=-15)
    packed = {
        "gzip": gzip.compress(body),
        "x-gzip": gzip.compress(body),
        "deflate": zlib.compress(body),
        "raw deflate": raw.compress(body) + raw.flush(),
    }.get((coding or "").lower(), body)
    assert len(decode(packed, PROTOBUF, coding and coding.removeprefix("raw "))) == 1


@pytest.mark.parametrize(
    ("body", "kind", "coding", "status", "message"),
    [
        (b"{}", "text/plain", None, 415, "content type 'text/plain'"),
        (b"{}", "", None, 415, "content type"),
        (b"{}", JSON, "br", 415, "content coding 'br'"),
        (b"{}", JSON, "gzip, gzip", 415, "content coding"),
        (b"not gzip", JSON, "gzip", 400, "decompressed"),
        (gzip.compress(b"{}", mtime=0)[:-4], JSON, "gzip", 400, "truncated"),
        (gzip.compress(b"{}", mtime=0) + b"more", JSON, "gzip", 400, "followed by other data"),
        (b"", JSON, "gzip", 400, "truncated"),
        (b"\x0a\xff", PROTOBUF, None, 400, "ExportTraceServiceRequest"),
        (b"", JSON, None, 400, "ExportTraceServiceRequest"),
        (b"[]", JSON, None, 400, "not an object"),
        (b"[" * 100_000, JSON, None, 400, "ExportTraceServiceRequest"),
        (b'{"resourceSpans": 3}', JSON, None, 400, "ExportTraceServiceRequest"),
        (b'{"resourceSpans": [3]}', JSON, None, 400, "resourceSpans has an entry that is not an object"),
        (b'{"resourceSpans": [{"scopeSpans": {}}]}', JSON, None, 400, "scopeSpans is not a list"),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": "x"}]}]}', JSON, None, 400, "spans is not a list"),
        (
            b'{"resourceSpans": [{"resource": 3, "scopeSpans": [{"spans": [{}]}]}]}',
            JSON,
            None,
            400,
            "Request",
        ),
    ],
)
def test_what_cannot_be_read(body: bytes, kind: str, coding: str | None, status: int, message: str) -> None:
    with pytest.raises(OtlpError, match=message) as caught:
        decode(body, kind, coding)
    assert caught.value.status == status


BAD_SPANS = [
    ({"name": 3}, "a span cannot be read"),
    ({"name": "\ud800"}, "a span cannot be read"),
    ({"traceId": "xyz"}, "traceId 'xyz' is not hexadecimal"),
    ({"traceId": 5}, "a span cannot be read"),
    ({"traceId": ""}, "trace_id of span 'call'"),
    ({"traceId": "0" * 32}, "trace_id of span 'call'"),
    ({"spanId": "0" * 16}, "span_id of span 'call'"),
    ({"parentSpanId": "ab"}, "parent_span_id"),
    ({"links": [{"traceId": TRACE}]}, "span_id of a link"),
]


@pytest.mark.parametrize(("change", "message"), BAD_SPANS)
def test_a_bad_span_costs_none_of_the_others(change: dict[str, Any], message: str) -> None:
    body = as_json(span_json(spanId="1" * 16), span_json(**change), span_json(spanId="2" * 16))
    spans, reasons = decode_all(body, JSON)
    assert [span.span_id[0] for span in spans] == ["1", "2"]
    assert len(reasons) == 1
    assert message in reasons[0]


def test_a_bad_span_of_protobuf_costs_none_of_the_others() -> None:
    body = as_protobuf(span_json(traceId="0" * 32), span_json(spanId="ab"), span_json())
    spans, reasons = decode_all(body, PROTOBUF)
    assert [span.span_id for span in spans] == [SPAN]
    assert [reason.partition(" of span")[0] for reason in reasons] == ["the trace_id", "the span_id"]


@pytest.mark.parametrize("sent", [3, None, "x", [], [{}]])
def test_what_is_no_span_costs_none_of_the_others(sent: Any) -> None:
    spans, reasons = decode_all(as_json(span_json(), sent), JSON)
    assert (len(spans), len(reasons)) == (1, 1)
    assert "is not a span" in reasons[0]


def test_a_span_that_the_store_would_refuse_is_found_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_some(span: Span) -> None:
        if span.span_id == SPAN:
            raise SpanError("it cannot be stored")

    monkeypatch.setattr(otlp, "span_json", refuse_some)
    spans, reasons = decode_all(as_protobuf(span_json(), span_json(spanId="1" * 16)), PROTOBUF)
    assert (len(spans), reasons) == (1, ["it cannot be stored"])


@pytest.mark.parametrize(("encode", "kind"), [(as_json, JSON), (as_protobuf, PROTOBUF)])
def test_there_is_a_limit_of_spans(encode: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = encode(*(span_json(spanId=f"{i:016x}") for i in range(1, 11)))
    assert len(decode(body, kind, max_spans=10)) == 10
    monkeypatch.setattr(otlp, "_span", None)  # none is made before they are counted
    with pytest.raises(OtlpError, match="the body has 10 spans, and the limit is 9; send fewer") as caught:
        decode_all(body, kind, max_spans=9)
    assert caught.value.status == 413


def test_a_large_resource_is_not_kept_with_many_spans() -> None:
    resource = attributes(large={"stringValue": "x" * 2_000_000})
    few, many = (
        as_protobuf(*(span_json(spanId=f"{i:016x}") for i in range(1, n)), resource=resource)
        for n in (30, 40)
    )
    assert len(decode(few, PROTOBUF)) == 29
    with pytest.raises(OtlpError, match="too large to copy to each of its spans") as caught:
        decode_all(many, PROTOBUF)
    assert caught.value.status == 413


@pytest.mark.parametrize("coding", ["gzip", "deflate", None])
def test_the_limit_holds_for_the_unpacked_body(coding: str | None) -> None:
    data = b"\x00" * 2_000_000
    bomb = {"gzip": gzip.compress, "deflate": zlib.compress, None: bytes}[coding](data)
    with pytest.raises(OtlpError, match="larger than 1000 bytes") as caught:
        decode(bomb, PROTOBUF, coding, max_bytes=1000)
    assert caught.value.status == 413


def test_a_body_of_exactly_the_limit_passes() -> None:
    body = as_protobuf(span_json())
    for packed, coding in ((body, None), (gzip.compress(body), "gzip"), (zlib.compress(body), "deflate")):
        assert decode(packed, PROTOBUF, coding, max_bytes=len(body))
        with pytest.raises(OtlpError):
            decode(packed, PROTOBUF, coding, max_bytes=len(body) - 1)


def test_deep_nesting_is_refused() -> None:
    value: dict[str, Any] = {"stringValue": "x"}
    for _ in range(200):
        value = {"arrayValue": {"values": [value]}}
    spans, reasons = decode_all(as_json(span_json(attributes=attributes(k=value)), span_json()), JSON)
    assert len(spans) == len(reasons) == 1


# ---- the route


class Store:
    """A sink that accepts some attempts."""

    def __init__(self, known: tuple[tuple[str, str], ...] = (("r", "a"), ("r2", "a2"))) -> None:
        self.known = known
        self.spans: list[Span] = []
        self.error: Exception | None = None
        self.calls = 0

    async def add(self, spans: list[Span]) -> list[str] | None:
        self.calls += 1
        if self.error:
            raise self.error
        for span in spans:
            if (span.rollout_id, span.attempt_id) not in self.known:
                raise UnknownIdError(f"no attempt {span.attempt_id!r}")
        self.spans += spans
        return None


def client_of(sink: Any, scope: Any = None, **settings: Any) -> TestClient:
    return TestClient(Starlette(routes=[traces_route(sink, scope, **settings)]))


@pytest.fixture
def store() -> Store:
    return Store()


def post(client: TestClient, body: bytes, kind: str = JSON, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post("/v1/traces", content=body, headers={"content-type": kind, **named})  # type: ignore[return-value]


def partial(response: Any) -> tuple[int, str]:
    assert response.status_code == 200
    if response.headers["content-type"] == JSON:
        message = json_format.Parse(response.content, ExportTraceServiceResponse())
    else:
        message = ExportTraceServiceResponse.FromString(response.content)
    return message.partial_success.rejected_spans, message.partial_success.error_message


@pytest.mark.parametrize(("encode", "kind", "empty"), [(as_json, JSON, b"{}"), (as_protobuf, PROTOBUF, b"")])
def test_success_is_answered_in_the_same_encoding(store: Store, encode: Any, kind: str, empty: bytes) -> None:
    response = post(client_of(store.add), encode(span_json()), kind)
    assert (response.status_code, response.headers["content-type"], response.content) == (200, kind, empty)
    assert [span.span_id for span in store.spans] == [SPAN]


def test_an_empty_request_is_a_success_and_stores_nothing(store: Store) -> None:
    client = client_of(store.add)
    assert post(client, b"{}").content == b"{}"
    assert post(client, b"", PROTOBUF).status_code == 200
    assert store.calls == 0


@pytest.mark.parametrize(("encode", "kind"), [(as_json, JSON), (as_protobuf, PROTOBUF)])
def test_partial_success(store: Store, encode: Any, kind: str) -> None:
    spans = [
        span_json(spanId="1" * 16, attributes=keys("r", "a")),
        span_json(spanId="2" * 16),
        span_json(spanId="3" * 16, attributes=keys("r", "unknown")),
        span_json(spanId="4" * 16, attributes=keys("r2", "a2")),
        span_json(spanId="5" * 16, attributes=keys("r", "unknown")),
    ]
    rejected, message = partial(post(client_of(store.add), encode(*spans, resource=[]), kind))
    assert rejected == 3
    assert "2 of 5 spans: no attempt 'unknown'" in message
    assert (
        "1 of 5 spans: it names no attempt; set the resource attributes agentlightning.rollout_id" in message
    )
    assert [span.span_id[0] for span in store.spans] == ["1", "4"]


@pytest.mark.parametrize("value", [{"stringValue": "high"}, {"doubleValue": 1e308}, {"doubleValue": "NaN"}])
def test_a_reward_that_cannot_be_read_is_rejected(store: Store, value: dict[str, Any]) -> None:
    reward = [
        {"key": "agentlightning.reward.0.name", "value": {"stringValue": "primary"}},
        {"key": "agentlightning.reward.0.value", "value": value},
    ]
    spans = [span_json(attributes=reward), span_json(spanId="2" * 16)]
    rejected, message = partial(post(client_of(store.add), as_json(*spans)))
    assert (rejected, len(store.spans)) == (1, 1)
    assert "the reward 'primary' is" in message


def test_a_refusal_of_the_only_attempt(store: Store) -> None:
    store.error = InvalidTransitionError("it is decided")
    assert partial(post(client_of(store.add), as_json(span_json()))) == (1, "1 of 1 spans: it is decided")
    assert store.calls == 1


@pytest.mark.parametrize(
    "error",
    [
        StoreLostError("gone"),
        StoreError("disk full"),
        TimeoutError(),
        ConnectionError("refused"),
        RuntimeError("a bug"),
    ],
)
@pytest.mark.parametrize("kind", [JSON, PROTOBUF])
def test_a_store_that_is_down(
    store: Store, error: Exception, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.error = error
    body = as_json(span_json()) if kind == JSON else as_protobuf(span_json())
    response = post(client_of(store.add), body, kind)
    assert (response.status_code, response.headers["retry-after"], response.headers["content-type"]) == (
        503,
        "2",
        kind,
    )
    message = (
        json_format.Parse(response.content, Status()) if kind == JSON else Status.FromString(response.content)
    )
    assert "send them again" in message.message
    assert "1 spans could not be stored" in caplog.text


@pytest.mark.parametrize(
    ("resource", "stored"),
    [
        ([], True),
        (keys("r", None), True),
        (keys("r", "a"), True),
        (keys("r", "b"), False),
        (keys("r2", None), False),
    ],
)
def test_an_address_that_is_scoped(store: Store, resource: list[Any], stored: bool) -> None:
    response = post(client_of(store.add, lambda: ("r", "a")), as_json(span_json(), resource=resource))
    rejected, message = partial(response)
    assert [(span.rollout_id, span.attempt_id) for span in store.spans] == [("r", "a")] * stored
    assert rejected == (not stored)
    assert ("but this URL belongs to another" in message) == (not stored)


def test_a_scope_that_is_of_the_whole_run(store: Store) -> None:
    client = client_of(store.add, lambda: None)
    assert partial(post(client, as_json(span_json())))[0] == 0
    assert partial(post(client, as_json(span_json(), resource=[])))[0] == 1


def test_a_body_that_does_not_arrive_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylight.traces.otlp.READ_TIMEOUT_S", 0.01)

    async def half() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async def main() -> int:
        transport = httpx.ASGITransport(app=Starlette(routes=[traces_route(store.add)]))
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=30) as client:
            headers = {"content-type": JSON}
            return (await client.post("/v1/traces", content=half(), headers=headers)).status_code

    assert asyncio.run(main()) == 408


def test_refusals_of_http(store: Store) -> None:
    client = client_of(store.add, max_bytes=1000)
    too_large = post(client, b"x" * 1001, PROTOBUF)
    assert (too_large.status_code, too_large.headers["content-type"]) == (413, PROTOBUF)
    assert "larger than 1000 bytes" in Status.FromString(too_large.content).message
    assert post(client, gzip.compress(b"x" * 5000), PROTOBUF, content_encoding="gzip").status_code == 413
    unknown = post(client, b"x", "text/plain")
    assert (unknown.status_code, unknown.headers["content-type"]) == (415, JSON)
    assert post(client, b'{"\\ud800": }').status_code == 400
    assert client.get("/v1/traces").status_code == 405
    assert store.calls == 0


def test_only_the_bad_spans_of_a_body_are_rejected(store: Store) -> None:
    body = as_json(
        span_json(), span_json(traceId="0" * 32), span_json(name="\ud800"), span_json(spanId="1" * 16)
    )
    rejected, message = partial(post(client_of(store.add), body))
    assert rejected == 2
    assert "1 of 4 spans: the trace_id of span 'call'" in message
    assert [span.span_id[0] for span in store.spans] == ["b", "1"]


def test_the_sink_is_given_a_large_body_in_parts(store: Store) -> None:
    body = as_protobuf(*(span_json(spanId=f"{i:016x}") for i in range(1, 2 * otlp.CHUNK + 2)))
    assert post(client_of(store.add), body, PROTOBUF).content == b""
    assert (store.calls, len(store.spans)) == (3, 2 * otlp.CHUNK + 1)
    too_many = post(client_of(store.add, max_spans=10), body, PROTOBUF)
    assert too_many.status_code == 413
    assert "the limit is 10" in Status.FromString(too_many.content).message


async def test_few_bodies_are_decoded_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now, most, held = 0, 0, threading.Event()

    def slow(*arguments: Any) -> tuple[list[Span], list[str]]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        held.wait(10)
        now -= 1
        return decode_all(*arguments)

    monkeypatch.setattr(otlp, "decode", slow)
    transport = httpx.ASGITransport(app=Starlette(routes=[traces_route(store.add)]))
    async with httpx.AsyncClient(transport=transport, base_url="http://store") as client:
        work = [
            client.post("/v1/traces", content=as_json(span_json()), headers={"content-type": JSON})
            for _ in range(6)
        ]
        answers = asyncio.gather(*work)
        await until(lambda: now == otlp.MAX_DECODES)
        held.set()
        assert {answer.status_code for answer in await answers} == {200}
    assert (most, store.calls) == (otlp.MAX_DECODES, 6)


def test_the_body_is_not_read_beyond_the_limit(store: Store) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield b"x" * 1000

    response = client_of(store.add, max_bytes=5000).post(
        "/v1/traces", content=endless(), headers={"content-type": PROTOBUF}
    )
    assert response.status_code == 413


# ---- malformed input


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([TRACE, SPAN, "0" * 32, "ab", "STATUS_CODE_OK"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
FIELDS = sorted({*FULL, "flags", "trace_id", "dropped_links_count"} - {"unknownField", "endTimeUnixNano"})
SPANS = st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=6) | JSON_VALUES
NEAR_REQUESTS = st.one_of(
    JSON_VALUES,
    st.fixed_dictionaries({"resourceSpans": JSON_VALUES}),
    st.lists(SPANS, max_size=3).map(lambda spans: {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}),
    SPANS.map(lambda changes: document(span_json(**(changes if isinstance(changes, dict) else {})))),
    st.lists(SPANS, max_size=3).map(lambda links: document(span_json(links=links))),
    st.lists(JSON_VALUES, max_size=3).map(
        lambda pairs: document(span_json(attributes=[{"key": "k", "value": v} for v in pairs]))
    ),
)
CODINGS = st.sampled_from([None, "gzip", "deflate", "identity", "br"])


async def _take_all(spans: list[Span]) -> None:
    for span in spans:
        assert span.rollout_id
        assert span.attempt_id
        assert len(span.trace_id) == 32
        assert len(span.span_id) == 16
        json.dumps(span.model_dump())


ANY = client_of(_take_all, lambda: ("r", "a"))


def send(body: bytes, kind: str, coding: str | None) -> None:
    headers = {"content-type": kind} | ({"content-encoding": coding} if coding else {})
    response = ANY.post("/v1/traces", content=body, headers=headers)
    assert response.status_code in (200, 400, 413, 415), response.content
    if response.status_code != 415:
        assert response.headers["content-type"] == kind


@given(NEAR_REQUESTS, st.booleans())
def test_any_json_is_answered(value: Any, packed: bool) -> None:
    body = json.dumps(value).encode()
    send(gzip.compress(body) if packed else body, JSON, "gzip" if packed else None)


@given(st.binary(max_size=200), st.sampled_from([JSON, PROTOBUF]), CODINGS)
def test_any_bytes_are_answered(body: bytes, kind: str, coding: str | None) -> None:
    send(body, kind, coding)


GOOD = as_protobuf(FULL, span_json(spanId="1" * 16))


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(GOOD)),
    CODINGS,
)
def test_a_broken_protobuf_is_answered(changes: list[tuple[int, int]], cut: int, coding: str | None) -> None:
    body = bytearray(GOOD)
    for place, byte in changes:
        body[place] = byte
    packed = {"gzip": gzip.compress, "deflate": zlib.compress}.get(coding or "", bytes)(
        bytes(body[:cut] if cut % 2 else body)
    )
    send(packed, PROTOBUF, coding)


# ---- the real exporter, over a real socket


def serving(sink: Any, **settings: Any) -> contextlib.AbstractContextManager[str]:
    """Serve the route on a free port; the value is the server's URL."""
    return listening(Starlette(routes=[traces_route(sink, **settings)]))


@pytest.fixture
def server(store: Store) -> Iterator[str]:
    with serving(store.add, max_bytes=1_000_000) as url:
        yield url


def emit(provider: TracerProvider, count: int = 1) -> None:
    tracer = provider.get_tracer("agent", "1.0")
    remote = SpanContext(int(TRACE, 16), int(SPAN, 16), True, TraceFlags(1))
    for _ in range(count):
        with tracer.start_as_current_span("outer", links=[Link(remote, {"why": "w"})]) as outer:
            outer.set_attributes({"s": "x", "n": 3, "f": 0.5, "ids": [1, 2]})
            outer.add_event("e", {"k": "v"})
            with tracer.start_as_current_span("inner") as inner:
                inner.set_status(SdkStatus(StatusCode.ERROR, "bad"))


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip, Compression.Deflate])
def test_the_real_exporter(server: str, store: Store, compression: Compression) -> None:
    kept = InMemorySpanExporter()
    provider = TracerProvider(
        resource=Resource.create({ROLLOUT_ID: "r", ATTEMPT_ID: "a"}), shutdown_on_exit=False
    )
    provider.add_span_processor(SimpleSpanProcessor(kept))
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(f"{server}/v1/traces", compression=compression))
    )
    emit(provider, count=10)
    provider.shutdown()
    direct = [Span.from_opentelemetry(span, "r", "a") for span in kept.get_finished_spans()]
    assert len(direct) == 20

    def comparable(span: Span) -> dict[str, Any]:  # JSON has no tuples
        return json.loads(json.dumps(span.model_dump()))

    assert [comparable(span) for span in store.spans] == [comparable(span) for span in direct]


def test_the_real_exporter_tries_again_while_the_store_is_down(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "RETRY_AFTER_S", 0)
    store.error = StoreLostError("gone")

    async def back_the_second_time(spans: list[Span]) -> list[str] | None:
        try:
            return await store.add(spans)
        finally:
            store.error = None

    provider = TracerProvider(
        resource=Resource.create({ROLLOUT_ID: "r", ATTEMPT_ID: "a"}), shutdown_on_exit=False
    )
    kept = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    emit(provider)
    with serving(back_the_second_time) as server:
        exporter = OTLPSpanExporter(f"{server}/v1/traces", timeout=10)
        assert exporter.export(kept.get_finished_spans()) is SpanExportResult.SUCCESS
        exporter.shutdown()
    assert (store.calls, len(store.spans)) == (2, 2)


def test_the_real_exporter_is_told_that_it_sends_too_much(
    server: str, caplog: pytest.LogCaptureFixture
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    kept = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    provider.get_tracer("x").start_span("large", attributes={"a": "x" * 1_100_000}).end()
    exporter = OTLPSpanExporter(f"{server}/v1/traces", timeout=5)
    with caplog.at_level(logging.ERROR):
        assert exporter.export(kept.get_finished_spans()) is SpanExportResult.FAILURE
    exporter.shutdown()
    assert "413" in caplog.text


def test_the_tracers_export_reaches_the_endpoint(server: str, store: Store, no_provider: None) -> None:
    """Spans of two attempts of one process arrive with their ids (`OtelTracer(export_endpoint=...)`)."""
    tracer = OtelTracer(export_endpoint=server)
    for rollout_id, attempt_id in store.known:
        with tracer.attempt(make_rollout(rollout_id, attempt_id=attempt_id)):
            otel.get_tracer("agent").start_span(f"of {rollout_id}").end()
    tracer.teardown()
    found = sorted((span.name, span.rollout_id, span.attempt_id) for span in store.spans)
    assert found == [("of r", "r", "a"), ("of r2", "r2", "a2")]


def test_a_collector_that_is_not_there_costs_no_more_than_the_deadline(no_provider: None) -> None:
    tracer = OtelTracer(export_endpoint="http://127.0.0.1:9", export_timeout=0.2)
    with tracer.trace_context(rollout_id="r", attempt_id="a"):
        otel.get_tracer("agent").start_span("kept").end()
    tracer.teardown()
    assert [span.name for span in tracer.get_last_trace()] == ["kept"]
