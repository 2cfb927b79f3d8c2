"""Each advisory: metrics at which it begins, metrics just below, its end, and what an alarm silences."""

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raylight.advisories.advisor import REPEAT_STEPS, Advisor, Advisory
from raylight.advisories.conditions import DRIFT_REMEDIES
from raylight.advisories.rules import RULES
from raylight.experience.trajectories.call_relations import TOKEN_DRIFTS
from raylight.types import DRIFTS

REPOSITORY = Path(__file__).parents[3]


def healthy(step: int, **changes: Any) -> dict[str, float]:
    """Return the metrics of a step of a run that learns."""
    noise = random.Random(step).uniform(-0.03, 0.03)
    return {
        "step": step,
        "train/rollouts": 128.0,
        "train/failed": 0.0,
        "failures/infrastructure": 0.0,
        "train/unscored": 0.0,
        "train/aborted": 0.0,
        "trace/calls": 128.0,
        "trace/drifts": 0.0,
        "trace/drifts_template": 0.0,
        "train/groups": 16.0,
        "train/groups_without_signal": min(step / 4, 8.0),
        "train/reward": min(0.3 + 0.01 * step, 0.8) + noise,
        "train/reward_std": 0.4,
        "train/reward_min": 0.0,
        "train/reward_max": 1.0,
        "train/response_tokens": 40.0 + step,
        "train/truncated_answers": 0.1,
        "learner/entropy": max(0.7 - 0.02 * step, 0.2),
        "learner/skipped_steps": 0.0,
        "critic/skipped_steps": 0.0,
        "mismatch/logprob_abs_mean": 1e-4,
        "mismatch/logprob_abs_max": 1e-3,
        "mismatch/warned": 0.0,
        "mismatch/ess": 0.99,
        "mismatch/stale_fraction": 0.0,
        "off_policy/calls": 0.0,
        "off_policy/repeated_seeds": 0.0,
        "time/rollout_s": 10.0,
        "time/update_s": 5.0,
        "time/sync_s": 0.2,
        **changes,
    }


def run(steps: int = 30, last: int = 0, **changes: Any) -> list[dict[str, float]]:
    """Return the rows of a run whose last steps have other metrics."""
    return [healthy(step, **(changes if step > steps - last else {})) for step in range(1, steps + 1)]


def read_advisories(rows: list[dict[str, Any]]) -> list[Advisory]:
    advisor = Advisor()
    for row in rows:
        advisor.add(row)
    return advisor.advisories


def kinds(rows: list[dict[str, float]]) -> list[str]:
    return [item.kind for item in read_advisories(rows) if item.is_active]


def evaluated(rewards: list[float], rollouts: float = 256.0) -> list[dict[str, float]]:
    rows = run()
    for index, reward in enumerate(rewards):
        rows[5 * index + 4] |= {
            "val/reward": reward,
            "val/reward_error": 0.02,
            "val/rollouts": rollouts,
        }
    return rows


def test_a_healthy_run_has_no_advisory() -> None:
    assert read_advisories(run(60)) == []
    assert read_advisories([]) == []


SOLVED = {"train/reward": 0.97, "train/groups_without_signal": 12.0}
SAME = {"train/reward": 0.5, "train/reward_std": 0.0}


@pytest.mark.parametrize(
    ("kind", "last", "fires", "below"),
    [
        ("most_failed", 2, {"train/failed": 70.0}, {"train/failed": 64.0}),
        ("some_failed", 5, {"train/failed": 14.0}, {"train/failed": 12.0}),
        ("infrastructure", 5, {"failures/infrastructure": 7.0}, {"failures/infrastructure": 6.0}),
        ("aborted_calls", 5, {"train/aborted": 8.0}, {"train/aborted": 0.0}),
        ("skipped_gradients", 1, {"learner/skipped_steps": 1.0}, {"learner/skipped_steps": 0.0}),
        ("reward_collapsed", 5, {"train/reward": 0.0}, {"train/reward": 0.1}),
        ("stalled_phase", 1, {"time/update_s": 40.0}, {"time/update_s": 29.0}),
        ("stalled_phase", 1, {"time/rollout_s": 61.0}, {"time/rollout_s": 59.0}),
        ("one_reward", 5, SAME, SAME | {"train/reward_std": 0.01}),
        ("no_signal", 5, {"train/groups_without_signal": 9.0}, {"train/groups_without_signal": 8.0}),
        ("no_signal", 5, {"train/share_without_signal": 0.6}, {"train/share_without_signal": 0.5}),
        ("solved", 5, SOLVED, SOLVED | {"train/reward": 0.8}),
        ("truncated_answers", 3, {"train/truncated_answers": 0.3}, {"train/truncated_answers": 0.25}),
        ("rising_mismatch", 3, {"mismatch/logprob_abs_mean": 0.02}, {"mismatch/logprob_abs_mean": 0.009}),
        ("mismatch", 1, {"mismatch/warned": 1.0}, {"mismatch/logprob_abs_mean": 0.1}),
        ("off_policy_tokens", 3, {"mismatch/ess": 0.4}, {"mismatch/ess": 0.6}),
        ("old_weights", 2, {"mismatch/stale_fraction": 1.0}, {"mismatch/stale_fraction": 0.99}),
        ("longer_answers", 3, {"train/response_tokens": 250.0}, {"train/response_tokens": 150.0}),
        ("low_entropy", 3, {"learner/entropy": 0.01}, {"learner/entropy": 0.1}),
        ("unscored", 5, {"train/unscored": 8.0}, {"train/unscored": 6.0}),
        ("off_policy_calls", 1, {"off_policy/calls": 1.0}, {"off_policy/calls": 0.0}),
        ("drifts", 5, {"trace/drifts": 9.0, "trace/drifts_template": 9.0}, {"trace/drifts": 6.0}),
        (
            "engine_waits",
            15,
            {"async/engine_idle_s": 6.0, "async/trainer_idle_s": 0.0},
            {"async/engine_idle_s": 4.0},
        ),
        ("learner_waits", 15, {"async/trainer_idle_s": 6.0}, {"async/trainer_idle_s": 4.0}),
        ("in_turn", 10, {"time/update_s": 10.0}, {"time/update_s": 3.0}),
    ],
)
def test_each_rule(kind: str, last: int, fires: dict, below: dict) -> None:
    assert kind in kinds(run(last=last, **fires))
    assert kind not in kinds(run(last=last, **below))


