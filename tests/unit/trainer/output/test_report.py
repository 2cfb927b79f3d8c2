"""The files of a run directory."""

import gc
import json
import tracemalloc
from pathlib import Path

import pytest
import yaml
from recording_display import RecordingDisplay
from run_output import metric_rows
from unit_helpers import make_finished

from raylight.trainer.output.report import MAX_SHOWN_ERRORS, Report
from raylight.types import Failure

BROKEN = Failure(kind="agent", error="ValueError: no tool", trace="  File agent.py, line 3")
LOST = Failure(kind="infrastructure", error="APIConnectionError: refused")
PNG = b"\x89PNG"


def test_a_run_directory_holds_its_settings_from_the_start(report: Report) -> None:
    assert yaml.safe_load((report.folder / "config.yaml").read_text()) == {
        "seed": 3,
        "engine": {"replicas": 1},
    }
    assert (report.folder / "metrics.jsonl").read_text() == ""


def test_metrics_are_one_object_a_step(report: Report, shown: RecordingDisplay) -> None:
    report.step(0, {"val/reward": 0.25})
    report.step(1, {"train/reward": 0.5})
    rows = metric_rows(report.folder)
    assert [row["step"] for row in rows] == shown.steps == [0, 1]
    assert (rows[0]["val/reward"], rows[1]["train/reward"]) == (0.25, 0.5)
    assert rows[0]["time/total_s"] <= rows[1]["time/total_s"]


def test_a_long_run_keeps_little_of_each_step(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingDisplay, "step", lambda *_: None)
    steps = 100

    def take(step: int) -> None:
        metrics = {f"metric/{number}": step + number / 7 for number in range(100)}
        report.step(step, metrics | {"train/reward": step / 7, "ledger/generated": 8.0 * step})

    take(0)  # what is made once does not count
    tracemalloc.start()
    try:
        for step in range(1, steps):
            take(step)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 1_000 * steps
    summary = report.finish({})
    assert (summary["steps"], summary["tokens"]) == (steps - 1, {"generated": 8 * (steps - 1)})


def test_the_summary_has_the_last_tokens_by_length(report: Report) -> None:
    report.step(1, {"ledger/generated": 9.0, "lengths/16/trained": 9.0})
    report.step(2, {"ledger/generated": 99.0, "lengths/16/trained": 30.0, "lengths/64/dropped": 69.0})
    report.step(2, {"val/step": 1.0, "val/reward": 0.5})  # an evaluation during training
    assert report.finish({})["tokens_by_length"] == {"16": {"trained": 30}, "64": {"dropped": 69}}


def test_distinct_errors_are_counted_up_to_a_limit(report: Report) -> None:
    failures = [Failure(kind="agent", error=f"ValueError: {number}") for number in range(1_200)]
    report.failures([make_finished(failure=failure) for failure in failures])
    assert len(report._failures) == 1_000
    summary = report.finish({})
    assert summary["rollouts_failed"] == 1_200


def test_the_summary_compares_the_first_and_last_validation(report: Report) -> None:
    report.step(0, {"val/reward": 0.25, "val/rollouts": 8, "val/failed": 1})
    report.step(1, {"train/reward": 0.5})
    report.step(2, {"train/reward": 0.6, "val/reward": 0.75, "val/rollouts": 8, "val/failed": 4})
    summary = report.finish({"total_rollouts": 48})
    assert json.loads((report.folder / "summary.json").read_text()) == summary
    assert (summary["reward"], summary["reward_before"], summary["reward_after"]) == (
        "val/reward",
        0.25,
        0.75,
    )
    assert (summary["steps"], summary["rollouts"], summary["rollouts_failed"]) == (2, 48, 0)
    assert summary["val_failed_share"] == 0.5
    assert (report.folder / "reward.png").read_bytes().startswith(PNG)
    assert not list(report.folder.glob("*.partial"))


