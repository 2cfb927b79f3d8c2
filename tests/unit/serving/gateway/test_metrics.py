"""Metrics of a replica."""

import asyncio
from typing import Any

import pytest
from gateway_helpers import SECRET, Site, value_of, within
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from raylight.engines.capture_context import CURRENT, CaptureContext
from raylight.engines.capture_context import AttemptScope as Attempt
from raylight.engines.protocol import EngineLoad
from raylight.ray_metrics.table import METRICS
from raylight.serving.gateway.metrics import Metrics


async def test_requests_are_counted_by_route_and_status(site: Site) -> None:
    await site.post()
    await site.post(content=b"{")
    await site.post("/v1/messages", SECRET)
    await site.post(key="wrong")
    await site.get("/v1/nowhere")
    assert site.value("requests_total", route="chat", status="200") == 1
    assert site.value("requests_total", route="chat", status="400") == 1
    assert site.value("requests_total", route="messages", status="200") == 1
    assert site.value("requests_total", route="unknown", status="401") == 1
    assert site.value("requests_total", route="unknown", status="404") == 1
    assert site.value("rejected_keys_total") == 1
    assert site.value("request_seconds_count", route="chat") == 2
    assert site.value("first_byte_seconds_count", route="messages") == 1
    assert site.value("requests_in_flight") == 0


async def test_what_runs_is_in_flight(site: Site) -> None:
    called, go_on = asyncio.Event(), asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        called.set()
        await go_on.wait()
        await JSONResponse({})(scope, receive, send)

    site.inner.app = wait
    asking = asyncio.create_task(site.post())
    async with within():
        await called.wait()
        assert site.value("requests_in_flight") == 1
        asking.cancel()
        await asyncio.wait([asking])
    assert site.value("requests_in_flight") == 0
    assert site.value("requests_total", route="chat", status="499") == 1


async def test_every_measurement_has_the_labels_of_the_table(site: Site) -> None:
    site.metrics.watch_load(lambda: EngineLoad(0.0))
    site.metrics.count("ignored_fields_total", "user")
    site.metrics.count("dropped_tools_total", "web_search")
    await site.post()
    measured = list(site.metrics.collect())
    assert {measurement.name for measurement in measured} >= {
        spec.name
        for spec in METRICS.values()
        if spec.source == "gateway"
        and not spec.name.startswith(("raylight_recorder", "raylight_prompts", "raylight_replica_"))
    }
    for measurement in measured:
        assert {"replica", *measurement.labels} == set(METRICS[measurement.name].labels)


async def test_routes_that_are_made_up_add_no_labels(site: Site) -> None:
    for number in range(5):
        await site.get(f"/made-up-{number}")
        await site.get(f"/v1/models/made-up-{number}")
    assert "made-up" not in str(list(site.metrics.collect()))


def context_of(*samples: tuple[list[int], list[int], str]) -> CaptureContext:
    context = CaptureContext(Attempt("ro-1", "at-1"), "chat", {}, 0.0, [])
    for index, (prompt, output, reason) in enumerate(samples):
        sample = context.sample(index, prompt, {"temperature": 1.0})
        sample.output_ids, sample.finish_reason = output, reason  # type: ignore[assignment]
    return context


@pytest.mark.parametrize("fails", [False, True])
async def test_tokens_are_counted_where_an_exchange_tells(fails: bool) -> None:
    metrics = Metrics()

    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        if fails:
            raise ValueError

    token = CURRENT.set(context_of(([1, 2, 3], [4, 5], "stop"), ([1, 2, 3], [6], "aborted")))
    app = metrics.count_samples(engine)
    try:
        await app({}, None, None)  # type: ignore[arg-type]
    except ValueError:
        assert fails
    CURRENT.reset(token)
    await metrics.count_samples(JSONResponse({}))({"type": "http"}, None, _drop)  # type: ignore[arg-type]  # of no attempt
    assert value_of(metrics, "prompt_tokens_total") == 6
    assert value_of(metrics, "output_tokens_total") == 3
    assert value_of(metrics, "aborted_calls_total") == 1


async def test_the_engines_load_and_its_idle_time_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("raylight.serving.gateway.metrics.time.perf_counter", lambda: now)
    metrics = Metrics()
    metrics.watch_load(lambda: EngineLoad(0.25, running=3, waiting=2, preemptions=7, capacity=4096))
    names = (
        "kv_use_ratio",
        "running_requests",
        "waiting_requests",
        "preemptions_total",
        "kv_capacity_tokens",
    )
    assert [value_of(metrics, f"engine_{name}") for name in names] == [0.25, 3, 2, 7, 4096]
    gates = [asyncio.Event(), asyncio.Event()]

    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        await gates[scope["number"]].wait()

    app = metrics.count_samples(engine)
    now += 5
    calls = [asyncio.create_task(app({"number": n}, None, None)) for n in range(2)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    for gate, call in zip(gates, calls, strict=True):
        now += 10
        gate.set()
        await call
    now += 2
    assert metrics.idle_s == value_of(metrics, "engine_idle_seconds_total") == 7


async def _drop(message: Any) -> None: ...