def test_falling_validation() -> None:
    assert "validation_falls" in kinds(evaluated([0.5, 0.6, 0.7, 0.8, 0.6, 0.6]))
    assert "validation_falls" not in kinds(evaluated([0.5, 0.6, 0.7, 0.8, 0.6, 0.78]))
    assert "validation_falls" not in kinds(evaluated([0.5, 0.6, 0.7, 0.8, 0.6, 0.6], rollouts=2.0))


def test_metrics_that_are_missing_or_not_finite_prove_nothing() -> None:
    bare = [{"step": float(step), "train/rollouts": 8.0} for step in range(40)]
    assert read_advisories(bare) == []
    for value in (float("nan"), float("inf"), None):
        rows = [dict.fromkeys(healthy(1), value) | {"step": float(step)} for step in range(40)]
        assert read_advisories(rows) == []


def test_an_advisory_is_announced_once_and_ends() -> None:
    advisor = Advisor()
    told = [advisor.add(row) for row in run(last=10, **{"train/truncated_answers": 0.9})]
    assert [item.kind for items in told for item in items] == ["truncated_answers"]
    later = range(31, 31 + REPEAT_STEPS + 5)
    assert [advisor.add(healthy(step)) for step in later] == [[]] * len(later)
    (ended,) = advisor.advisories
    assert not ended.is_active
    assert ended.first_step == 21
    assert ended.to_json()["remedy"]
    again = [advisor.add(healthy(step, **{"train/truncated_answers": 0.9})) for step in range(46, 50)]
    assert [item.kind for items in again for item in items] == ["truncated_answers"]


@pytest.mark.parametrize("name", ["async/engine_idle_s", "async/trainer_idle_s"])
def test_a_run_whose_agents_are_outside_may_wait_for_them(name: str) -> None:
    assert kinds(run(last=20, **{"async/trainer_idle_s": 0.0, name: 9.0}))
    assert kinds(run(last=20, **{"async/trainer_idle_s": 0.0, name: 9.0, "sessions/begun": 8.0})) == []


def test_an_alarm_silences_hints() -> None:
    waits = {"async/engine_idle_s": 9.0, "async/trainer_idle_s": 0.0}
    assert kinds(run(last=20, **waits)) == ["engine_waits"]
    assert kinds(run(last=20, **waits, **{"train/failed": 128.0})) == ["most_failed"]


def test_rules_are_named_once_and_alarms_come_first() -> None:
    assert len({rule.kind for rule in RULES}) == len(RULES)
    order = ["alarm", "warning", "hint"]
    assert sorted(RULES, key=lambda rule: order.index(rule.level)) == RULES


def test_a_drift_of_each_kind_has_a_remedy_and_the_page_exists() -> None:
    assert {*DRIFT_REMEDIES} == set(DRIFTS)
    assert not {relation.removeprefix("drift_") for relation in TOKEN_DRIFTS} & {*DRIFT_REMEDIES}
    (page,) = (re.search(r"\((.*)\)", rule.remedy) for rule in RULES if rule.kind == "drifts")
    assert page is not None
    path, _, anchor = page[1].partition("#")
    headings = re.findall("^## (.*)$", (REPOSITORY / path).read_text(), re.MULTILINE)
    assert anchor in {heading.lower().replace(",", "").replace(" ", "-") for heading in headings}


def test_details_of_the_run_are_part_of_what_is_announced() -> None:
    advisor = Advisor()
    row = healthy(1, **{"off_policy/calls": 3.0})
    (announced,) = advisor.add(row, {"off_policy_calls": "Most often an agent sampled with top_p=0.8"})
    assert "loss, because" in announced.text
    assert "in metrics.jsonl). Most often an agent sampled with top_p=0.8. override" in str(announced)


def test_neither_ray_nor_torch_is_imported() -> None:
    code = "import sys, raylight.advisories; print({'ray', 'torch', 'rich'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip() == "set()"
