"""Spans from other processes, sent to an attempt's address with its key, or with the run's secret."""

import json
from typing import Any

import httpx
import pytest
from gateway_helpers import BODY, CHAT, SECRET, within
from gateway_helpers import Site as Gated
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.errors import StoreLostError
from raylight.semconv import ATTEMPT_ID, ROLLOUT_ID
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import Rollout, Span

TRACES = "/v1/traces"


class Site:
    """A gateway in front of a store."""

    def __init__(self) -> None:
        self.store = StoreClient(StoreService())
        self.lost = False
        self.client = Gated(sink=self.add_spans).client

    async def add_spans(self, spans: list[Span]) -> None:
        if self.lost:
            raise StoreLostError("gone")
        await self.store.add_many_spans(spans)

    async def post(
        self, path: str, key: str, spans: list[dict[str, Any]] | bytes, **resource: str
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        async with within():
            if isinstance(spans, bytes):
                headers["content-type"] = "application/x-protobuf"
                return await self.client.post(path, headers=headers, content=spans)
            body = {"resourceSpans": [resource_spans(spans, resource)]}
            return await self.client.post(path, headers=headers, json=body)

    async def names(self, rollout: Rollout) -> list[str]:
        return [span.name for span in await self.store.query_spans(rollout.rollout_id)]


def resource_spans(spans: Any, resource: dict[str, str]) -> dict[str, Any]:
    attributes = [{"key": name, "value": {"stringValue": value}} for name, value in resource.items()]
    return {"resource": {"attributes": attributes}, "scopeSpans": [{"spans": spans}]}


def ids_of(rollout: Rollout) -> tuple[str, str]:
    return rollout.rollout_id, rollout.attempt.attempt_id


def keyed(rollout: Rollout) -> dict[str, str]:
    return dict(zip((ROLLOUT_ID, ATTEMPT_ID), ids_of(rollout), strict=True))


def a_span(name: str, number: int = 1) -> dict[str, Any]:
    return {"traceId": f"{number:032x}", "spanId": f"{number:016x}", "name": name}


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.mark.parametrize("rollout_id", ["ro-1", "a/b é."])
async def test_spans_sent_to_an_attempts_address_are_its_own(site: Site, rollout_id: str) -> None:
    rollout = await site.store.start_rollout("task", rollout_id=rollout_id)
    ids = ids_of(rollout)
    answer = await site.post(
        attempt_path(*ids) + TRACES, attempt_key(SECRET, *ids, "traces"), [a_span("one", 1), a_span("two", 2)]
    )
    assert (answer.status_code, answer.json()) == (200, {})
    assert await site.names(rollout) == ["one", "two"]
    assert {span.attempt_id for span in await site.store.query_spans(rollout_id)} == {ids[1]}
    assert (await site.store.get_rollout_by_id(rollout_id)).status == "running"


async def test_an_attempts_address_takes_no_spans_of_another(site: Site) -> None:
    mine, other = await site.store.start_rollout(1), await site.store.start_rollout(2)
    path, key = attempt_path(*ids_of(mine)) + TRACES, attempt_key(SECRET, *ids_of(mine), "traces")
    answer = await site.post(path, key, [a_span("stolen")], **keyed(other))
    assert answer.status_code == 200
    assert answer.json()["partialSuccess"]["rejectedSpans"] == "1"
    assert "but this URL belongs to another" in answer.json()["partialSuccess"]["errorMessage"]
    assert await site.names(mine) == await site.names(other) == []
    assert (await site.post(path, key, [a_span("own")], **keyed(mine))).json() == {}
    assert await site.names(mine) == ["own"]


async def test_spans_sent_with_the_runs_secret_name_their_attempt(site: Site) -> None:
    one, two = await site.store.start_rollout(1), await site.store.start_rollout(2)
    for rollout, name in ((one, "of one"), (two, "of two")):
        assert (await site.post(TRACES, SECRET, [a_span(name)], **keyed(rollout))).json() == {}
    assert (await site.names(one), await site.names(two)) == (["of one"], ["of two"])


async def test_spans_of_no_attempt_or_an_unknown_one_are_rejected_and_the_others_stored(site: Site) -> None:
    rollout = await site.store.start_rollout(1)
    groups = [{}, keyed(rollout), {ROLLOUT_ID: "ro-404", ATTEMPT_ID: "at-404"}]
    spans = [
        resource_spans([a_span(f"span {number}", number + 1)], group) for number, group in enumerate(groups)
    ]
    body = {"resourceSpans": spans}
    answer = await site.client.post(TRACES, headers={"authorization": f"Bearer {SECRET}"}, json=body)
    assert answer.status_code == 200
    partial = answer.json()["partialSuccess"]
    assert partial["rejectedSpans"] == "2"
    assert "names no attempt" in partial["errorMessage"]
    assert "ro-404" in partial["errorMessage"]
    assert await site.names(rollout) == ["span 1"]


async def test_the_sdks_own_encoding_is_understood_and_a_second_try_changes_nothing(site: Site) -> None:
    rollout = await site.store.start_rollout(1)
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource(keyed(rollout)))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with (
        provider.get_tracer("t").start_as_current_span("outer"),
        provider.get_tracer("t").start_as_current_span("inner"),
    ):
        pass
    content = encode_spans(exporter.get_finished_spans()).SerializeToString()
    for _ in range(2):
        answer = await site.post(TRACES, SECRET, content)
        assert answer.headers["content-type"] == "application/x-protobuf"
        assert not ExportTraceServiceResponse.FromString(answer.content).HasField("partial_success")
    inner, outer = await site.store.query_spans(rollout.rollout_id)
    assert (inner.name, outer.name, inner.parent_id) == ("inner", "outer", outer.span_id)
    assert (await site.store.statistics())["spans_duplicate"] == 2


