"""Evaluation without a cluster: metrics, the best model, early stopping, and the state of the Evaluator."""

import itertools
import json
import math
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording_display import RecordingDisplay
from unit_helpers import make_finished

from raylight.algorithms.policy import GRPO
from raylight.errors import ConfigError, RolloutsFailedError
from raylight.trainer.components.publication import PinnedAdapter
from raylight.trainer.loops.evaluation import Evaluator, describe_scores
from raylight.trainer.output.report import Report
from raylight.trainer.output.scores import best_of, measure, numbers_to, spread
from raylight.types import Failure, FinishedRollout

BROKEN = Failure(kind="agent", error="ValueError: no tool")
LOST = Failure(kind="infrastructure", error="APIConnectionError: refused")


def rolled(
    task: int, rewards: dict[str, float] | float | None = None, failure: Failure | None = None
) -> FinishedRollout:
    """A rollout of a task, whose agent gave one reward, or several by name."""
    named = rewards if isinstance(rewards, dict) else {} if rewards is None else {"primary": rewards}
    made = make_finished(next(iter(named.values()), None), failure=failure, group=f"val-{task}")
    return FinishedRollout(made.rollout, made.reward, made.generations, rewards=named)


# figures


def test_every_reward_has_its_mean_and_the_primary_one_is_the_first() -> None:
    finished = [
        rolled(0, {"right": 1.0, "short": 0.5}),
        rolled(1, {"right": 0.0, "short": 0.1, "reward": 1.0}),
    ]
    metrics = describe_scores(measure(finished, 1, None, 1.0))
    assert (metrics["val/reward"], metrics["val/reward/short"], metrics["val/reward/reward"]) == (
        0.5,
        0.3,
        1.0,
    )
    assert "val/reward/right" not in metrics
    assert (metrics["val/reward_std"], metrics["val/rollouts"], metrics["val/failed"]) == (0.5, 2, 0)
    assert metrics["val/response_tokens"] == 1.0
    assert not {"val/pass_at_k", "val/best_of_k"} & metrics.keys()  # each task was tried once


def test_of_several_samples_the_best_of_each_task_counts() -> None:
    finished = [rolled(0, 0.2), rolled(0, 1.0), rolled(1, 0.4), rolled(1, 0.6)]
    metrics = describe_scores(measure(finished, 2, None, 1.0))
    assert metrics["val/best_of_k"] == pytest.approx(0.8)
    assert metrics["val/pass_at_k"] == 0.5
    assert describe_scores(measure(finished, 2, None, 0.6))["val/pass_at_k"] == 1.0


def test_crashes_do_not_vanish_from_scores() -> None:
    crashed = [rolled(i % 10, failure=BROKEN) for i in range(39)]
    scores = measure([rolled(9, 1.0), *crashed], 4, None, 1.0)
    assert scores.primary.mean == pytest.approx(1 / 40)
    assert (scores.pass_at[1], scores.pass_at[4]) == pytest.approx((1 / 40, 1 / 10))
    costs = measure([rolled(0, -0.5), rolled(0, failure=BROKEN), rolled(0, failure=LOST)], 2, None, 1.0)
    assert (costs.primary.mean, costs.primary.rollouts) == (-0.5, 2)
    metrics = describe_scores(scores)
    assert (metrics["val/failed"], metrics["val/rollouts"]) == (39.0, 40.0)


def test_failures_count_with_their_reward_or_as_the_lowest() -> None:
    finished = [
        rolled(0, 1.0),
        rolled(0, failure=BROKEN),
        rolled(1, 1.0),
        rolled(1, failure=LOST),
        rolled(2, None),
    ]
    lowest, counted = measure(finished, 2, None, 1.0), measure(finished, 2, -1.0, 1.0)
    assert (lowest.failed, lowest.unscored, lowest.tasks, lowest.rollouts) == (2, 1, 3, 5)
    assert (lowest.primary.mean, lowest.primary.rollouts) == (pytest.approx(2 / 3), 3)
    assert (counted.primary.mean, counted.primary.rollouts) == (pytest.approx(1 / 3), 3)


def test_nothing_scored_has_no_figures() -> None:
    scores = measure([rolled(0, failure=LOST)], 2, None, 1.0)
    assert (scores.primary, scores.others, scores.best_of, scores.pass_at) == (None, {}, {}, {})
    assert "val/reward" not in describe_scores(scores)


