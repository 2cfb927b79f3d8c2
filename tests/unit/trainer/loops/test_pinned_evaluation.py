"""Evaluations during training: each is of one version, although others are published meanwhile."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from training_world import ONCE, STEPS, FakeRun, World, live, weights_of

from raylight.errors import RolloutsFailedError
from raylight.learner.state.checkpoints import TrainingStates
from raylight.store.client import StoreClient

SETTINGS: dict[str, Any] = {"max_staleness": 2, "best": "val/reward"}


def world_of(folder: Path, seed: int = 0) -> World:
    folder.mkdir()
    world = World(folder)
    world.staleness, world.delays, world.serves_adapter = 2, random.Random(seed), True
    return world


def evaluations(rows: list[dict]) -> dict[int, float]:
    """Return the rewards of the evaluations during training by step."""
    found = [(row["val/step"], row["val/reward"]) for row in rows if "val/step" in row]
    assert len(dict(found)) == len(found), "each is logged once"
    return dict(found)


def check(world: World, rows: list[dict]) -> None:
    """Assert that every evaluation was of the version after its step."""
    assert [row["step"] for row in rows if "val/step" not in row] == list(range(STEPS + 1))
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert set(evaluations(rows)) == {0, 2, 4, 6, 8, 9}
    for step, sampled in world.evaluated.items():
        assert sampled == {(step, world.published[step])}


def best_of(world: World) -> tuple[int, str]:
    """Return the step of the best model, and its weights."""
    best = world.folder / "best"
    step = json.loads((best / "best.json").read_text())["step"]
    return step, TrainingStates(str(best)).metadata(0)["weights"]


def value_of_step(step: int) -> Any:
    """Return a function that gives the rollouts of one evaluation the highest reward."""
    return lambda rollout_id: None if "-train-" in rollout_id else float(f"-val-{step}-" in rollout_id)


def test_updates_go_on_beside_an_evaluation(tmp_path: Path) -> None:
    world = world_of(tmp_path / "a")
    world.val_waits_for = {0: 2, 2: 4, 6: 8}
    world.reward_of = value_of_step(2)
    rows = asyncio.run(live(world, **SETTINGS))
    check(world, rows)
    logged_at = {row["val/step"]: row["step"] for row in rows if "val/step" in row}
    assert [logged_at[step] for step in (0, 2, 6)] == [1, 3, 7]
    assert best_of(world) == (2, world.published[2])
    assert weights_of(world) != world.published[2]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_is_of_one_version_whatever_takes_how_long(seed: int, tmp_path: Path) -> None:
    world = world_of(tmp_path / "a", seed)
    rows = asyncio.run(live(world, **SETTINGS))
    check(world, rows)
    step, weights = best_of(world)
    assert weights == world.published[step]
    assert evaluations(rows)[step] == max(evaluations(rows).values())


def test_an_evaluation_leaves_half_of_the_runners_to_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = Counter[str](), Counter[str]()
    run_agent, finish_attempt = FakeRun._run_agent, StoreClient.finish_attempt

    async def begin(self: FakeRun, rollout: Any) -> None:
        running[rollout.mode] += 1
        most[rollout.mode] = max(most[rollout.mode], running[rollout.mode])
        await run_agent(self, rollout)

    async def end(self: StoreClient, rollout: Any, *args: Any, **options: Any) -> Any:
        running[rollout.mode] -= 1  # the next one may begin as soon as the store has the end
        return await finish_attempt(self, rollout, *args, **options)

    monkeypatch.setattr(FakeRun, "_run_agent", begin)
    monkeypatch.setattr(StoreClient, "finish_attempt", end)
    world = world_of(tmp_path / "a")
    world.val_tasks, world.slots = 21, 16
    rows = asyncio.run(live(world, **SETTINGS, val_samples=2))
    check(world, rows)
    assert {row["val/rollouts"] for row in rows if "val/step" in row} == {42}
    assert 4 < most["val"] <= 8


def test_a_synchronous_run_and_one_without_an_adapter_wait(tmp_path: Path) -> None:
    for name, adapter, staleness in (("a", True, 0), ("b", False, 2)):
        world = world_of(tmp_path / name)
        world.serves_adapter, world.staleness = adapter, staleness
        rows = asyncio.run(live(world, **SETTINGS | {"max_staleness": staleness}))
        assert not evaluations(rows)
        assert [row["step"] for row in rows if "val/reward" in row] == [0, 2, 4, 6, 8, 9]


@pytest.mark.parametrize("step", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_learners_that_are_lost_while_they_save_the_best_save_it_again(step: int, tmp_path: Path) -> None:
    """The version is an earlier one than theirs. They are lost once more in an update."""
    world = world_of(tmp_path / "a")
    world.val_waits_for = {step: step + 1}
    world.faulty_models = {2}
    world.reward_of = value_of_step(step)
    world.faults = {5: 1}
    rows = asyncio.run(live(world, **SETTINGS))
    check(world, rows)
    assert best_of(world) == (step, world.published[step])
    assert [row["learner/restarts"] for row in rows if "val/step" not in row][-1] == 2
    assert world.models == 4, "of steps 0 and `step`, again, and at the end"


@pytest.mark.parametrize(
    "deaths",
    [[40, 41, 75], *(pytest.param(ends, marks=pytest.mark.slow) for ends in [[20], [30, 50, 70, 90]])],
)
def test_a_run_that_is_killed_takes_the_evaluation_again(deaths: list[int], tmp_path: Path) -> None:
    undisturbed = world_of(tmp_path / "b")
    expected = evaluations(asyncio.run(live(undisturbed, **SETTINGS)))
    world = world_of(tmp_path / "a", len(deaths))
    for death in deaths:
        asyncio.run(live(world, die_after=death, **SETTINGS))
    rows = asyncio.run(live(world, **SETTINGS))
    found = evaluations(rows)
    assert set(found) <= set(expected)
    assert {0, 9} <= set(found)
    for step, sampled in world.evaluated.items():
        assert sampled == {(step, world.published[step])}
    step, weights = best_of(world)
    assert weights == world.published[step]


@pytest.mark.parametrize(
    ("every", "waits", "killed_in", "beside", "kept"),
    [
        pytest.param(3, {3: 4}, 3, 3, {0, 3, 6, 9}, marks=pytest.mark.slow),
        pytest.param(2, {2: 4}, 2, 2, {0, 4, 6, 8, 9}, marks=pytest.mark.slow),
        (2, {2: 4, 4: 5}, 4, 2, {0, 2, 4, 6, 8, 9}),
    ],
    ids=["of the last state", "of no state", "ended since"],
)
def test_an_evaluation_beside_the_last_state_is_taken_again_if_its_version_is_there(
    every: int, waits: dict[int, int], killed_in: int, beside: int, kept: set[int], tmp_path: Path
) -> None:
    world = world_of(tmp_path / "a")
    world.val_waits_for, world.killed_in_val = waits, {killed_in}
    settings = SETTINGS | {"val_every": every}
    asyncio.run(live(world, die_after=10**6, **settings))
    states = TrainingStates(str(world.folder / "state"))
    assert states.steps()[-1] == 3
    assert states.metadata(3)["evaluation"]["beside"] == beside
    rows = asyncio.run(live(world, **settings))
    assert set(evaluations(rows)) == kept
    left_out = [note for note in world.notes if "was cut off" in note]
    assert len(left_out) == (2 not in kept and every == 2)
    for step, sampled in world.evaluated.items():
        assert sampled == {(step, world.published[step])}


def test_rollouts_that_an_evaluation_lost_run_again_although_later_steps_are_logged(tmp_path: Path) -> None:
    world = world_of(tmp_path / "a")
    world.val_waits_for, world.lost = {6: 8}, lambda rollout_id: "-val-6-" in rollout_id
    with pytest.raises(RolloutsFailedError, match="resume='auto' runs them again"):
        asyncio.run(live(world, **SETTINGS, rollout=ONCE))
    assert TrainingStates(str(world.folder / "state")).metadata(6)["evaluation"]["beside"] == 6
    world.lost = lambda rollout_id: False
    rows = asyncio.run(live(world, **SETTINGS, rollout=ONCE))
    check(world, rows)
    assert not any(row.get("val/failed") for row in rows)


def test_patience_ends_training_when_an_evaluation_beside_it_has_ended(tmp_path: Path) -> None:
    world = world_of(tmp_path / "a")
    world.val_waits_for = {2: 3, 4: 5}
    world.reward_of = value_of_step(2)
    rows = asyncio.run(live(world, **SETTINGS, patience=1))
    assert set(evaluations(rows)) >= {0, 2, 4}
    last = max(row["step"] for row in rows)
    assert last < STEPS
    assert TrainingStates(str(world.folder / "state")).steps()[-1] == last
    assert best_of(world) == (2, world.published[2])
    assert evaluations(asyncio.run(live(world, **SETTINGS, patience=1))) == evaluations(rows)
