"""Reports to Ray's metrics."""

import math
import re
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import ray.util.metrics

from raylight.ray_metrics import reporter
from raylight.ray_metrics.reporter import HistogramCounts, Measurement, MetricReporter, series
from raylight.ray_metrics.table import BUCKETS_S, METRICS, ROWS


class FakeGauge:
    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self.tag_keys = name, tag_keys
        assert description

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys)
        type(self).values[self.name, frozenset(tags.items())] = value


@pytest.fixture(autouse=True)
def gauges(monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    FakeGauge.values = {}
    monkeypatch.setattr(ray.util.metrics, "Gauge", FakeGauge)
    return FakeGauge.values


def test_a_measurement_has_the_labels_of_its_process(gauges: dict[Any, float]) -> None:
    measured = [Measurement("raylight_reward", 0.5, {"mode": "train"}), Measurement("raylight_step", 3)]
    MetricReporter(lambda: measured, "mine").report()
    assert gauges == {
        ("raylight_reward", frozenset({("run", "mine"), ("mode", "train")})): 0.5,
        ("raylight_step", frozenset({("run", "mine")})): 3,
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_is_no_series(value: float) -> None:
    assert list(series(Measurement("raylight_loss", value))) == []


def test_a_histogram_is_cumulative_and_its_sum_exact() -> None:
    histogram = HistogramCounts()
    for seconds in (0.001, BUCKETS_S[0], 0.3, 1000.0):
        histogram.observe(seconds)
    found = {(name, labels.get("le")): value for name, value, labels in series(Measurement("h", histogram))}
    assert found["h_bucket", "0.005"] == 2
    assert found["h_bucket", "0.25"] == 2
    assert found["h_bucket", "0.5"] == 3
    assert found["h_bucket", "+Inf"] == found["h_count", None] == 4
    assert found["h_sum", None] == pytest.approx(1000.306)


def test_a_failed_report_is_logged_once_and_ends_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "REPORT_S", 0.001)
    reports, enough = 0, threading.Event()

    def collect() -> Iterable[Measurement]:
        nonlocal reports
        reports += 1
        if reports == 3:
            enough.set()
        raise RuntimeError("Ray is gone")

    running = MetricReporter(collect, "mine").start()
    assert enough.wait(10)
    running.stop()
    running.stop()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_reporter_that_never_started_can_be_stopped() -> None:
    MetricReporter(list, "mine").stop()


def test_names_follow_the_conventions_of_prometheus() -> None:
    for name, spec in METRICS.items():
        assert re.fullmatch(r"raylight_[a-z_]+", name)
        assert name.endswith("_total") == (spec.kind == "counter")
        assert spec.help[0].isupper()
        assert "run" not in spec.labels


def test_a_row_has_exactly_the_labels_of_its_metric() -> None:
    for spec, labels in ROWS.values():
        assert set(labels) == set(spec.labels)
