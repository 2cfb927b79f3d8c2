"""The monitor of a served model: its probes, its reports to the store, and its deadline."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from store_helpers import Box, open_box

from raylight._utils.aio import BroadcastCondition, cancel_all
from raylight.errors import ServingLostError
from raylight.semconv import REPLICA_HEADER
from raylight.serving.deploy import monitor as monitor_module
from raylight.serving.deploy.monitor import IngressProbe, Probe, ServingMonitor

# probes


class Ingress(ThreadingHTTPServer):
    """Answers `/health` with `status`, with the mark of a replica or not, or holds it back."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.marked = 200, True
        self.held = threading.Event()
        self.held.set()
        self.is_frozen = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/app"


class Handler(BaseHTTPRequestHandler):
    server: Any

    def do_GET(self) -> None:
        if self.path == "/app/health" or self.server.is_frozen:
            self.server.held.wait()
        self.send_response(self.server.status)
        if self.path == "/app/health" and self.server.marked:
            self.send_header(REPLICA_HEADER, "r-1")
        self.send_header("content-length", "0")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def ingress() -> Iterator[Ingress]:
    server = Ingress()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.held.set()
    server.shutdown()
    server.server_close()
    thread.join()


async def probed(url: str, replicas: int | None = None) -> Probe:
    probe = IngressProbe(url, lambda: replicas, lambda: 7.0)
    try:
        return await probe.send()
    finally:
        await probe.aclose()


@pytest.mark.parametrize("status", [200, 503])
async def test_an_answer_of_a_replica_is_an_answer(ingress: Ingress, status: int) -> None:
    ingress.status = status
    assert await probed(ingress.url) == Probe(7.0, "answered")


@pytest.mark.parametrize("status", [200, 404, 500, 503])
async def test_an_answer_of_the_ingress_alone_is_none(ingress: Ingress, status: int) -> None:
    ingress.status, ingress.marked = status, False
    probe = await probed(ingress.url)
    assert probe.result == "refused"
    assert f"status {status} and reaches no replica" in probe.reason


async def test_a_closed_port_refuses() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/app"
        probe = await probed(url)
    assert probe.result == "refused"
    assert f"{url}/health cannot be reached (ConnectError" in probe.reason


