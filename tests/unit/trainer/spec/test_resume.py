"""Resuming: the point where a run starts, changed settings, metrics, and the former driver's store."""

import asyncio
import copy
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml
from recording_display import RecordingDisplay
from run_output import metric_rows
from run_settings import make_settings

import raylight as rl
from raylight import rewards
from raylight.config import LoraConfig
from raylight.errors import ConfigError, StoreError
from raylight.learner.state.checkpoints import TrainingStates
from raylight.store.tables.journal import Journal
from raylight.tasks import Curriculum, Mixture, Stages
from raylight.tasks.task_set import TaskSet
from raylight.trainer.components.run_components import RolloutComponents
from raylight.trainer.output.report import Report
from raylight.trainer.spec.resume import (
    ResumePoint,
    affects_updates,
    changed_settings,
    find_resume_point,
    fresh_start,
    prepare_states,
    resume_after,
    resume_point_of,
    state_metadata,
    wait_for_store,
)

CONFIG = {
    "name": "run-1",
    "seed": 0,
    "total_steps": 20,
    "algorithm": {
        "name": "GRPO",
        "model": "/m",
        "lr": 1e-4,
        "n_steps": 20,
        "lr_schedule": "constant",
        "critic": None,
    },
    "learner": {"n": 1, "lora": None},
    "group_reward": None,
    "tasks": {"number": 3, "digest": "abc"},
}


def changed(**values: object) -> dict:
    """CONFIG with changed values; two underscores in a name stand for a dot."""
    config = json.loads(json.dumps(CONFIG))
    for name, value in values.items():
        *sections, last = name.split("__")
        inner = config
        for section in sections:
            inner = inner[section]
        inner[last] = value
    return config


@pytest.mark.parametrize(
    ("values", "updates"),
    [
        ({"name": "run-2"}, None),
        ({"learner__n": 2}, False),
        ({"algorithm__n_steps": 40, "total_steps": 40}, False),
        ({"algorithm__lr": 1e-3}, True),
        ({"seed": 1}, True),
        ({"tasks__digest": "xyz"}, True),
        ({"group_reward": "my_module:reward"}, True),
        ({"algorithm__lr_schedule": "cosine", "total_steps": 40}, True),
    ],
)
def test_changed_settings_and_their_effect_on_updates(values: dict, updates: bool | None):
    now = changed(**values)
    found = changed_settings(CONFIG, now)
    assert bool(found) == (updates is not None)
    assert any(affects_updates(name, now) for name in found) == bool(updates)


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm__model": "/other"},
        {"algorithm__name": "PPO"},
        {"learner__lora": {"rank": 8}},
        {"algorithm__critic": {"lr": 1}},
    ],
)
def test_another_model_algorithm_or_adapter_raises(values: dict):
    with pytest.raises(ConfigError, match="training state belongs to another run"):
        changed_settings(CONFIG, changed(**values))


def test_settings_that_an_older_version_did_not_have_are_not_changed_at_their_defaults():
    lora = LoraConfig(rank=8).model_dump(mode="json")
    older = {name: value for name, value in lora.items() if name != "target_parameters"}
    before = changed(learner__lora=older)
    assert changed_settings(before, changed(learner__lora=lora)) == {}
    with pytest.raises(ConfigError, match="target_parameters"):
        changed_settings(before, changed(learner__lora=lora | {"target_parameters": ["experts.up"]}))


TAKEN = {"next_group": 30, "open_groups": [28]}


def metadata(start, version: int = 5) -> dict:
    return state_metadata(
        start,
        CONFIG,
        version=version,
        groups=TAKEN,
        tasks={},
        observed_step=4,
        ledger={},
        steps_without_signal=1,
        evaluation={"best": None},
    )


def test_the_resume_point_of_each_option(tmp_path: Path):
    url = str(tmp_path / "state")
    assert find_resume_point(False, url, CONFIG, 0).is_fresh
    assert find_resume_point("auto", url, CONFIG, 0).is_fresh
    with pytest.raises(ConfigError, match="no complete training state"):
        find_resume_point(True, url, CONFIG, 0)

    new = fresh_start()
    prepare_states(new, url, CONFIG)
    # killed before the first state: the store has the rollouts since the start
    start = find_resume_point("auto", url, CONFIG, 0)
    assert (start.step, start.version, start.lineage, start.same_run) == (0, 0, new.lineage, True)

    TrainingStates(url).complete(10, metadata(new))
    for resume in (True, "auto", str(tmp_path), url, f"{url}/step-10"):
        start = find_resume_point(resume, url, CONFIG, 8)
        assert (start.step, start.version, start.groups, start.steps_without_signal) == (10, 5, TAKEN, 1)
        assert (start.lineage, start.same_run, start.starts_new_lineage) == (new.lineage, True, False)
    assert resume_point_of(TrainingStates(url), 10).evaluation == {"best": None}
    with pytest.raises(ConfigError, match="only steps"):
        find_resume_point(f"{url}/step-7", url, CONFIG, 0)


