"""Metrics of a replica's requests, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylight.engines.capture_context import CURRENT
from raylight.engines.protocol import EngineLoad

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histograms' buckets, in seconds."""
CLIENT_DISCONNECTED = "499"
"""Status counted for a request whose client disconnected before an answer."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format. prometheus_client names it only since 0.23."""


class Metrics:
    """Counters of one replica. Their labels have few values: names of routes, and statuses.

    Args:
        extra: returns more metrics in Prometheus' text format, such as the engine's own.
    """

    def __init__(self, extra: Callable[[], bytes] | None = None) -> None:
        self.registry = registry = CollectorRegistry()
        self._extra = extra
        self._of_routes: dict[tuple[str, str], tuple[Counter, Histogram, Histogram]] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"raylight_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"raylight_{name}", text, ["route"], registry=registry, buckets=BUCKETS_S)

        self.requests = counter("requests", "Requests by route and status", "route", "status")
        self.requests_in_flight = 0
        self.gauge("requests_in_flight", "Requests not yet answered", lambda: self.requests_in_flight)
        self.seconds = histogram("request_seconds", "Seconds from a request to the end of its answer")
        self.first_byte = histogram(
            "first_byte_seconds", "Seconds from a request to the first byte of its answer"
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of recorded calls")
        self.output_tokens = counter("output_tokens", "Tokens sampled in recorded calls")
        self.aborted = counter("aborted_calls", "Recorded calls that ended before their answer was complete")
        self.replays = counter("replays", "Retries answered with the answer already sampled")
        self.ignored_fields = counter(
            "ignored_fields", "Requests from which a field of engine.ignore_fields was dropped", "field"
        )
        self.overridden = counter(
            "overridden_requests", "Requests of training rollouts whose sampling was replaced"
        )
        self.rejected_keys = counter("rejected_keys", "Requests without a valid API key")
        self._idle_s, self._idle_since, self._requests_of_engine = 0.0, time.perf_counter(), 0
        self.gauge("engine_idle_seconds", "Seconds in which the engine had no request", lambda: self.idle_s)

    def of_route(self, route: str, status: str) -> tuple[Counter, Histogram, Histogram]:
        """Return a route's `requests`, `seconds` and `first_byte`, found once for all its requests."""
        if (found := self._of_routes.get((route, status))) is None:
            requests = self.requests.labels(route, status)
            found = requests, self.seconds.labels(route), self.first_byte.labels(route)
            self._of_routes[route, status] = found
        return found

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read at each scrape."""
        Gauge(f"raylight_{name}", text, registry=self.registry).set_function(read)

    @property
    def idle_s(self) -> float:
        """Seconds since the start in which the engine had no request."""
        return self._idle_s + (time.perf_counter() - self._idle_since) * (not self._requests_of_engine)

    def watch_load(self, read: Callable[[], EngineLoad]) -> None:
        """Add gauges of an engine's load."""
        gauges: dict[str, tuple[str, Callable[[EngineLoad], float]]] = {
            "engine_kv_use": ("Share of the key-value cache in use", lambda load: load.kv_use),
            "engine_kv_capacity_tokens": (
                "Tokens that the key-value cache holds",
                lambda load: load.capacity,
            ),
            "engine_running": ("Requests that are being sampled", lambda load: load.running),
            "engine_waiting": ("Requests that wait for the engine", lambda load: load.waiting),
            "engine_preemptions": ("Times that a request lost its place", lambda load: load.preemptions),
        }
        for name, (text, value) in gauges.items():
            self.gauge(name, text, lambda value=value: value(read()))  # type: ignore[misc]

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry) + (self._extra() if self._extra else b"")

    def count_samples(self, app: ASGIApp) -> ASGIApp:
        """Wrap the engine's application so that the tokens sampled for each captured request are counted,
        and the time without requests is measured."""

        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            self._idle_s, self._requests_of_engine = self.idle_s, self._requests_of_engine + 1
            try:
                await app(scope, receive, send)
            finally:
                self._requests_of_engine -= 1
                self._idle_since = time.perf_counter()
                if context := CURRENT.get():
                    for sample in context.samples.values():
                        self.prompt_tokens.inc(len(sample.prompt_ids))
                        self.output_tokens.inc(len(sample.output_ids))
                        if sample.finish_reason == "aborted":
                            self.aborted.inc()

        return counting


class RequestTimer:
    """Measures one request from its construction to `end`.

    Attributes:
        route: name of the request's route; set once it is known.
    """

    def __init__(self, metrics: Metrics, send: Send) -> None:
        self.route = "unknown"
        self._metrics = metrics
        self._send = send
        self._start = time.perf_counter()
        self._first_byte: float | None = None
        self._status = CLIENT_DISCONNECTED
        metrics.requests_in_flight += 1

    async def send(self, message: Message) -> None:
        """Send a message of the answer."""
        if message["type"] == "http.response.start":
            self._status = str(message["status"])
        elif self._first_byte is None and message.get("body"):
            self._first_byte = time.perf_counter() - self._start
        await self._send(message)

    def end(self) -> None:
        """Add the request to the metrics."""
        metrics = self._metrics
        metrics.requests_in_flight -= 1
        requests, seconds, first_byte = metrics.of_route(self.route, self._status)
        requests.inc()
        seconds.observe(time.perf_counter() - self._start)
        if self._first_byte is not None:
            first_byte.observe(self._first_byte)