def test_the_error_of_a_mean_is_that_of_its_tasks() -> None:
    """Repeating each rollout adds no knowledge, so that the error stays what it was."""
    draw = random.Random(0)
    groups = [[draw.random()] for _ in range(40)]
    once, thrice = spread(groups), spread([group * 3 for group in groups])
    assert once.error == pytest.approx(statistics.stdev([g[0] for g in groups]) / math.sqrt(40))
    assert thrice.error == pytest.approx(once.error)
    assert once.interval == (
        pytest.approx(once.mean - 1.96 * once.error),
        pytest.approx(once.mean + 1.96 * once.error),
    )
    assert spread([[0.0, 1.0]]).error is None
    assert spread([[0.0, 1.0]]).interval is None


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.integers(1, 6))
def test_best_of_k_is_the_mean_of_the_best_over_all_draws(values: list[float], k: int) -> None:
    draws = list(itertools.combinations(values, min(k, len(values))))
    assert best_of(values, k) == pytest.approx(statistics.fmean(map(max, draws)), abs=1e-9)


def test_pass_at_k_is_told_for_the_powers_of_two_and_all() -> None:
    assert [numbers_to(n) for n in (1, 2, 3, 8, 10)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 10],
    ]
    scores = measure([rolled(0, float(i == 0)) for i in range(4)], 4, None, 1.0)
    assert scores.pass_at == {1: 0.25, 2: 0.5, 4: 1.0}


# the Evaluator


def write_model(folder: Path, number: int) -> None:
    folder.mkdir()
    (folder / "weights").write_text(str(number))


@dataclass
class FakeLearners:
    saved: list[str] = field(default_factory=list)
    elsewhere: bool = False
    """True on a machine with another disk."""

    async def save(self, folder: str, pinned: Any = None) -> None:
        self.saved.append(folder)
        if not self.elsewhere:
            write_model(Path(folder), len(self.saved))


@dataclass
class FakeRollouts:
    """Gives each evaluation the next reward."""

    rewards: list[Any]
    learners: FakeLearners = field(default_factory=FakeLearners)
    asked: list[tuple[int, int]] = field(default_factory=list)

    async def evaluate(
        self, step: int, tasks: list[Any], samples: int, progress: Any, model: str | None = None
    ) -> list[FinishedRollout]:
        self.asked.append((len(tasks), samples))
        reward = self.rewards.pop(0)
        return [
            rolled(task, reward, BROKEN if reward is None else None)
            for task in range(len(tasks))
            for _ in range(samples)
        ]


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "run", RecordingDisplay(), {})


def evaluator_of(
    report: Report, rewards: list[Any], task: str = "task", **settings: Any
) -> tuple[Evaluator, FakeRollouts]:
    rollouts = FakeRollouts(rewards)
    algorithm = GRPO(model="m", **{"val_every": 1, "val_samples": 2, **settings})
    return Evaluator(rollouts, rollouts.learners, algorithm, [task] * 3, report), rollouts


async def after(evaluator: Evaluator, step: int, is_last: bool = False) -> dict[str, float]:
    """Return the metrics of the evaluation after a step, if one is due."""
    return await evaluator.evaluate(step) if evaluator.is_due(step, is_last) else {}


def best_json(report: Report) -> dict[str, Any]:
    return json.loads((report.folder / "best" / "best.json").read_text())


async def test_it_evaluates_before_training_when_due_and_at_the_end(report: Report) -> None:
    evaluator, rollouts = evaluator_of(report, [0.1, 0.2, 0.3], val_every=4)
    assert (await after(evaluator, 0))["val/reward"] == pytest.approx(0.1)
    evaluated = [step for step in range(1, 7) if await after(evaluator, step, step == 6)]
    assert evaluated == [4, 6]
    assert rollouts.asked == [(3, 2)] * 3


async def test_it_does_nothing_without_tasks_and_not_before_training_unless_wanted(report: Report) -> None:
    rollouts = FakeRollouts([0.5])
    idle = Evaluator(rollouts, rollouts.learners, GRPO(model="m", val_every=1), [], report)
    assert await after(idle, 0) == await after(idle, 1, True) == {}
    late, rollouts = evaluator_of(report, [0.5], val_before_train=False, val_every=0)
    assert await after(late, 0) == await after(late, 10) == {}
    assert (await after(late, 10, True))["val/reward"] == 0.5