def test_another_learning_rate_starts_a_lineage_with_new_versions():
    start = resume_after("u", 10, metadata(fresh_start()), changed(algorithm__lr=1.0), highest_version=8)
    assert start.starts_new_lineage
    assert start.parent_lineage is not None
    assert start.parent_lineage != start.lineage
    assert start.version > 8 + 1
    assert any("algorithm.lr: 0.0001 -> 1.0" in note for note in start.notes)
    same = resume_after("u", 10, metadata(fresh_start()), changed(learner__n=4), highest_version=8)
    assert (same.version, same.starts_new_lineage) == (5, False)


def test_a_group_reward_is_compared_by_its_name():
    assert make_settings().resolved()["group_reward"] is None
    named = make_settings(group_reward=sum).resolved()["group_reward"]
    assert (named, make_settings(group_reward=Curriculum([1])).resolved()["group_reward"]) == (
        "builtins:sum",
        "raylight.tasks.curriculum:Curriculum",
    )


JUDGES = [
    rl.LLM(endpoint="http://localhost/v1", model=model, sampling_parameters=sampling)
    for model, sampling in (("small", {}), ("large", {}), ("small", {"temperature": 0.5}))
]


@pytest.mark.parametrize(
    ("former", "other"),
    [
        (rewards.RewardSum({"a": sum}), rewards.RewardSum({"a": max})),
        (rewards.RewardSum({"a": sum}), rewards.RewardSum({"a": sum}, {"a": np.float64(0.5)})),
        (rewards.RelativeLength(), rewards.RelativeLength(0.5)),
        (rewards.matches("a"), rewards.matches("a", full=True)),
        (rewards.agent_reward(), rewards.agent_reward("short")),
        (rewards.length_penalty(100, 10), rewards.length_penalty(100, 20)),
        (rewards.each_rollout(sum), rewards.each_rollout(max)),
        (rewards.each_turn(sum), rewards.each_turn(sum, final=rewards.RelativeLength())),
        (rewards.reward_model("a"), rewards.reward_model("b")),
        *((rewards.ruler(JUDGES[0]), rewards.ruler(judge)) for judge in JUDGES[1:]),
        tuple(
            rewards.rubric([rewards.Criterion("c", "It is right.", weight)], JUDGES[0]) for weight in (1, 2)
        ),
    ],
)
def test_a_group_reward_with_other_arguments_starts_a_lineage(former: Any, other: Any):
    settings = [make_settings(group_reward=one) for one in (former, copy.deepcopy(former), other)]
    parts = [{"group_reward": one.resolved()["group_reward"]} for one in settings]
    before, same, now = (CONFIG | yaml.safe_load(yaml.safe_dump(part)) for part in parts)
    state = metadata(fresh_start()) | {"config": before}
    assert not resume_after("u", 10, state, same, 0).starts_new_lineage
    assert resume_after("u", 10, state, now, 0).starts_new_lineage


@pytest.mark.parametrize("reward", [sum, rewards.RewardSum({"a": sum, "b": max}), rewards.agent_reward()])
def test_a_group_reward_is_the_same_as_earlier_versions_wrote_it(reward: Any):
    now = CONFIG | {"group_reward": make_settings(group_reward=reward).resolved()["group_reward"]}
    named = reward if hasattr(reward, "__qualname__") else type(reward)
    former = CONFIG | {"group_reward": f"{named.__module__}:{named.__qualname__}"}
    older = {name: value for name, value in CONFIG.items() if name != "group_reward"}
    for before in (former, older):
        state = metadata(fresh_start()) | {"config": before}
        start = resume_after("u", 10, state, now, 0)
        assert (start.starts_new_lineage, start.notes) == (False, ["resuming after step 10"])
    for before in (CONFIG, CONFIG | {"group_reward": "mine:reward"}):
        state = metadata(fresh_start()) | {"config": before}
        assert resume_after("u", 10, state, now, 0).starts_new_lineage
        assert resume_after("u", 10, metadata(fresh_start()) | {"config": now}, before, 0).starts_new_lineage
    assert changed_settings(older, CONFIG) == {}


TEN = list("abcdefghij")


