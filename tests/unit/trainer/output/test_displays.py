"""Displays of a run: plain, silent, live and in a notebook, and the tables at its end."""

import io
import math
from typing import Any

import pytest
from rich.console import Console
from unit_helpers import make_finished

from raylight.advisories import Advisory
from raylight.trainer.output.displays.guard import GuardedDisplay
from raylight.trainer.output.displays.lines import PlainDisplay, SilentDisplay
from raylight.trainer.output.displays.live import LiveDisplay, NotebookDisplay
from raylight.trainer.output.displays.progress import RunProgress, TimeEstimate
from raylight.trainer.output.displays.tables import print_run, print_summary
from raylight.trainer.output.displays.view import ProgressView, sparkline
from raylight.trainer.output.report import Report
from raylight.types import Failure

BROKEN = Failure(kind="agent", error="ValueError: no tool", trace="  File agent.py, line 3")
LOST = Failure(kind="infrastructure", error="APIConnectionError: refused")
ADVISORY = Advisory("no_signal", "warning", "in [60%] of the groups", "Take <b>other</b> tasks", 3, 3)


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def a_console(width: int = 140, **how: Any) -> Console:
    return Console(record=True, file=io.StringIO(), width=width, **how)


def shown(progress: RunProgress, width: int = 100, height: int = 40) -> list[str]:
    console = a_console(width, height=height)
    console.print(ProgressView(progress))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_plain_display_prints_a_line_a_step_as_it_is() -> None:
    console = a_console()
    with PlainDisplay(console, RunProgress(10)) as display:
        display.stage("starting [bold]things[/bold]")
        display.stage("2 runner(s) wait for rollouts")
        display.progress("train rollouts", 3, 8)  # progress that only a live display can overwrite
        display.step(1, {"train/reward": 0.25, "time/total_s": 20.0})
        display.step(2, {"train/reward": 0.5, "val/reward": 0.75, "unknown": 1.0, "time/total_s": 25.0})
        display.step(2, {"val/step": 1.0, "val/reward": 0.5, "time/total_s": 25.0})
        display.note("ValueError: [/red] oops")
        display.advise(ADVISORY)
    assert console.export_text().splitlines() == [
        "starting [bold]things[/bold]",
        "2 runner(s) wait for rollouts",
        "step 1/10  reward 0.250",
        "step 2/10  reward 0.500  validation 0.750  about 0:00:40 left",
        "evaluation of step 1/10  validation 0.500  about 0:00:40 left",
        "note: ValueError: [/red] oops",
        "warning: in [60%] of the groups. Take <b>other</b> tasks",
    ]


@pytest.mark.parametrize("live", [True, False])
def test_a_run_that_its_user_ends_counts_its_steps_only(live: bool) -> None:
    console = a_console(force_terminal=live)
    progress = RunProgress(0)
    with (LiveDisplay if live else PlainDisplay)(console, progress) as display:
        for step in (1, 2, 3):
            display.step(step, {"train/reward": 0.25, "time/total_s": 5.0 * step})
        status = shown(progress)[-1]
    text = console.export_text()
    assert "step 4  " in status
    assert not any(word in text + status for word in ("/0", " of ", " left"))


@pytest.mark.parametrize("live", [True, False])
def test_drifts_are_shown_once_there_are_any(live: bool) -> None:
    console = a_console(force_terminal=live)
    with (LiveDisplay if live else PlainDisplay)(console, RunProgress(10)) as display:
        display.step(1, {"trace/drifts": 0.0, "trace/rows_per_rollout": 1.0})
        before = console.export_text(clear=False)
        display.step(2, {"trace/drifts": 7.0, "trace/rows_per_rollout": 1.25})
    assert "drifts" not in before
    text = console.export_text()
    assert all(word in text for word in ("drifts", "7", "rows/rollout", "1.25"))


