"""Trackers: their thread, their losses, and what reaches them of a run."""

import asyncio
import importlib.util
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from recording_display import RecordingDisplay

import raylight as rl
from raylight.errors import ConfigError
from raylight.trainer.output.loggers import SampledRollout, Tracker
from raylight.trainer.output.loggers.group import LoggerGroup
from raylight.trainer.output.loggers.registry import TRACKERS, find_loggers
from raylight.trainer.output.loggers.tracker import MAX_WAITING, points
from raylight.trainer.output.report import Report

from ..loops.test_policy_loop import STEPS, World, live

ROW = SampledRollout("1+1", "2", 1.0, "{}", "succeeded", 3, "val", "id")


class FakeTracker(Tracker):
    """Records its calls; fails in the methods `broken`, and waits in those in `waits` until `free` is set."""

    def __init__(self, folder: Path, broken: tuple[str, ...] = (), waits: tuple[str, ...] = ()) -> None:
        super().__init__(folder)
        self.broken, self.waits, self.free = broken, waits, threading.Event()
        self.calls: list[tuple[str, Any]] = []

    def _call(self, method: str, argument: Any = None) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if method in self.waits:
            self.free.wait(20)
        if method in self.broken:
            raise ConnectionError(f"no route for {method}")
        self.calls.append((method, argument))

    def start(self, config: dict[str, Any]) -> None:
        self._call("start", self.saved_id)
        self.save_id("run-1")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._call("log", points(step, metrics))

    def rollouts(self, step: int, table: list[SampledRollout]) -> None:
        self._call("rollouts", (step, table))

    def finish(self) -> None:
        self._call("finish", self.failure)


def other_folder(folder: Path) -> Path:
    """Return a folder for a second tracker of one class, which keeps its id in a separate file."""
    (folder / "other").mkdir()
    return folder / "other"


def group_of(folder: Path, *trackers: Tracker, timeout_s: float = 10) -> tuple[LoggerGroup, list[str]]:
    display = RecordingDisplay()
    group = LoggerGroup(trackers, folder, display, (), finish_timeout_s=timeout_s)
    group.start({})
    return group, display.notes


def test_a_tracker_receives_the_run_in_order_in_a_thread_of_its_own(tmp_path: Path) -> None:
    tracker = FakeTracker(tmp_path)
    group, notes = group_of(tmp_path, tracker)
    assert group.takes_rollouts
    group.rollouts(0, [ROW])
    group.log(0, {"val/reward": 0.5, "nan": math.nan, "inf": math.inf})
    group.log(3, {"val/step": 2.0, "val/reward": 0.7, "time/total_s": 1.0})
    group.finish("ValueError: boom")
    group.finish()
    assert tracker.calls == [
        ("start", None),
        ("rollouts", (0, [ROW])),
        ("log", (0, {"val/reward": 0.5})),
        ("log", (2, {"val/reward": 0.7})),
        ("finish", "ValueError: boom"),
    ]
    assert notes == []


def test_a_resumed_run_has_the_id_of_its_tracker_and_a_fresh_one_none(tmp_path: Path) -> None:
    for fresh, saved in ((True, None), (False, "run-1"), (True, None)):
        tracker = FakeTracker(tmp_path)
        report = Report(
            tmp_path, RecordingDisplay(), {}, last_logged_step=None if fresh else 0, loggers=[tracker]
        )
        report.close()
        assert tracker.calls[0] == ("start", saved)


def test_a_failing_tracker_is_reported_once_with_what_it_lost(tmp_path: Path) -> None:
    broken, sound = FakeTracker(tmp_path, broken=("log",)), FakeTracker(other_folder(tmp_path))
    group, notes = group_of(tmp_path, broken, sound)
    for step in range(3):
        group.log(step, {})
    group.finish()
    first, loss = notes
    assert "FakeTracker failed in log(), and the run continues: ConnectionError: no route for log" in first
    assert "FakeTracker recorded 0 of 3 rows; metrics.jsonl" in loss
    assert [name for name, _ in sound.calls] == ["start", "log", "log", "log", "finish"]


