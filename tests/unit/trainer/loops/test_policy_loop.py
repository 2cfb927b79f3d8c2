"""The training loop on a real store, with fake learners and engines, killed at any moment."""

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from training_world import GROUP, ONCE, STEPS, TASKS, Serving, World, live, recorded_steps, told, weights_of

from raylight.errors import LearnerError, RolloutsFailedError, ServingLostError
from raylight.trainer.components import run_learner


def phase_of(rollout_id: str) -> str:
    """Return the mode of a rollout and the step that takes it."""
    _, mode, number, *_ = rollout_id.split("-")
    return f"{mode}-{int(number) // TASKS + 1 if mode == 'train' else number}"


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "a").mkdir()
    return World(tmp_path / "a")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple], str]:
    """Rows and weights of a run that nothing disturbed."""
    world = World(tmp_path_factory.mktemp("undisturbed"))
    rows = asyncio.run(live(world))
    return told(rows), weights_of(world)


@pytest.mark.parametrize(
    "deaths",
    [
        [20, 47, 60],
        *(pytest.param(ends, marks=pytest.mark.slow) for ends in [[1], [5], [29], [38, 39], [84]]),
    ],
)
def test_a_driver_that_dies_at_any_moment_changes_nothing(
    deaths: list[int], world: World, undisturbed: tuple
):
    for death in deaths:
        asyncio.run(live(world, die_after=death))
    rows = asyncio.run(live(world))
    assert told(rows) == undisturbed[0]
    assert weights_of(world) == undisturbed[1]
    assert set(world.sampled.values()) == {1}  # each was finished once: none was lost, and none sampled anew
    assert len(world.sampled) == STEPS * TASKS * GROUP + 2 * (1 + STEPS // 2 + STEPS % 2)
    lineage = dict(
        world.trained
    )  # a step that is taken again is trained on the same rollouts, from the same weights
    assert set(world.trained) == set(lineage.items())
    assert Counter(name for names in lineage.values() for name in names).most_common(1)[0][1] == 1


@pytest.mark.parametrize(
    "faults",
    [{6: 2}, *(pytest.param(lost, marks=pytest.mark.slow) for lost in [{0: 1}, {4: 1}, {2: 1, 7: 1}])],
)
def test_learners_that_are_lost_come_to_where_they_were(
    faults: dict[int, int], world: World, undisturbed: tuple
):
    world.faults = faults
    rows = asyncio.run(live(world))
    assert told(rows) == undisturbed[0]
    assert weights_of(world) == undisturbed[1]
    assert set(world.sampled.values()) == {1}
    assert rows[-1]["learner/restarts"] == sum({4: 1, 6: 2, 2: 1, 7: 1, 0: 1}[v] for v in world.faults)


@pytest.mark.parametrize(
    "drains_at",
    [
        {13: False, 21: True, 60: True},
        *(
            pytest.param(drains, marks=pytest.mark.slow("three drains show it"))
            for drains in [{0: True}, {13: True}, {40: False}]
        ),
    ],
)
def test_learners_leave_a_node_that_drains(
    drains_at: dict[int, bool], world: World, undisturbed: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They save a training state of the last step, so that no update is repeated."""
    removed: list[object] = []
    monkeypatch.setattr(run_learner, "remove_placement_group", removed.append)
    moves, world.drains_at = sum(drains_at.values()), dict(drains_at)
    rows = asyncio.run(live(world))
    assert told(rows) == undisturbed[0]
    assert weights_of(world) == undisturbed[1]
    assert set(world.sampled.values()) == {1}
    assert len(world.trained) == STEPS
    assert (world.places, removed) == (["elsewhere"] * moves, ["here", *["elsewhere"] * moves][:moves])
    assert rows[-1]["learner/restarts"] == 0


@pytest.mark.parametrize(
    "stranded_at", [40, *(pytest.param(number, marks=pytest.mark.slow) for number in [13, 67])]
)
def test_learners_that_are_lost_with_the_only_replica_are_restarted_at_once(
    stranded_at: int, world: World, undisturbed: tuple
) -> None:
    """Agents wait for the replacement of the replica, and it for the weights of the learners."""
    world.stranded_at = {stranded_at}
    rows = asyncio.run(live(world))
    assert not world.stranded_at
    assert told(rows) == undisturbed[0]
    assert set(world.sampled.values()) == {1}
    assert rows[-1]["learner/restarts"] == 1


@pytest.mark.parametrize(
    "phase",
    [
        "train-5",
        *(
            pytest.param(phase, marks=pytest.mark.slow("one phase shows it"))
            for phase in ("val-0", "train-2", "val-4")
        ),
    ],
)
def test_a_resumed_run_runs_again_what_the_infrastructure_failed(
    phase: str, world: World, undisturbed: tuple
):
    """Once serving was away for so long that all retries were used up."""
    world.lost = lambda rollout_id: phase_of(rollout_id) == phase
    with pytest.raises(RolloutsFailedError, match=r"(?s)refused\. The infrastructure .* resume='auto'"):
        asyncio.run(live(world, rollout=ONCE))
    world.lost = lambda rollout_id: False
    rows = asyncio.run(live(world, rollout=ONCE))
    assert told(rows) == undisturbed[0]
    assert weights_of(world) == undisturbed[1]
    assert set(world.sampled.values()) == {1}


@pytest.mark.parametrize("outages_at", [{3, 4, 7}, pytest.param({2}, marks=pytest.mark.slow)])
def test_no_result_of_an_outage_is_trained(outages_at: set[int], world: World, undisturbed: tuple):
    """Each confirmation follows a batch: all of it runs again, and is trained once."""
    world.outages_at = outages_at
    rows = asyncio.run(live(world))
    assert told(rows) == undisturbed[0]
    assert weights_of(world) == undisturbed[1]
    assert rows[-1]["serving/outages"] == len(outages_at)
    assert max(world.sampled.values()) > 1
    assert len(world.trained) == STEPS


def test_a_model_that_stays_away_ends_the_run(world: World, monkeypatch: pytest.MonkeyPatch):
    async def run(self: Any) -> None:
        raise ServingLostError("away for too long")

    monkeypatch.setattr(Serving, "run", run)
    with pytest.raises(ServingLostError, match="away for too long"):
        asyncio.run(live(world))


def test_completed_steps_are_replayed_with_what_failed_in_them(world: World):
    """A step that lost a rollout is trained on the same others again."""
    world.lost = lambda rollout_id: rollout_id.endswith(("-train-12-1", "-train-17-0"))
    asyncio.run(live(world, rollout=ONCE, die_after=60))
    world.lost = lambda rollout_id: False
    asyncio.run(live(world, rollout=ONCE))
    trained = dict(world.trained)
    assert set(world.trained) == set(trained.items())
    assert not any(name.endswith("-train-12-1") for names in trained.values() for name in names)


def test_completed_evaluations_are_repeated_with_what_failed_in_them(world: World):
    world.lost = lambda rollout_id: "-val-4-0-" in rollout_id
    asyncio.run(live(world, rollout=ONCE, die_after=50))  # after the state of step 3
    world.lost = lambda rollout_id: False
    rows = asyncio.run(live(world, rollout=ONCE))
    assert {row["step"]: row["val/failed"] for row in rows if row.get("val/failed")} == {4: 1}


def test_an_evaluation_on_other_tasks_has_other_rollouts(world: World):
    def evaluated() -> int:
        return sum("-val-4-" in name for name in world.sampled)

    asyncio.run(live(world, die_after=50))  # after the state of step 3
    assert evaluated() == 2
    for world.val_tasks, number in ((3, 5), (3, 5), (2, 5), (1, 6), (3, 6)):
        asyncio.run(live(world, die_after=51 + number))
        assert evaluated() == number
        assert not (world.folder / "state" / "step-6").exists()
    assert set(world.sampled.values()) == {1}


def test_learners_that_are_lost_while_a_resumed_run_takes_steps_again(world: World, undisturbed: tuple):
    """Nothing may be sampled from engines that have the first weights still."""
    asyncio.run(live(world, die_after=60))  # within step 7
    shutil.rmtree(world.folder / "state" / "step-6")  # which was not written to its end
    world.faulty_saves = {6}
    rows = asyncio.run(live(world))
    assert told(rows) == undisturbed[0]
    assert weights_of(world) == undisturbed[1]
    assert set(world.sampled.values()) == {1}


def test_learners_that_are_lost_before_the_first_state_end_the_run(world: World, tmp_path: Path):
    asyncio.run(live(world))
    (tmp_path / "c").mkdir()
    fork = World(tmp_path / "c")
    fork.faulty_saves = {6}
    with pytest.raises(LearnerError, match=r"before .* had a training state: a rank died while it saved"):
        asyncio.run(live(fork, resume=str(world.folder / "state" / "step-6")))


def test_learners_that_are_lost_too_often_end_the_run(world: World):
    world.faults = {3: 3}
    with pytest.raises(LearnerError, match="max_restarts=2"):
        asyncio.run(live(world))


def test_with_another_learning_rate_the_steps_since_are_taken_anew(world: World):
    asyncio.run(live(world, die_after=50))
    before = dict(world.published)
    rows = asyncio.run(live(world, lr=1e-3))
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert max(before) < rows[4]["weights/version"]  # versions of the life before mean other weights
    names = {name.partition("-")[0] for name in world.sampled}
    assert len(names) == 2


def test_a_run_that_is_over_stays_as_it_is(world: World):
    first = asyncio.run(live(world))
    sampled = Counter(world.sampled)
    assert told(asyncio.run(live(world, resume=True))) == told(first)
    assert world.sampled == sampled


@pytest.mark.parametrize("ending", [{"best": "val/reward", "patience": 1}, {"max_steps_without_signal": 1}])
def test_a_run_that_ended_early_stays_as_it_is(ending: dict, world: World):
    if "patience" not in ending:
        world.reward_of = lambda rollout_id: 0.5
    first = asyncio.run(live(world, **ending))
    assert 1 <= first[-1]["step"] < STEPS
    sampled = Counter(world.sampled)
    assert told(asyncio.run(live(world, resume=True, **ending))) == told(first)
    assert world.sampled == sampled


def test_without_resume_everything_begins_anew(world: World):
    asyncio.run(live(world, die_after=40))
    (world.folder / "store.db").unlink()  # as the session does
    world.published.clear()
    rows = asyncio.run(live(world, resume=False))
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert len(world.sampled) > STEPS * TASKS * GROUP


# groups


async def test_groups_without_reward_variance_are_replaced_by_new_tasks(world: World) -> None:
    """DAPO's dynamic sampling: a step ends with the group that makes enough with a signal."""
    equal = {0, 3, 4, 5, 11}
    world.reward_of = lambda rollout_id: 0.5 if int(rollout_id.split("-")[2]) in equal else None
    await live(world, zero_variance_groups="drop", max_rounds=3)
    steps = await recorded_steps(world)
    assert [step.trained for step in (steps[1], steps[2])] == [(0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12)]


async def test_the_replacements_of_a_step_are_limited(world: World) -> None:
    world.reward_of = lambda rollout_id: 0.5
    await live(world, max_rounds=2, max_steps_without_signal=2)
    assert [step.trained for step in (await recorded_steps(world)).values()] == [
        tuple(range(2 * TASKS)),
        tuple(range(2 * TASKS, 4 * TASKS)),
    ]