def test_the_silent_display_shows_notes_and_advisories_only() -> None:
    console = a_console()
    with SilentDisplay(console) as display:
        display.stage("starting")
        display.step(1, {"train/reward": 0.5})
        display.note("look")
        display.advise(ADVISORY)
    assert console.export_text().splitlines() == [
        "note: look",
        "warning: in [60%] of the groups. Take <b>other</b> tasks",
    ]


def test_the_view_has_steps_phases_time_left_and_the_last_advisory() -> None:
    clock = Clock()
    progress = RunProgress(30, "outputs/adder", clock)
    (status,) = shown(progress)
    assert status[2:] == "starting  0:00:00  raylight ui outputs/adder"  # after the spinner
    for step in range(21):
        clock.now = 10.0 * step
        progress.add(step, {"train/reward": step / 100, "train/tokens_per_s": 1e3, "time/total_s": clock.now})
    progress.advisory = ADVISORY
    progress.enter_phase("train rollouts", 3, 8)
    clock.now += 4
    progress.enter_phase("train rollouts", 6, 8)
    progress.enter_phase("update of the weights", 0, 1)
    lines = shown(progress)
    assert lines[0].split() == ["step", "reward", "validation", "tokens/s", "failed", "tokens/answer"] + [
        word for name in ("rollout", "update", "sync") for word in (name, "s")
    ]
    assert [line.split()[0] for line in lines[1:16]] == [f"{step}/30" for step in range(6, 21)]
    assert lines[15].split() == ["20/30", "0.200", "1000"]
    assert lines[16].startswith("reward 0.000 ▁▁")
    assert lines[16].endswith("██ 0.200")
    assert lines[17][2:] == "step 21 of 30  0:03:24  about 0:01:36 left  raylight ui outputs/adder"
    assert lines[18].split()[:2] == ["train", "rollouts"]
    assert lines[18].endswith("6/8 0:00:04")
    assert lines[19].split() == ["update", "of", "the", "weights", "0:00:00"]
    assert lines[20:] == ["warning at step 3: in [60%] of the groups. Take <b>other</b> tasks"]
    progress.enter_phase("train rollouts", 8, 8)
    progress.enter_phase("update of the weights", 1, 1)
    assert len(shown(progress)) == len(lines) - 2


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 24), (20, 12), (1, 1)])
def test_the_view_fits_the_terminal(width: int, height: int) -> None:
    progress = RunProgress(1000, "outputs/" + "long" * 20)
    for step in range(100):
        progress.add(
            step, {"train/reward": 0.5, "val/reward": 1e9, "trace/drifts": 1.0, "time/total_s": step}
        )
    progress.advisory = Advisory("drifts", "hint", "long words " * 200, "none", 1, 1)
    progress.enter_phase("train rollouts", 3, 8)
    lines = shown(progress, width, height)
    assert max(map(len, lines)) <= width
    if width >= 40:
        assert len(lines) <= height
        assert "reward" in lines[0]


def test_the_live_display_prints_what_stays_above_the_view() -> None:
    console = a_console(force_terminal=True)
    with LiveDisplay(console, RunProgress(30)) as display:
        display.stage("starting the [engine]")
        display.stage("the engine is ready")
        for step in range(1, 21):
            display.step(step, {"train/reward": step / 100})
        display.note("look at [this]")
        display.advise(ADVISORY)
        display.advise(Advisory("solved", "hint", "solved", "End the run", 9, 9))
        between = console.export_text(clear=False)
    text = console.export_text()
    assert "starting the [engine]\n" in between
    assert "the engine is ready\n" in between
    assert "look at [this]" in between
    assert "warning at step 3: in [60%] of the groups" in between
    assert "hint at step 9: solved. End the run\n" in text
    assert "20/30" in text[text.rindex("step") :]
    assert "starting" not in text[text.rindex("20/30") :]


