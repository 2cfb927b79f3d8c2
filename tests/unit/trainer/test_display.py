"""Displays of a run: plain, silent and live, and the summary at its end."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import pytest
from rich.console import Console
from unit_helpers import make_finished

from raylight.trainer.display import LiveDisplay, PlainDisplay, SilentDisplay, print_run, print_summary
from raylight.trainer.report import Report
from raylight.types import Failure

BROKEN = Failure(kind="agent", error="ValueError: no tool", trace="  File agent.py, line 3")
LOST = Failure(kind="infrastructure", error="APIConnectionError: refused")


def a_console(**how: Any) -> Console:
    return Console(record=True, file=io.StringIO(), width=140, **how)


def test_the_plain_display_prints_a_line_a_step_as_it_is() -> None:
    console = a_console()
    with PlainDisplay(console, 10) as display:
        display.stage("starting [bold]things[/bold]")
        display.stage("2 runner(s) wait for rollouts")
        display.progress("train rollouts 3/8")  # progress that only a live display can overwrite
        display.step(2, {"train/reward": 0.5, "val/reward": 0.75, "unknown": 1.0})
        display.step(2, {"val/step": 1.0, "val/reward": 0.5})
        display.note("ValueError: [/red] oops")
    assert console.export_text().splitlines() == [
        "starting [bold]things[/bold]",
        "2 runner(s) wait for rollouts",
        "step 2/10  reward 0.500  validation 0.750",
        "evaluation of step 1/10  validation 0.500",
        "note: ValueError: [/red] oops",
    ]


@pytest.mark.parametrize("live", [True, False])
def test_drifts_are_shown_once_there_are_any(live: bool) -> None:
    console = a_console(force_terminal=live)
    with (LiveDisplay if live else PlainDisplay)(console, 10) as display:
        display.step(1, {"trace/drifts": 0.0, "trace/rows_per_rollout": 1.0})
        before = console.export_text(clear=False)
        display.step(2, {"trace/drifts": 7.0, "trace/rows_per_rollout": 1.25})
    assert "drifts" not in before
    text = console.export_text()
    assert all(word in text for word in ("drifts", "7", "rows/rollout", "1.25"))


def test_the_silent_display_shows_notes_only() -> None:
    console = a_console()
    with SilentDisplay(console, 10) as display:
        display.stage("starting")
        display.step(1, {"train/reward": 0.5})
        display.note("look")
    assert console.export_text() == "note: look\n"


def test_the_live_display_shows_the_last_steps_in_a_table() -> None:
    console = a_console(force_terminal=True)
    with LiveDisplay(console, 30) as display:
        display.stage("rolling [out]")
        for step in range(1, 21):
            display.step(step, {"train/reward": step / 100})
        display.note("look at [this]")
    text = console.export_text()
    assert "look at [this]" in text
    table = text[text.rindex("step") :]
    assert "20/30" in table
    assert "0.200" in table
    assert "validation" in table
    assert "5/30" not in Counter(table.split())  # only the last fifteen stay


def test_the_live_display_survives_an_error_within() -> None:
    console = a_console(force_terminal=True)

    def fail() -> None:
        with LiveDisplay(console, 30):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()


def test_the_summary_of_a_run_with_its_own_loop_is_shown(
    capsys: pytest.CaptureFixture[str], report: Report
) -> None:
    print_run(
        report.finish_plain({"total_rollouts": 5, "rollouts_succeeded": 3, "rollouts_failed": 2}),
        str(report.folder),
    )
    print_run(report.finish_plain({}), str(report.folder))
    text = capsys.readouterr().out
    assert "5 rollouts (2 failed, 3 succeeded), 0 s" in text
    assert "0 rollouts (none), 0 s" in text
    assert f"{report.folder}/summary.json" in text
    assert f"{report.folder}/store.db" not in text


def test_the_summary_says_what_was_lost(capsys: pytest.CaptureFixture[str], report: Report) -> None:
    report.step(1, {"val/reward": 0.25})
    report.failures([make_finished(failure=BROKEN), make_finished(failure=LOST)])
    print_summary(report.finish({"total_rollouts": 8}), str(report.folder))
    text = capsys.readouterr().out
    assert "0.250" in text
    assert "1 steps, 8 rollouts, 2 failed (1 because of the infrastructure)" in text
    assert f"{report.folder}/reward.png" in text