@pytest.mark.parametrize("where", ["attempt", "run"])
@pytest.mark.parametrize("key", ["", "wrong", "the other attempt's", "the other address's"])
async def test_a_key_that_does_not_fit_stores_nothing(site: Site, where: str, key: str) -> None:
    rollout = await site.store.start_rollout(1)
    ids = ids_of(rollout)
    path = attempt_path(*ids) + TRACES if where == "attempt" else TRACES
    other = {"attempt": SECRET, "run": attempt_key(SECRET, *ids, "traces")}[where]
    real = {"the other attempt's": attempt_key(SECRET, ids[0], "at-2"), "the other address's": other}.get(
        key, key
    )
    answer = await site.post(path, real, [a_span("x")], **keyed(rollout))
    assert answer.status_code == 401
    assert await site.names(rollout) == []


async def test_an_exporter_is_told_to_come_back_while_the_store_is_down(site: Site) -> None:
    """The answer has the form of OTLP, not of a dialect."""
    rollout = await site.store.start_rollout(1)
    site.lost = True
    answer = await site.post(TRACES, SECRET, [a_span("x")], **keyed(rollout))
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert "again" in json.loads(answer.content)["message"]
    site.lost = False
    assert (await site.post(TRACES, SECRET, [a_span("x")], **keyed(rollout))).status_code == 200
    assert await site.names(rollout) == ["x"]


async def test_spans_have_a_key_of_their_own(site: Site) -> None:
    """The key that agents call models with cannot set rewards, and the key for spans calls no model."""
    rollout = await site.store.start_rollout(1)
    ids = ids_of(rollout)
    path = attempt_path(*ids)
    for use in ("model", "train"):
        answer = await site.post(path + TRACES, attempt_key(SECRET, *ids, use), [a_span("reward")])
        assert answer.status_code == 403
        assert "send spans with llm.traces_key" in answer.text
        assert "sends_spans=True" in answer.text
    assert await site.names(rollout) == []
    headers = {"authorization": f"Bearer {attempt_key(SECRET, *ids, 'traces')}"}
    answer = await site.client.post(f"{path}{CHAT}", headers=headers, json=BODY)
    assert answer.status_code == 403
    assert "call models with the attempt's API key" in answer.text
