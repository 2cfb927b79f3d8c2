"""The trainer's parts that need no cluster: checks of what is given, what a step says, the run directory, the displays."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from unit_helpers import make_finished

from raylight.errors import (
    DatasetError,
    EmptyTraceError,
    ModelNotFoundError,
    RewardError,
    RolloutsFailedError,
)
from raylight.experience.batch import BatchRules, build_batch
from raylight.experience.task_sampler import TaskSampler
from raylight.trainer.display import LiveDisplay, PlainDisplay, SilentDisplay, print_run, print_summary
from raylight.trainer.inputs import as_dataset, as_tasks, resolve_model
from raylight.trainer.outcome import describe, raise_if_hopeless
from raylight.trainer.plot import plot_rewards
from raylight.trainer.report import MAX_SHOWN_ERRORS, Report
from raylight.types import GREEDY, Failure

BROKEN = Failure(kind="agent", error="ValueError: no tool", trace="  File agent.py, line 3")
LOST = Failure(kind="infrastructure", error="APIConnectionError: refused")
PNG = b"\x89PNG"

# datasets and models


class Unsized:
    def __getitem__(self, index: int) -> int:
        if index >= 3:
            raise IndexError
        return index


class Sized(Unsized):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    "dataset",
    [[0, 1, 2], (0, 1, 2), range(3), Sized(), (i for i in range(3))],
    ids=lambda d: type(d).__name__,
)
def test_a_dataset_is_anything_with_tasks_in_it(dataset: Any) -> None:
    assert as_tasks(dataset, "train_dataset", required=True) == [0, 1, 2]


def test_an_index_without_a_length_is_read_or_refused() -> None:
    try:
        tasks = as_tasks(Unsized(), "train_dataset", required=True)
    except DatasetError:
        return
    assert tasks == [0, 1, 2]


@pytest.mark.parametrize("dataset", ["tasks.json", b"x", {"a": 1}, 3, object()])
def test_what_is_no_sequence_of_tasks_is_refused_by_name_and_type(dataset: Any) -> None:
    with pytest.raises(DatasetError, match=f"val_dataset.*{type(dataset).__name__}"):
        as_tasks(dataset, "val_dataset", required=False)


def test_what_can_be_read_only_once_is_not_used_up_by_the_check() -> None:
    assert as_dataset((i for i in range(3)), "train_dataset") == [0, 1, 2]
    given = Sized()
    assert as_dataset(given, "train_dataset") is given
    assert as_dataset(None, "train_dataset") is None
    for empty in ([], (), iter([]), {}.keys()):
        with pytest.raises(DatasetError, match="train_dataset is empty"):
            as_dataset(empty, "train_dataset")


def test_an_empty_or_missing_dataset_is_an_error_where_it_is_required() -> None:
    assert as_tasks(None, "val_dataset", required=False) == []
    with pytest.raises(DatasetError, match="train_dataset is missing"):
        as_tasks(None, "train_dataset", required=True)
    with pytest.raises(DatasetError, match="train_dataset is empty"):
        as_tasks([], "train_dataset", required=True)


def test_a_model_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        with pytest.raises(ModelNotFoundError, match=name):
            resolve_model(str(tmp_path))
        (tmp_path / name).write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("model", ["nowhere", "./no/where", "/no/where", "~/no-such-folder", "a/b/c"])
def test_a_missing_folder_is_named(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no model folder"):
        resolve_model(model)


@pytest.mark.parametrize("model", ["no-such-owner/no-such-model", "no such owner/model", "a/..b", "owner/"])
def test_a_hub_name_that_is_not_cached_is_an_error_and_nothing_is_downloaded(model: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve_model(model)


# the loop's judgements


def test_one_reward_is_enough_to_go_on() -> None:
    raise_if_hopeless([make_finished(failure=BROKEN), make_finished(0.0)], None)


def test_a_batch_of_failures_ends_with_the_most_frequent_reason_and_its_trace() -> None:
    with pytest.raises(
        RolloutsFailedError,
        match=r"(?s)all 3 .* failed, 2 of them with ValueError: no tool.*agent\.py, line 3",
    ):
        raise_if_hopeless([make_finished(failure=f) for f in (LOST, BROKEN, BROKEN)], None)


def test_a_batch_without_any_score_says_that_the_agent_returns_none() -> None:
    with pytest.raises(RolloutsFailedError, match=r"none of 2 rollouts was scored.*None"):
        raise_if_hopeless([make_finished(None), make_finished(None)], 0.0)


def test_a_wrong_reward_keeps_its_own_message() -> None:
    failure = Failure(kind="reward", error="RewardError: the agent returned 'good'")
    for failure_reward in (None, 0.0):
        with pytest.raises(RewardError, match=r"^the agent returned 'good'$"):
            raise_if_hopeless([make_finished(failure=failure)], failure_reward)


def test_failures_with_a_reward_are_learned_from_unless_none_called_the_model() -> None:
    raise_if_hopeless([make_finished(failure=BROKEN)], -1.0)
    with pytest.raises(EmptyTraceError, match=r"ValueError: no tool"):
        raise_if_hopeless([make_finished(failure=BROKEN, calls=0)], -1.0)


def test_a_lost_infrastructure_is_never_learned_from() -> None:
    with pytest.raises(RolloutsFailedError, match="APIConnectionError"):
        raise_if_hopeless([make_finished(failure=LOST)], 0.0)


def test_greedy_rollouts_are_not_described() -> None:
    sampled = [make_finished(1.0, group="g"), make_finished(0.0, group="g")]
    greedy = make_finished(0.25, group="g")
    greedy.rollout.metadata[GREEDY] = True
    content = build_batch(sampled, BatchRules())[1]
    alone, together = (describe(finished, content, seconds=1.0) for finished in (sampled, [*sampled, greedy]))
    assert (together["train/rollouts"], together["train/reward"]) == (2, 0.5)
    tokens = together.pop("train/tokens_per_s") - alone.pop("train/tokens_per_s")
    assert tokens == sum(len(call.output_ids) for call in greedy.generations) > 0
    assert together == alone


def test_a_step_is_described_by_its_rollouts() -> None:
    finished = [make_finished(1.0, calls=2), make_finished(0.0), make_finished(failure=BROKEN, calls=0)]
    metrics = describe(finished, build_batch(finished, BatchRules())[1], seconds=2.0)
    assert metrics["train/rollouts"] == 3
    assert (metrics["train/trained"], metrics["train/failed"]) == (2, 1)
    assert (metrics["train/reward"], metrics["train/reward_std"]) == (0.5, 0.5)
    assert (metrics["train/response_tokens"], metrics["train/calls"], metrics["train/tokens_per_s"]) == (
        1.0,
        1.0,
        1.5,
    )


def test_a_step_without_rewards_or_calls_says_nothing_about_them() -> None:
    finished = [make_finished(failure=LOST, calls=0)]
    metrics = describe(finished, build_batch(finished, BatchRules())[1], seconds=1.0)
    assert not {"train/reward", "train/reward_std", "train/response_tokens", "train/calls"} & set(metrics)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_batches_are_full_and_every_pass_has_every_task_once(count: int, size: int, seed: int) -> None:
    tasks = list(range(count))
    batches = list(itertools.islice(TaskSampler(tasks, size, seed), 6))
    assert {len(batch) for batch in batches} == {size}
    stream = [task for batch in batches for task in batch]
    for start in range(0, len(stream) - count + 1, count):
        assert sorted(stream[start : start + count]) == tasks
    assert batches == list(itertools.islice(TaskSampler(tasks, size, seed), 6))
    assert tasks == list(range(count))


def test_each_pass_is_shuffled_anew() -> None:
    passes = list(itertools.islice(TaskSampler(list(range(20)), 20, 0), 3))
    assert passes[0] != passes[1] != passes[2]


# the run directory


class Shown:
    """A display that remembers."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.steps: list[int] = []
        self.notes: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def report(tmp_path: Path, shown: Shown) -> Report:
    return Report(tmp_path / "deep" / "run", shown, {"seed": 3, "engine": {"replicas": 1}})