@pytest.mark.parametrize("error", [SystemExit(1), OSError("the terminal is gone"), UnicodeError("no")])
def test_a_display_that_fails_is_left_out(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(SilentDisplay):
        notes = closed = 0

        def __exit__(self, *error: Any) -> None:
            self.closed += 1

        def note(self, text: str) -> None:
            self.notes += 1
            raise error

    broken = Broken(a_console())
    with GuardedDisplay(broken) as display:
        for _ in range(3):
            display.note("x")
            display.stage("y")
    assert (broken.notes, broken.closed) == (1, 1)
    assert "continues without showing" in caplog.text
    with pytest.raises(ValueError, match="of the run"), GuardedDisplay(broken):
        raise ValueError("of the run")


@pytest.mark.parametrize("display", ["live", "plain"])
def test_control_characters_of_agents_do_not_reach_the_terminal(display: str) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\u202e\ud800\x9b"
    console = a_console(force_terminal=display == "live")
    shows = (LiveDisplay if display == "live" else PlainDisplay)(console, RunProgress(3))
    with shows:
        shows.stage(hostile)
        shows.note(hostile)
        shows.advise(Advisory("x", "hint", hostile, hostile, 1, 1))
    text = console.export_text()
    assert text.count("\\x1b]0;owned\\x07\\x1b[2J\\u202e\\ud800\\x9b") >= 3
    assert not {*"\x1b\x07\u202e\ud800\x9b"} & {*text}


def test_the_live_display_survives_an_error_within() -> None:
    console = a_console(force_terminal=True)

    def fail() -> None:
        with LiveDisplay(console, RunProgress(30)):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()


@pytest.mark.framework("IPython")
def test_the_output_of_a_notebook_is_replaced_and_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    contents: list[dict[str, str]] = []

    class Handle:
        def update(self, content: dict[str, str], raw: bool) -> None:
            assert raw
            contents.append(content)

    monkeypatch.setattr("IPython.display.display", lambda *_, **__: Handle())
    console = a_console()
    progress = RunProgress(30, "outputs/<i>adder</i>")
    with NotebookDisplay(console, progress) as display:
        display.step(1, {"train/reward": 0.5})
        display.advise(ADVISORY)
        display._update()
        display._update()  # nothing to replace
    assert "&lt;b&gt;other&lt;/b&gt;" in contents[0]["text/html"]
    assert "&lt;i&gt;adder" in contents[0]["text/html"]
    assert "<b>" not in contents[0]["text/html"]
    assert "1/30" in contents[-1]["text/plain"]
    assert "starting" not in contents[-1]["text/plain"]
    assert "Take <b>other</b> tasks" in console.export_text()
    assert not display._thread.is_alive()


def test_the_time_left_is_that_of_the_usual_step_and_its_evaluations() -> None:
    estimate = TimeEstimate(20)
    assert estimate.left(5.0) is None
    total = 30.0  # the start of the components is not a step
    estimate.add(0, {"time/total_s": total, "time/val_s": 8.0})
    assert estimate.left(5.0) is None
    for step in range(1, 11):
        total += 2.0 + (50.0 if step == 4 else 0.0)  # one step was slow
        metrics = {}
        if step % 5 == 0:
            total += 8.0
            metrics = {"time/val_s": 8.0}
        estimate.add(step, {"time/total_s": total, **metrics})
        estimate.add(step, {"time/total_s": total, "val/step": 1.0, "time/val_s": 100.0})
    assert estimate.left(0.0) == pytest.approx(10 * 2.0 + 2 * 8.0)
    assert estimate.left(1.0) == pytest.approx(35.0)
    assert estimate.left(1e6) == pytest.approx(36.0 - 3.6)
    estimate.add(30, {"time/total_s": total})  # beyond the end, after a gap
    assert estimate.left(0.0) == 0.0


def test_a_sparkline_fits_its_width_whatever_the_values() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([0.5], 10) == "▁"
    assert sparkline([1.0, math.nan, 1.0], 10) == "▁▁"
    assert sparkline([0.0, 1.0, math.inf, 2.0], 10) == "▁▅█"
    assert len(sparkline(list(range(1000)), 7)) <= 7


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