def test_a_tracker_that_does_not_start_receives_nothing(tmp_path: Path) -> None:
    tracker = FakeTracker(tmp_path, broken=("start",))
    group, notes = group_of(tmp_path, tracker)
    group.log(1, {})
    group.finish()
    assert tracker.calls == []
    assert "failed in start()" in notes[0]
    assert "recorded 0 of 1 rows" in notes[1]


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_hanging_tracker_delays_no_step_and_ends_no_run(tmp_path: Path, method: str) -> None:
    tracker, sound = FakeTracker(tmp_path, waits=(method,)), FakeTracker(other_folder(tmp_path))
    group, notes = group_of(tmp_path, tracker, sound, timeout_s=0.2)
    for step in range(3):
        group.log(step, {})
    group.finish()
    recorded = 3 if method == "finish" else 0
    assert [f"recorded {recorded} of 3 rows and has not finished" in note for note in notes] == [True]
    assert len(sound.calls) == 5
    tracker.free.set()


def test_rows_beyond_the_queue_of_a_slow_tracker_are_lost_and_counted(tmp_path: Path) -> None:
    tracker = FakeTracker(tmp_path, waits=("start",))
    group, notes = group_of(tmp_path, tracker)
    for step in range(MAX_WAITING + 7):
        group.log(step, {})
    tracker.free.set()
    group.finish()
    n = sum(name == "log" for name, _ in tracker.calls)
    assert MAX_WAITING - 1 <= n <= MAX_WAITING
    assert f"recorded {n} of {MAX_WAITING + 7} rows" in notes[0]
    assert tracker.calls[-1] == ("finish", None)


def test_each_evaluation_of_a_run_sends_a_few_rollouts(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    tracker = FakeTracker(tmp_path / "run")
    world = World(tmp_path / "run")
    world.val_tasks = 20
    asyncio.run(live(world, loggers=["jsonl", tracker]))
    tables = {argument[0]: argument[1] for name, argument in tracker.calls if name == "rollouts"}
    assert sorted(tables) == [step for step in range(STEPS + 1) if step % 2 == 0 or step == STEPS]
    assert {len(table) for table in tables.values()} == {8}
    row = tables[0][0]
    assert (row.task, row.mode, row.status) == ("100", "val", "succeeded")
    assert row.reward is not None


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_an_error_before_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"is not installed; pip install 'raylight\[{name}\]'"):
        rl.Trainer(loggers=[{"type": name, "project": "p"}])


@pytest.mark.parametrize("name", TRACKERS)
def test_each_tracker_is_a_class_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker imports its package in `start`, in its thread."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: object())
    (found,) = find_loggers([name])
    assert issubclass(found, Tracker)


def test_otlp_sends_the_metrics_of_each_step_and_reports_an_endpoint_that_rejects_them(
    tmp_path: Path,
) -> None:
    received: list[dict[str, float]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
            metrics = resource.scope_metrics[0].metrics
            received.append({metric.name: metric.gauge.data_points[0].as_double for metric in metrics})
            self.send_response(200 if len(received) < 3 else 400)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1/metrics"
        display = RecordingDisplay()
        loggers = find_loggers([{"type": "otlp", "endpoint": url}])
        group = LoggerGroup(loggers, tmp_path, display, ())
        group.start({})
        group.log(1, {"val/reward": 0.5, "val/reward/a:b": 0.25})
        group.log(2, {"val/reward": 0.75})
        group.log(3, {"val/reward": 1.0})
        group.finish()
        server.shutdown()
    assert received[0] == {"raylight/step": 1.0, "val/reward": 0.5, "val/reward/a_b": 0.25}
    assert (received[1]["raylight/step"], received[1]["val/reward"]) == (2.0, 0.75)
    assert "OtlpTracker failed in log()" in display.notes[0]
    assert "recorded 2 of 3 rows" in display.notes[1]
