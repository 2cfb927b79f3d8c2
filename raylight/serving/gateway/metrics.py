"""What a replica counts of its requests, as Prometheus reads it."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylight.engines.capture_context import CURRENT

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Limits of the histograms' buckets."""
GONE = "499"
"""The status of a request whose client left before there was an answer."""
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """The counters of one replica. Labels have few values: the routes there are, and statuses.

    Args:
        extra: more in the same text format, such as the engine's own metrics.
    """

    def __init__(self, extra: Callable[[], bytes] | None = None) -> None:
        self.registry = registry = CollectorRegistry()
        self._extra = extra
        self.requests = Counter(
            "raylight_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        self.in_flight = Gauge(
            "raylight_requests_in_flight", "Requests that are being answered", registry=registry
        )
        self.seconds = Histogram(
            "raylight_request_seconds",
            "From a request to the end of its answer",
            ["route"],
            registry=registry,
            buckets=SECONDS,
        )
        self.first_byte = Histogram(
            "raylight_first_byte_seconds",
            "From a request to the first byte of its answer",
            ["route"],
            registry=registry,
            buckets=SECONDS,
        )
        self.prompt_tokens = Counter(
            "raylight_prompt_tokens", "Tokens of the prompts of recorded calls", registry=registry
        )
        self.output_tokens = Counter(
            "raylight_output_tokens", "Tokens sampled in recorded calls", registry=registry
        )
        self.aborted = Counter(
            "raylight_aborted_calls", "Recorded calls that ended before they were done", registry=registry
        )
        self.replays = Counter(
            "raylight_replays", "Retries answered with what had been sampled already", registry=registry
        )
        self.refused_keys = Counter(
            "raylight_refused_keys", "Requests whose key did not fit", registry=registry
        )

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Show a number that is read at each scrape."""
        Gauge(f"raylight_{name}", text, registry=self.registry).set_function(read)

    def page(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry) + (self._extra() if self._extra else b"")

    def counting_samples(self, app: ASGIApp) -> ASGIApp:
        """The engine's application, with the tokens counted that it sampled for each exchange."""

        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            finally:
                if exchange := CURRENT.get():
                    for sample in exchange.samples.values():
                        self.prompt_tokens.inc(len(sample.prompt_ids))
                        self.output_tokens.inc(len(sample.output_ids))
                        self.aborted.inc(sample.finish_reason == "aborted")

        return counting


class Watch:
    """One request as it is counted."""

    def __init__(self, metrics: Metrics, send: Send) -> None:
        self._metrics = metrics
        self._send = send
        self._start = time.perf_counter()
        self._first_byte: float | None = None
        self._status = GONE
        self.route = "unknown"
        metrics.in_flight.inc()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = str(message["status"])
        elif self._first_byte is None and message.get("body"):
            self._first_byte = time.perf_counter() - self._start
        await self._send(message)

    def end(self) -> None:
        metrics = self._metrics
        metrics.in_flight.dec()
        metrics.requests.labels(self.route, self._status).inc()
        metrics.seconds.labels(self.route).observe(time.perf_counter() - self._start)
        if self._first_byte is not None:
            metrics.first_byte.labels(self.route).observe(self._first_byte)