@pytest.mark.parametrize("same_run", [True, False])
@pytest.mark.parametrize(
    ("former", "tasks"),
    [
        (Curriculum(TEN), Curriculum(TEN[:5])),
        (Curriculum(TEN[:6]), Curriculum([f"new {number}" for number in range(8)])),
        (Mixture({"a": TEN}), Curriculum(TEN)),
        (Curriculum(TEN), Stages({"a": TEN}, advance_at=0.5)),
        (Stages({"a": TEN, "b": TEN}, advance_at=0.5, window=3), Stages({"a": TEN}, advance_at=0.5)),
    ],
)
def test_other_tasks_are_chosen_from_the_beginning(former: TaskSet, tasks: TaskSet, same_run: bool):
    sampler = former.sampler(0)
    for number in range(6):
        sampler.draw(number)
        sampler.observe(number, 1.0)
    state = metadata(fresh_start()) | {"tasks": sampler.state_dict()}
    state["config"] = CONFIG | {"tasks": former.fingerprint()}
    kept = resume_after("u", 10, state, state["config"], 0, same_run)
    assert kept.tasks == sampler.state_dict()
    other = resume_after("u", 10, state, CONFIG | {"tasks": tasks.fingerprint()}, 0, same_run)
    resumed, fresh = tasks.sampler(0), tasks.sampler(0)
    resumed.load_state_dict(other.tasks)
    assert [resumed.draw(n).task for n in range(9)] == [fresh.draw(n).task for n in range(9)]


def test_tasks_that_are_chosen_otherwise_keep_what_is_known_of_them():
    former, now = (Stages({"a": TEN, "b": TEN}, advance_at=share) for share in (0.5, 0.6))
    sampler = former.sampler(0)
    state = metadata(fresh_start()) | {"tasks": sampler.state_dict()}
    state["config"] = CONFIG | {"tasks": former.fingerprint()}
    start = resume_after("u", 10, state, CONFIG | {"tasks": now.fingerprint()}, 0)
    assert start.tasks == sampler.state_dict()


def test_a_state_of_another_version_raises():
    old = metadata(fresh_start())
    old["tasks_consumed"] = old.pop("groups")
    with pytest.raises(ConfigError, match="another version of raylight: it has no groups"):
        resume_after("u", 10, old, CONFIG, highest_version=0)


def test_a_state_of_another_folder_starts_a_lineage_without_parent(tmp_path: Path):
    url = str(tmp_path / "state")
    TrainingStates(url).complete(10, metadata(fresh_start()))
    start = find_resume_point(f"{url}/step-10", str(tmp_path / "mine" / "state"), CONFIG, 0)
    assert (start.same_run, start.starts_new_lineage, start.parent_lineage, start.version) == (
        False,
        True,
        None,
        5,
    )
    assert start.evaluation is None  # the best model is in the other folder
    assert find_resume_point(True, url, CONFIG, 0).evaluation is not None


def test_metrics_continue_after_the_step_of_the_state(tmp_path: Path):
    first = Report(tmp_path, RecordingDisplay(), {}, time.perf_counter() - 100)
    for step in range(6):
        first.step(step, {"x": float("nan") if step == 1 else float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "x"')  # the run was killed
    (tmp_path / "best").mkdir()
    second = Report(tmp_path, RecordingDisplay(), {}, last_logged_step=3)
    second.step(4, {"x": 40.0})
    rows = metric_rows(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["x"] for row in rows] == [0.0, None, 2.0, 3.0, 40.0]
    assert rows[4]["time/total_s"] >= rows[3]["time/total_s"] >= 100
    assert (tmp_path / "best").exists()
    Report(tmp_path, RecordingDisplay(), {})
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert not (tmp_path / "best").exists()


def test_a_resumed_run_waits_until_the_former_store_is_closed(tmp_path: Path):
    path = tmp_path / "store.db"
    journal = Journal(path)

    async def wait() -> None:
        with pytest.raises(StoreError, match="still has"):
            await wait_for_store(path, timeout=0.05)
        waiting = asyncio.create_task(wait_for_store(path, timeout=5))
        await asyncio.sleep(0)
        journal.close()
        await waiting

    asyncio.run(wait())
    Journal(path).close()


async def test_the_engines_of_a_resumed_run_have_a_seed_of_their_own() -> None:
    async def seed(attempts: int, **start: Any) -> int:
        async def statistics() -> dict[str, int]:
            return {"total_attempts": attempts}

        run = RolloutComponents(make_settings(seed=7), print, True, ResumePoint("a", **start))
        run.store = cast(Any, SimpleNamespace(statistics=statistics))
        return await run._sampling_seed()

    assert await seed(5) == await seed(0) == 7, "the store may be shared"
    lost = [await seed(0, state_url="states", step=step, same_run=same) for step in (3, 4) for same in (0, 1)]
    kept = [await seed(attempts, same_run=True) for attempts in (8, 16)]
    assert len({7, lost[0], lost[2], *kept}) == 5
