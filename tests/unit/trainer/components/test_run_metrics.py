"""Metrics that the driver reports to Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from raylight.ray_metrics.reporter import Measurement
from raylight.trainer.components import run_metrics
from raylight.trainer.components.run_metrics import ComponentMetrics, StepMetrics
from raylight.trainer.ray_session.local_cluster import copy_board


class RecordedReports:
    """A reporter that keeps what it would report."""

    instances: list[RecordedReports]

    def __init__(self, collect: Any, run: str) -> None:
        self.collect, self.run, self.state = collect, run, "new"
        type(self).instances.append(self)

    def start(self) -> None:
        self.state = "started"

    def stop(self) -> None:
        self.state = "stopped"

    def measured(self) -> list[Measurement]:
        measured: Iterable[Measurement] = self.collect()
        return list(measured)


@pytest.fixture(autouse=True)
def reports(monkeypatch: pytest.MonkeyPatch) -> list[RecordedReports]:
    RecordedReports.instances = []
    monkeypatch.setattr(run_metrics, "MetricReporter", RecordedReports)
    monkeypatch.setattr(run_metrics, "REPORT_S", 0.001)
    return RecordedReports.instances


def test_the_last_value_of_each_metric_is_reported(reports: list[RecordedReports]) -> None:
    logger = StepMetrics("mine")
    logger.start({})
    logger.log(1, {"train/reward": 0.25, "val/reward": 0.5, "trace/forks": 1.0})
    logger.log(2, {"train/reward": 0.75})
    assert (reports[0].run, reports[0].state) == ("mine", "started")
    assert sorted(reports[0].measured()) == [
        Measurement("raylight_reward", 0.5, {"mode": "val"}),
        Measurement("raylight_reward", 0.75, {"mode": "train"}),
        Measurement("raylight_step", 2.0, {}),
    ]
    logger.finish()
    assert reports[0].state == "stopped"


class FailingStore:
    """A store whose first query fails."""

    def __init__(self) -> None:
        self.queries = 0
        self.answered_twice = asyncio.Event()

    async def statistics(self) -> dict[str, int]:
        self.queries += 1
        if self.queries == 1:
            raise ConnectionError("the store restarts")
        if self.queries == 3:
            self.answered_twice.set()
        names = ("queuing", "preparing", "running", "succeeded", "failed", "requeuing", "cancelled")
        return {f"rollouts_{name}": number for number, name in enumerate(names)}


async def test_a_store_that_fails_ends_nothing(reports: list[RecordedReports]) -> None:
    store: Any = FailingStore()
    metrics = ComponentMetrics("mine", store, lambda: {"runners/n": 2.0}, lambda: {"serving/outages": 1.0})
    (work,) = metrics.watches()
    task = asyncio.create_task(work)
    async with asyncio.timeout(10):
        await store.answered_twice.wait()
    measured = reports[0].measured()
    assert Measurement("raylight_rollouts", 2, {"status": "running"}) in measured
    assert [each for each in measured if each.name != "raylight_rollouts"] == [
        Measurement("raylight_runners", 2.0)
    ]
    task.cancel()
    await asyncio.wait([task])
    assert reports[0].state == "stopped"


def test_a_board_that_cannot_be_copied_is_logged(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_text("")
    copy_board(str(file))
    assert "raylight grafana" in caplog.text