def test_a_run_directory_holds_its_settings_from_the_start(report: Report) -> None:
    assert yaml.safe_load((report.folder / "config.yaml").read_text()) == {
        "seed": 3,
        "engine": {"replicas": 1},
    }
    assert (report.folder / "metrics.jsonl").read_text() == ""


def test_metrics_are_one_object_a_step(report: Report, shown: Shown) -> None:
    report.step(0, {"val/reward": 0.25})
    report.step(1, {"train/reward": 0.5})
    rows = [json.loads(line) for line in (report.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == shown.steps == [0, 1]
    assert (rows[0]["val/reward"], rows[1]["train/reward"]) == (0.25, 0.5)
    assert rows[0]["time/total_s"] <= rows[1]["time/total_s"]


def test_the_summary_compares_the_first_and_last_validation(report: Report) -> None:
    report.step(0, {"val/reward": 0.25})
    report.step(1, {"train/reward": 0.5})
    report.step(2, {"train/reward": 0.6, "val/reward": 0.75})
    summary = report.finish({"total_rollouts": 48})
    assert json.loads((report.folder / "summary.json").read_text()) == summary
    assert (summary["reward"], summary["reward_before"], summary["reward_after"]) == (
        "val/reward",
        0.25,
        0.75,
    )
    assert (summary["steps"], summary["rollouts"], summary["rollouts_failed"]) == (2, 48, 0)
    assert (report.folder / "reward.png").read_bytes().startswith(PNG)
    assert not list(report.folder.glob("*.partial"))


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


def test_an_earlier_runs_summary_and_plot_are_gone_when_a_run_starts(tmp_path: Path, shown: Shown) -> None:
    first = Report(tmp_path, shown, {})
    first.step(1, {"train/reward": 1.0})
    first.finish({"total_rollouts": 1})
    Report(tmp_path, shown, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_each_different_error_is_shown_once_and_all_are_counted(report: Report, shown: Shown) -> None:
    report.failures([make_finished(failure=f) for f in (BROKEN, LOST, BROKEN)])
    report.failures([make_finished(failure=BROKEN), make_finished(1.0)])
    assert len(shown.notes) == 2
    assert "ValueError: no tool" in shown.notes[0]
    assert "agent.py, line 3" in shown.notes[0]
    summary = report.finish({"total_rollouts": 5})
    assert summary["failures"] == {BROKEN.error: 3, LOST.error: 1}
    assert (summary["rollouts_failed"], summary["rollouts_lost"]) == (4, 1)


def test_no_more_than_the_stated_number_of_different_errors_is_shown(report: Report, shown: Shown) -> None:
    kinds = [Failure(kind="agent", error=f"ValueError: {i}") for i in range(3 * MAX_SHOWN_ERRORS)]
    report.failures([make_finished(failure=failure) for failure in kinds])
    assert len(shown.notes) == MAX_SHOWN_ERRORS
    summary = report.finish({"total_rollouts": 1})
    assert len(summary["failures"]) == MAX_SHOWN_ERRORS
    assert summary["rollouts_failed"] == 3 * MAX_SHOWN_ERRORS


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{"step": 0, "val/reward": 0.1}],
        [
            {"step": 1, "train/reward": 0.1, "time/rollout_s": 1.0},
            {"step": 2, "time/rollout_s": 1.0, "time/update_s": 0.5},
        ],
    ],
    ids=["nothing", "validation only", "a step without update"],
)
def test_a_plot_is_drawn_of_any_history(history: list[dict[str, float]], tmp_path: Path) -> None:
    plot_rewards(history, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(PNG)


# displays


def a_console(**how: Any) -> Console:
    return Console(record=True, file=io.StringIO(), width=140, **how)


def test_the_plain_display_prints_a_line_a_step_as_it_is() -> None:
    console = a_console()
    with PlainDisplay(console, 10) as display:
        display.stage("starting [bold]things[/bold]")
        display.stage("train rollouts 3/8")  # progress that only a live display can overwrite
        display.step(2, {"train/reward": 0.5, "val/reward": 0.75, "unknown": 1.0})
        display.note("ValueError: [/red] oops")
    assert console.export_text().splitlines() == [
        "starting [bold]things[/bold]",
        "step 2/10  reward 0.500  validation 0.750",
        "note: ValueError: [/red] oops",
    ]


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