async def test_calls_of_another_version_than_the_pinned_one_are_told_once(report: Report) -> None:
    evaluator, _ = evaluator_of(report, [0.5] * 3)
    for version, notes in ((0, 0), (7, 1), (8, 1)):  # version 0 sampled the rollouts
        metrics = await evaluator.measure(1, PinnedAdapter({"policy": "policy@step-1"}, version, {}))
        assert metrics["val/reward"] == 0.5
        shown: Any = report._display
        assert len(shown.notes) == notes
    assert "must send llm.model" in shown.notes[0]


async def test_without_evaluations_of_what_is_trained_none_is_the_best(report: Report) -> None:
    evaluator, _ = evaluator_of(report, [0.5], val_every=None)
    assert (await after(evaluator, 0))["val/reward"] == 0.5
    assert await after(evaluator, 10, True) == {}
    assert not (report.folder / "best").exists()


async def test_the_best_model_is_kept_with_its_metrics(report: Report) -> None:
    evaluator, rollouts = evaluator_of(report, [0.1, 0.6, 0.4, 0.6, 0.7])
    kept = []
    for step in range(5):
        await after(evaluator, step)
        kept.append((best_json(report)["step"], (report.folder / "best" / "weights").read_text()))
    assert kept == [(0, "1"), (1, "2"), (1, "2"), (1, "2"), (4, "3")]
    found = best_json(report)
    assert (found["metric"], found["mode"]) == ("val/reward", "max")
    assert found["value"] == found["metrics"]["val/reward"] == pytest.approx(0.7)
    assert len(rollouts.learners.saved) == 3
    assert sorted(p.name for p in report.folder.iterdir() if p.is_dir()) == ["best"]
    report.step(4, {"val/reward": 0.7})
    assert report.finish({})["best"] == {"metric": "val/reward", "step": 4, "value": pytest.approx(0.7)}


