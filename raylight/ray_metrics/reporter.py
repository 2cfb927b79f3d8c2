"""Reporter of a process's numbers to Ray's metrics."""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

from raylight.ray_metrics.table import BUCKETS_S, METRICS, MetricSpec

logger = logging.getLogger(__name__)

REPORT_S = 5.0
"""Interval of the reports. Ray sends them on every 10 s, and drops a value that is 20 s old."""
STOP_TIMEOUT_S = 1.0
"""Longest wait for a report in progress when the reporter stops."""


class HistogramCounts:
    """A histogram as plain numbers.

    Attributes:
        counts: values in each bucket; the last one is above all bounds.
        total: sum of the values.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Add a value."""
        self.counts[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self.total += seconds


class Measurement(NamedTuple):
    """A value of a metric: a number, or the counts of a histogram.

    Attributes:
        labels: values of the metric's labels that the reporter does not have itself.
    """

    name: str
    value: float | HistogramCounts
    labels: dict[str, str] = {}  # noqa: RUF012  # never changed


class MetricReporter:
    """Copies numbers of this process to Ray's metrics every few seconds, in a separate thread.

    Code on a hot path changes a plain number, which takes a tenth of a microsecond; Ray's own calls take ten.
    All metrics are gauges for Ray. So a counter is there while it is 0, a histogram has exact sums, and both
    disappear with their process, as Prometheus expects: Ray would keep its counters as long as the node.

    A report that fails is logged once and ends nothing.

    Args:
        collect: returns the measurements; called in the reporter's thread.
        labels: labels of all of them, in addition to `run`.
    """

    def __init__(self, collect: Callable[[], Iterable[Measurement]], run: str, **labels: str) -> None:
        self._collect = collect
        self._labels = {"run": run, **labels}
        self._gauges: dict[str, Any] = {}
        self._stopped = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="metric-reporter", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop reporting; a second call does nothing."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.report()
            self._stopped.wait(REPORT_S)

    def report(self) -> None:
        """Report all measurements once."""
        try:
            for measurement in self._collect():
                for name, value, labels in series(measurement):
                    self._gauge(name, METRICS[measurement.name], labels).set(value, self._labels | labels)
        except Exception:
            level = logging.DEBUG if self._has_failed else logging.WARNING
            self._has_failed = True
            logger.log(level, "metrics of %s could not be reported to Ray", self._labels, exc_info=True)

    def _gauge(self, name: str, spec: MetricSpec, labels: dict[str, str]) -> Any:
        if name not in self._gauges:
            from ray.util.metrics import Gauge

            self._gauges[name] = Gauge(name, spec.help, tag_keys=(*self._labels, *labels))
        return self._gauges[name]


def series(measurement: Measurement) -> Iterator[tuple[str, float, dict[str, str]]]:
    """Return name, value and labels of each series of a measurement; none of NaN and infinity."""
    name, value, labels = measurement
    if not isinstance(value, HistogramCounts):
        if math.isfinite(value):
            yield name, value, labels
        return
    up_to = list(itertools.accumulate(value.counts))
    for bound, count in zip((*BUCKETS_S, "+Inf"), up_to, strict=True):
        yield f"{name}_bucket", count, {**labels, "le": str(bound)}
    yield f"{name}_count", up_to[-1], labels
    yield f"{name}_sum", value.total, labels
