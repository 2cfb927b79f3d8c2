"""Metric loggers: names, construction, failures, and a new logger that receives a whole run."""

import asyncio
import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recording_display import RecordingDisplay
from run_output import metric_rows

import raylight as rl
from raylight.errors import ConfigError
from raylight.trainer.output.loggers.group import LoggerGroup
from raylight.trainer.output.loggers.run_files import JsonlLogger, read_history
from raylight.trainer.output.report import Report

from ..loops.test_policy_loop import STEPS, World, live

TOY = Path(__file__).parent / "toy_logger.py"


class FailingLogger:
    calls = 0

    def start(self, config: dict[str, Any]) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.calls += 1
        raise ConnectionError("no route to the tracker")

    def finish(self) -> None:
        raise ConnectionError("no route to the tracker")


def test_a_logger_in_one_new_file_receives_all_steps_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.syspath_prepend(TOY.parent)
    loggers = ["jsonl", {"type": "toy_logger:ToyLogger", "project": "sums"}]
    rows = asyncio.run(live(World(tmp_path / "run"), loggers=loggers))
    start, *steps, finish = sys.modules["toy_logger"].ToyLogger.calls
    assert start == ("start", "sums", "GRPO")
    assert [step for step, _, _ in steps] == [row["step"] for row in rows] == list(range(STEPS + 1))
    assert steps[-1] == (STEPS, True, True)
    assert finish == "finish"


@pytest.mark.parametrize(
    ("loggers", "message"),
    [
        (["consol"], r"no logger 'consol'; the nearest are: console"),
        (["tensorbord"], "the nearest are: tensorboard"),
        (["neptune"], "the nearest are: console, jsonl, plot, wandb"),
        (["raylight.trainer.output.loggers:JsonLogger"], "JsonlLogger"),
        ("jsonl", "not a list"),
        ([{"type": "plott"}], "the nearest are: plot"),
    ],
)
def test_a_wrong_name_is_an_error_with_the_nearest_names(loggers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl.Trainer(loggers=loggers)


@pytest.mark.parametrize(
    ("logger", "message"),
    [(object(), r"object has no method start\(\)"), ({"type": JsonlLogger, "file": "x"}, "takes no 'file'")],
)
def test_a_logger_that_cannot_be_built_is_an_error(logger: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        LoggerGroup([logger], tmp_path, RecordingDisplay(), ())


def test_a_failing_logger_is_reported_once_and_the_others_receive_everything(tmp_path: Path) -> None:
    display, failing = RecordingDisplay(), FailingLogger()
    report = Report(tmp_path, display, {}, loggers=[failing, "console", "jsonl", "plot"])
    for step in range(3):
        report.step(step, {"val/reward": 0.5})
    report.finish({})
    report.close()
    assert failing.calls == 3
    assert display.steps == [0, 1, 2]
    failures = [note for note in display.notes if "FailingLogger" in note]
    assert len(failures) == 1
    assert "failed in log()" in failures[0]
    assert "no route to the tracker" in failures[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "reward.png").exists()


def test_a_resumed_run_draws_the_steps_before_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        "raylight.trainer.output.plot.plot_rewards", lambda rows, path, best: drawn.append(rows)
    )
    first = Report(tmp_path, RecordingDisplay(), {})
    for step in range(4):
        first.step(step, {"val/reward": float(step)})
    second = Report(tmp_path, RecordingDisplay(), {}, last_logged_step=2)
    second.step(3, {"val/reward": 30.0})
    second.finish({})
    assert [row["val/reward"] for row in drawn[-1]] == [0.0, 1.0, 2.0, 30.0]
    rows = metric_rows(tmp_path)
    assert [row["val/reward"] for row in rows] == [0.0, 1.0, 2.0, 30.0]


def test_without_loggers_a_run_still_has_a_summary(tmp_path: Path) -> None:
    report = Report(tmp_path, RecordingDisplay(), {}, loggers=[])
    report.step(1, {"train/reward": 0.25})
    assert report.finish({})["reward_after"] == 0.25
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "summary.json"]


@contextlib.contextmanager
def disk_with_room(n_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_row_that_does_not_fit_on_the_disk_is_written_whole_later(tmp_path: Path) -> None:
    jsonl, file = JsonlLogger(tmp_path), tmp_path / "metrics.jsonl"
    jsonl.start({})
    jsonl.log(1, {"a": 1.0})
    size = file.stat().st_size
    for step in (2, 3):
        with disk_with_room(size + 5), pytest.raises(OSError, match=r"No space left|too large"):
            jsonl.log(step, {"a": 1.0})
        assert file.stat().st_size == size
    jsonl.log(4, {"a": 1.0})
    assert [row["step"] for row in read_history(tmp_path, 10)] == [1, 2, 3, 4]


def test_a_resumed_run_keeps_the_evaluations_of_the_steps_that_it_keeps(tmp_path: Path) -> None:
    jsonl = JsonlLogger(tmp_path)
    jsonl.start({})
    for step, evaluated in ((2, None), (3, None), (3, 2.0), (4, None), (4, 3.0)):
        jsonl.log(step, {} if evaluated is None else {"val/step": evaluated})
    kept = [(row["step"], row.get("val/step")) for row in read_history(tmp_path, 2)]
    assert kept == [(2, None), (2, 2.0)], "no row is of a later step than the last one"