async def test_a_save_that_is_killed_leaves_the_former_best(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, rollouts = evaluator_of(report, [0.1, 0.9, 0.3])
    await after(evaluator, 1)

    async def killed(folder: str, pinned: Any = None) -> None:
        write_model(Path(folder), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(rollouts.learners, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        await after(evaluator, 2)
    assert best_json(report)["value"] == pytest.approx(0.1)


async def test_a_kill_between_the_renames_is_mended_on_resuming(report: Report) -> None:
    evaluator, _ = evaluator_of(report, [0.5])
    await after(evaluator, 1)
    (report.folder / "best").rename(report.folder / "best.old")
    again, _ = evaluator_of(report, [])
    again.load_state_dict(evaluator.state_dict())
    assert best_json(report)["value"] == 0.5


async def test_any_metric_may_tell_the_best_and_lower_may_be_better(report: Report) -> None:
    rewards = [{"right": 0.9, "cost": 5.0}, {"right": 0.1, "cost": 3.0}, {"right": 1.0, "cost": 4.0}]
    evaluator, _ = evaluator_of(report, rewards, best="val/reward/cost", best_mode="min")
    for step in range(3):
        await after(evaluator, step)
    assert (best_json(report)["step"], best_json(report)["value"]) == (1, 3.0)


async def test_a_metric_that_there_is_not_is_an_error_that_names_those_there_are(report: Report) -> None:
    evaluator, _ = evaluator_of(report, [0.5], best="val/accuracy")
    with pytest.raises(ConfigError, match=r"best='val/accuracy' is not a metric .*val/reward,"):
        await after(evaluator, 1)


async def test_without_best_nothing_is_saved(report: Report) -> None:
    evaluator, rollouts = evaluator_of(report, [0.1, 0.9], best=None)
    for step in range(2):
        await after(evaluator, step)
    assert rollouts.learners.saved == []
    assert report.finish({})["best"] is None


async def test_a_disk_that_is_not_ours_is_told(report: Report) -> None:
    evaluator, rollouts = evaluator_of(report, [0.1])
    rollouts.learners.elsewhere = True
    await after(evaluator, 1)
    assert "shared storage" in report._display.notes[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rewards", "settings", "stops_at"),
    [
        ([0.5, 0.5, 0.4, 0.6], {"patience": 2}, 2),
        ([0.5, 0.4, 0.6, 0.5, 0.5], {"patience": 2}, 4),
        ([0.1, 0.2, 0.3, 0.4], {"patience": 1}, None),
        (
            [0.10, 0.14, 0.18, 0.22, 0.26],
            {"patience": 3, "min_delta": 0.1},
            None,
        ),  # slow, but it does get there
        ([0.10, 0.14, 0.18, 0.19, 0.3], {"patience": 3, "min_delta": 0.1}, 3),
        ([0.5, 0.4, 0.3], {"patience": 1, "best_mode": "min"}, None),
        ([0.5, 0.4, 0.3, 0.2], {}, None),
    ],
)
async def test_patience_ends_training(
    report: Report, rewards: list[float], settings: dict[str, Any], stops_at: int | None
) -> None:
    evaluator, _ = evaluator_of(report, list(rewards), **settings)
    stopped = None
    for step in range(len(rewards)):
        await after(evaluator, step)
        if evaluator.stop_reason and stopped is None:
            stopped = step
            assert "patience" in evaluator.stop_reason
    assert stopped == stops_at


@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_a_resumed_evaluator_decides_as_one_that_was_never_stopped(report: Report, cut: int) -> None:
    rewards = [0.5, 0.6, 0.4, 0.55, 0.5]
    first, _ = evaluator_of(report, rewards[:cut], patience=3)
    for step in range(cut):
        await after(first, step)
    state = json.loads(json.dumps(first.state_dict()))
    second, _ = evaluator_of(report, rewards[cut:], patience=3)
    second.load_state_dict(state)
    assert report.best is not None
    reasons = []
    for step in range(cut, 5):
        await after(second, step)
        reasons.append((step, bool(second.stop_reason)))
    assert reasons == [(step, step == 4) for step in range(cut, 5)]
    assert (best_json(report)["step"], best_json(report)["value"]) == (1, 0.6)


@pytest.mark.parametrize("now", [{"best": "val/reward_std"}, {"best_mode": "min"}, {"task": "harder"}])
async def test_the_best_by_another_metric_or_on_other_tasks_is_not_compared_with(
    report: Report, now: dict[str, Any]
) -> None:
    first, _ = evaluator_of(report, [0.9, 0.8], patience=2)
    await after(first, 1)
    await after(first, 2)
    second, rollouts = evaluator_of(report, [0.85, 0.5], patience=2, **now)
    second.load_state_dict(first.state_dict())
    assert (report.best, second.stop_reason) == (None, None)
    metrics = await after(second, 3)
    assert len(rollouts.learners.saved) == 1
    found = best_json(report)
    assert (found["step"], found["value"]) == (3, metrics[found["metric"]])
    second.load_state_dict(second.state_dict())
    assert second.state_dict()["best"]["step"] == 3


async def test_the_best_model_stays_the_best_without_validation_tasks(report: Report) -> None:
    first, rollouts = evaluator_of(report, [0.9, 0.8, 0.85], patience=2)
    await after(first, 1)
    await after(first, 2)
    report.best = None
    without = Evaluator(rollouts, rollouts.learners, GRPO(model="m", val_every=1), [], report)
    without.load_state_dict(first.state_dict())
    assert report.best == best_json(report)
    again, _ = evaluator_of(report, [0.85], patience=2)
    again.load_state_dict(without.state_dict())
    await after(again, 3)
    assert again.stop_reason
    assert best_json(report)["step"] == 1


async def test_a_better_model_saved_after_the_checkpoint_stays_the_best(report: Report) -> None:
    first, _ = evaluator_of(report, [0.5, 0.9])
    await after(first, 1)
    state = first.state_dict()
    await after(first, 2)
    second, rollouts = evaluator_of(report, [0.8])
    second.load_state_dict(state)
    await after(second, 2)
    assert rollouts.learners.saved == []
    assert report.best == best_json(report)
    assert best_json(report)["value"] == 0.9


async def test_an_evaluation_without_any_reward_is_an_error(report: Report) -> None:
    evaluator, _ = evaluator_of(report, [None])
    with pytest.raises(RolloutsFailedError, match="no tool"):
        await after(evaluator, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"patience": 2, "best": None},
        {"patience": 2, "val_every": 0},
        {"min_delta": 0.1},
        {"patience": 0},
        {"best_mode": "most"},
    ],
)
def test_settings_that_nothing_would_read_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        GRPO(model="m", **settings)
