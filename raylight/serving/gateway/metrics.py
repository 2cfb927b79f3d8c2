"""Metrics of a replica's requests, as plain numbers that a `MetricReporter` copies to Ray's metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylight.engines.capture_context import CURRENT
from raylight.engines.protocol import EngineLoad
from raylight.ray_metrics.reporter import HistogramCounts, Measurement
from raylight.ray_metrics.table import METRICS, PREFIX

CLIENT_DISCONNECTED = "499"
"""Status counted for a request whose client disconnected before an answer."""
REPLICA = "replica"
"""Label that the reporter adds."""


class Metrics:
    """Numbers of one replica. Their labels have few values: names of routes, and statuses.

    Names are as in `METRICS`, without the prefix.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        """Counters by name and values of the labels."""
        self.histograms: dict[tuple[str, str], HistogramCounts] = {}
        """Histograms by name and route."""
        self.requests_in_flight = 0
        self._reads: dict[tuple[str, ...], Callable[[], float]] = {}
        self._idle_s, self._idle_since, self._requests_of_engine = 0.0, time.perf_counter(), 0
        for spec in METRICS.values():
            if spec.source == "gateway" and spec.kind == "counter" and spec.labels == (REPLICA,):
                self.counts[(spec.name.removeprefix(PREFIX),)] = 0  # shown before the first event
        self.watch("requests_in_flight", lambda: self.requests_in_flight)
        self.watch("engine_idle_seconds_total", lambda: self.idle_s)

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        """Add to a counter.

        Args:
            labels: values of its labels, without the replica's.
        """
        self.counts[(name, *labels)] += by

    def observe(self, name: str, route: str, seconds: float) -> None:
        """Add a value to a histogram of a route."""
        if (found := self.histograms.get((name, route))) is None:
            found = self.histograms[name, route] = HistogramCounts()
        found.observe(seconds)

    def watch(self, name: str, read: Callable[[], float], *labels: str) -> None:
        """Add a metric that is read at each report.

        Args:
            labels: as for `count`.
        """
        self._reads[(name, *labels)] = read
        self.counts.pop((name, *labels), None)

    def watch_load(self, read: Callable[[], EngineLoad]) -> None:
        values: dict[str, Callable[[EngineLoad], float]] = {
            "engine_kv_use_ratio": lambda load: load.kv_use,
            "engine_kv_capacity_tokens": lambda load: load.capacity,
            "engine_running_requests": lambda load: load.running,
            "engine_waiting_requests": lambda load: load.waiting,
            "engine_preemptions_total": lambda load: load.preemptions,
        }
        for name, value in values.items():
            self.watch(name, lambda value=value: value(read()))  # type: ignore[misc]

    @property
    def idle_s(self) -> float:
        """Seconds since the start in which the engine had no request."""
        return self._idle_s + (time.perf_counter() - self._idle_since) * (not self._requests_of_engine)

    def collect(self) -> Iterator[Measurement]:
        """Return all measurements; also from another thread than the one that counts."""
        for (name, *labels), number in self.counts.copy().items():
            yield _measurement(name, number, labels)
        for (name, route), histogram in self.histograms.copy().items():
            yield _measurement(name, histogram, [route])
        for (name, *labels), read in self._reads.copy().items():
            yield _measurement(name, read(), labels)

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
                        self.count("prompt_tokens_total", by=len(sample.prompt_ids))
                        self.count("output_tokens_total", by=len(sample.output_ids))
                        if sample.finish_reason == "aborted":
                            self.count("aborted_calls_total")

        return counting


def _measurement(name: str, value: float | HistogramCounts, labels: list[str]) -> Measurement:
    spec = METRICS[PREFIX + name]
    names = [label for label in spec.labels if label != REPLICA]
    return Measurement(spec.name, value, dict(zip(names, labels, strict=True)))


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
        if message["type"] == "http.response.start":
            self._status = str(message["status"])
        elif self._first_byte is None and message.get("body"):
            self._first_byte = time.perf_counter() - self._start
        await self._send(message)

    def end(self) -> None:
        metrics = self._metrics
        metrics.requests_in_flight -= 1
        metrics.count("requests_total", self.route, self._status)
        metrics.observe("request_seconds", self.route, time.perf_counter() - self._start)
        if self._first_byte is not None:
            metrics.observe("first_byte_seconds", self.route, self._first_byte)