def test_an_evaluation_beside_training_has_a_row_of_its_own(report: Report, shown: RecordingDisplay) -> None:
    report.step(0, {"weights/version": 0.0})
    report.step(1, {"train/reward": 0.5})
    report.evaluation(0, 1, {"val/reward": 0.25})
    report.step(2, {"train/reward": 0.6})
    report.evaluation(2, 2, {"val/reward": 0.75})
    rows = metric_rows(report.folder)
    assert [(row["step"], row.get("val/step")) for row in rows] == [
        (0, None),
        (1, None),
        (1, 0),
        (2, None),
        (2, 2),
    ]
    assert shown.steps == [0, 1, 1, 2, 2]
    summary = report.finish({})
    assert (summary["reward"], summary["reward_before"], summary["reward_after"]) == (
        "val/reward",
        0.25,
        0.75,
    )
    assert summary["steps"] == 2
    resumed = Report(report.folder, RecordingDisplay(), {}, last_logged_step=1)
    assert (resumed.evaluation_of(0) or {})["val/reward"] == 0.25
    assert resumed.evaluation_of(2) is None


def test_without_validation_the_summary_compares_training_rewards(report: Report) -> None:
    report.step(1, {"train/reward": 0.5})
    report.step(2, {"train/reward": 0.6})
    summary = report.finish({"total_rollouts": 1})
    assert (summary["reward"], summary["reward_before"], summary["reward_after"]) == (
        "train/reward",
        0.5,
        0.6,
    )


def test_a_run_of_no_steps_has_a_summary(report: Report) -> None:
    summary = report.finish({"total_rollouts": 0})
    assert (summary["reward_before"], summary["reward_after"], summary["steps"]) == (None, None, 0)


def test_the_summary_of_an_algorithm_with_its_own_loop_counts_by_status(report: Report) -> None:
    counts = {
        "total_rollouts": 5,
        "rollouts_succeeded": 3,
        "rollouts_failed": 2,
        "total_spans": 9,
        "runners_lost": 0,
    }
    summary = report.finish_plain(counts)
    assert (summary["rollouts"], summary["by_status"]) == (5, {"failed": 2, "succeeded": 3})
    assert summary["counts"] == counts
    assert json.loads((report.folder / "summary.json").read_text()) == summary


def test_an_earlier_runs_summary_and_plot_are_gone_when_a_run_starts(
    tmp_path: Path, shown: RecordingDisplay
) -> None:
    first = Report(tmp_path, shown, {})
    first.step(1, {"train/reward": 1.0})
    first.finish({"total_rollouts": 1})
    Report(tmp_path, shown, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_each_different_error_is_shown_once_and_all_are_counted(
    report: Report, shown: RecordingDisplay
) -> None:
    report.failures([make_finished(failure=f) for f in (BROKEN, LOST, BROKEN)])
    report.failures([make_finished(failure=BROKEN), make_finished(1.0)])
    assert len(shown.notes) == 2
    assert "ValueError: no tool" in shown.notes[0]
    assert "agent.py, line 3" in shown.notes[0]
    summary = report.finish({"total_rollouts": 5})
    assert summary["failures"] == {BROKEN.error: 3, LOST.error: 1}
    assert (summary["rollouts_failed"], summary["rollouts_lost"]) == (4, 1)


def test_no_more_than_the_stated_number_of_different_errors_is_shown(
    report: Report, shown: RecordingDisplay
) -> None:
    kinds = [Failure(kind="agent", error=f"ValueError: {i}") for i in range(3 * MAX_SHOWN_ERRORS)]
    report.failures([make_finished(failure=failure) for failure in kinds])
    assert len(shown.notes) == MAX_SHOWN_ERRORS
    summary = report.finish({"total_rollouts": 1})
    assert len(summary["failures"]) == MAX_SHOWN_ERRORS
    assert summary["rollouts_failed"] == 3 * MAX_SHOWN_ERRORS


def test_a_resumed_run_shows_the_advisories_that_hold(tmp_path: Path) -> None:
    failing = {"train/rollouts": 64.0, "train/failed": 60.0, "learner/skipped_steps": 1.0}
    first, second = RecordingDisplay(), RecordingDisplay()
    run = Report(tmp_path, first, {})
    for step in (1, 2, 3):
        run.step(step, failing if step < 3 else failing | {"learner/skipped_steps": 0.0})
    assert {advisory.kind for advisory in first.advisories} == {"most_failed", "skipped_gradients"}
    Report(tmp_path, second, {}, last_logged_step=3)
    assert [advisory.kind for advisory in second.advisories] == ["most_failed"]
