"""Metric logger that exports to an OpenTelemetry collector."""

from __future__ import annotations

from typing import Any

from raylight.trainer.output.loggers.protocol import Metrics
from raylight.trainer.output.loggers.tracker import Tracker, points

RUN_STEP = "raylight/step"


class OtlpTracker(Tracker):
    """Sends a run's metrics by OTLP over HTTP, as gauges with the names of the metrics.

    The gauge `raylight/step` is their step. A gauge that a step has no value for repeats its last one. They
    go to `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`, or to `OTEL_EXPORTER_OTLP_ENDPOINT`. The resource has
    `service.name` ("raylight"), `raylight.project` and `raylight.run`. Further settings, such as `endpoint`,
    `headers` and `timeout`, are passed to `OTLPMetricExporter`.
    """

    def start(self, config: dict[str, object]) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource

        attributes = {"service.name": "raylight", "raylight.project": self.project, "raylight.run": self.name}
        self._exporter = OTLPMetricExporter(**self.settings)
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider([self._reader], Resource.create(attributes), shutdown_on_exit=False)
        self._gauges: dict[str, Any] = {}

    def log(self, step: int, metrics: Metrics) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        at, values = points(step, metrics)
        meter = self._provider.get_meter("raylight")
        for name, value in {RUN_STEP: float(at), **values}.items():
            if name not in self._gauges:
                self._gauges[name] = meter.create_gauge(otlp_name(name))
            self._gauges[name].set(value)
        data = self._reader.get_metrics_data()
        if data is not None and self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise ConnectionError("the OTLP endpoint did not take the metrics; its errors are in the log")

    def finish(self) -> None:
        self._provider.shutdown()
        self._exporter.shutdown()


def otlp_name(name: str) -> str:
    """Return the name of a metric with the characters that OpenTelemetry allows in names of instruments."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.-/") else "_" for c in name)[:255]