async def test_proxies_of_the_environment_are_not_used(
    ingress: Ingress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert (await probed(ingress.url)).result == "answered"


@pytest.mark.parametrize(
    ("replicas", "frozen", "result"),
    [(None, False, "busy"), (2, False, "busy"), (2, True, "late"), (None, True, "late")],
)
async def test_a_late_answer_has_a_reason(
    ingress: Ingress, monkeypatch: pytest.MonkeyPatch, replicas: int | None, frozen: bool, result: str
) -> None:
    monkeypatch.setattr(monitor_module, "PROBE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(monitor_module, "INGRESS_TIMEOUT_S", 0.3 if frozen else 2.0)
    ingress.held.clear()
    ingress.is_frozen = frozen
    probe = await probed(ingress.url, replicas)
    assert probe.result == result
    assert "did not answer within 0.3 s" in probe.reason


async def test_a_probe_that_is_held_back_without_a_replica_is_refused(
    ingress: Ingress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_module, "REPLICA_CHECK_S", 0.05)
    ingress.held.clear()
    assert await probed(ingress.url, replicas=0) == Probe(7.0, "refused", "no replica is alive")
    monkeypatch.setattr(monitor_module, "REPLICA_CHECK_S", 5.0)
    ingress.held.set()
    assert await probed(ingress.url, replicas=0) == Probe(7.0, "answered")


# the monitor


class Probes:
    """Returns the current result, and counts."""

    def __init__(self, box: Box) -> None:
        self.box, self.result, self.sent = box, "answered", 0
        self.changed = BroadcastCondition()

    async def send(self) -> Probe:
        self.sent += 1
        self.box.clock.now += 1
        self.changed.notify_all()
        await asyncio.sleep(0)
        return Probe(self.box.clock.now, self.result, "refused by a test")  # type: ignore[arg-type]

    async def aclose(self) -> None:
        pass


class World:
    def __init__(self, box: Box, timeout_s: float = 1e9) -> None:
        self.box, self.probes, self.shown = box, Probes(box), list[str]()
        probes: Any = self.probes
        self.monitor = ServingMonitor("run", probes, box.store, timeout_s, self.shown.append, box.clock)

    async def until(self, condition: Any) -> None:
        assert await self.probes.changed.wait_for(condition, 10)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(monitor_module, "PROBE_INTERVAL_S", 0.001)
    monkeypatch.setattr(monitor_module, "RECHECK_S", 0.001)
    async with open_box(lease_s=1e6) as box:
        yield World(box)


@contextlib.asynccontextmanager
async def running(monitor: ServingMonitor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(monitor.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await monitor.aclose()


async def test_an_outage_closes_the_queue_until_it_is_over(world: World) -> None:
    box, monitor = world.box, world.monitor
    rollout = await box.take()
    async with running(monitor):
        world.probes.result = "refused"
        await world.until(lambda: len(world.shown) == 1)
        await box.enqueue()
        assert await box.store.dequeue_rollout("w") is None
        assert await box.status(rollout) == ("requeuing", "failed")
        world.probes.result = "answered"
        await world.until(lambda: len(world.shown) == 2)
        assert await box.store.dequeue_rollout("w") is not None
    away, back = world.shown
    assert "serving is away since" in away
    assert "refused by a test. Rollouts wait" in away
    assert "serving is back after" in back
    assert monitor.seconds_away > 0
    assert await box.count("outages") == 1


async def test_a_restarted_store_learns_of_the_outage_again(world: World) -> None:
    async with running(world.monitor):
        world.probes.result = "refused"
        await world.until(lambda: len(world.shown) == 1)
        world.box.service._outages._since.clear()
        await world.until(lambda: world.box.service._outages.is_away)
    assert len(world.shown) == 1


async def test_a_store_that_restarts_before_the_end_of_an_outage_loses_what_ran_in_it(world: World) -> None:
    box, monitor = world.box, world.monitor
    world.probes.result = "refused"
    confirming = asyncio.create_task(monitor.confirm())
    await world.until(lambda: len(world.shown) == 1)
    await cancel_all([confirming])
    box.service._outages._since.clear()
    rollout = await box.take()
    await box.store.finish_attempt(rollout, "succeeded")
    world.probes.result = "answered"
    await asyncio.wait_for(monitor.confirm(), 10)
    assert not box.service._outages.is_away
    assert await box.status(rollout) == ("requeuing", "failed")


async def test_the_end_of_an_outage_is_reported_though_a_confirmation_is_cancelled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the report, no rollout would ever run again."""
    box, monitor = world.box, world.monitor
    report, ending = box.store.report_outage, asyncio.Event()

    async def report_slowly(source: str, since: float | None, reason: str = "") -> int:
        if since is None and not ending.is_set():
            ending.set()
            await asyncio.Event().wait()
        return await report(source, since, reason)

    monkeypatch.setattr(box.store, "report_outage", report_slowly)
    world.probes.result = "refused"
    confirming = asyncio.create_task(monitor.confirm())
    await world.until(lambda: len(world.shown) == 1)
    world.probes.result = "answered"
    await asyncio.wait_for(ending.wait(), 10)
    await cancel_all([confirming])
    assert box.service._outages.is_away
    await asyncio.wait_for(monitor.confirm(), 10)
    assert not box.service._outages.is_away


async def test_an_outage_without_end_ends_the_run(world: World) -> None:
    world = World(world.box, timeout_s=30)
    world.probes.result = "refused"
    async with running(world.monitor) as task:
        with pytest.raises(ServingLostError, match=r"run has been away since .*30 s \(engine.start_timeout"):
            await asyncio.wait_for(task, 10)


async def test_results_are_confirmed_by_a_probe_after_them(world: World) -> None:
    await world.monitor.confirm()
    assert (world.probes.sent, world.monitor.outages) == (1, 0)
    world.probes.result = "busy"
    await world.monitor.confirm()
    assert (world.probes.sent, world.monitor.outages) == (2, 0)


async def test_an_outage_that_a_confirmation_finds_is_reported_before_it_returns(world: World) -> None:
    """An agent that swallowed the connection error has succeeded with a reward of 0."""
    box = world.box
    await world.monitor.confirm()
    rollout = await box.take()
    await box.store.finish_attempt(rollout, "succeeded")
    world.probes.result = "refused"
    confirming = asyncio.create_task(world.monitor.confirm())
    await world.until(lambda: len(world.shown) == 1)
    world.probes.result = "answered"
    await asyncio.wait_for(confirming, 10)
    assert world.monitor.outages == 1
    assert (await box.status(rollout))[0] == "requeuing"
