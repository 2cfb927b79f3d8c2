"""Group rewards, mixtures and curricula in the training loop, with drivers that die at any moment."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from training_world import GROUP, TASKS, FakeRun, World, live, settings_of, told, weights_of

import raylight as rl
from raylight.learner.state.checkpoints import TrainingStates
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.tasks.task_set import ShuffledTasks, TaskSampler
from raylight.trainer.loops.training_groups import FinishedGroup, TrainingGroups
from raylight.types import Rollout


def by_id(group: list[rl.rewards.GroupRollout]) -> list[dict[str, float]]:
    """Rank the rollouts of a group by a digest of their ids."""
    return [
        {"rank": float(sum(item.finished.rollout.rollout_id.partition("-")[2].encode()) % 7)}
        for item in group
    ]


class CountedReward:
    """Group reward that grades a group once, unless the driver died before the grades were stored."""

    def __init__(self) -> None:
        self.graded: list[str] = []

    @property
    def repeated(self) -> int:
        """Number of rollouts that were graded again."""
        return len(self.graded) - len({*self.graded})

    def __call__(self, group: list[rl.rewards.GroupRollout]) -> list[dict[str, float]]:
        self.graded += [item.finished.rollout.rollout_id for item in group]
        return by_id(group)


def curriculum() -> rl.tasks.Mixture:
    return rl.tasks.Mixture(
        {"drawn": rl.tasks.Curriculum(list(range(7))), "listed": list(range(7, 10))}, {"drawn": 2.0}
    )


def run(folder: Path, deaths: list[int], **given: Any) -> tuple[World, list[dict]]:
    folder.mkdir()
    world = World(folder)
    world.staleness = given.pop("staleness", 0)
    settings = settings_of(world, "wait")
    for death in deaths:
        asyncio.run(live(world, die_after=death, **given, **settings))
    return world, asyncio.run(live(world, **given, **settings))


async def _rollouts(world: World) -> list[Rollout]:
    service = StoreService(world.folder / "store.db", read_only=True)
    try:
        return list(await StoreClient(service).query_rollouts(rollout_id_contains="-train-"))
    finally:
        await service.close()


def tasks_of(world: World) -> dict[str, list[Any]]:
    """The tasks of each group, which must be one."""
    found: dict[str, list[Any]] = {}
    for rollout in asyncio.run(_rollouts(world)):
        found.setdefault(str(rollout.group_id), []).append(rollout.input)
    return found


@pytest.mark.parametrize(
    "deaths", [[20, 47, 60], *(pytest.param(ends, marks=pytest.mark.slow) for ends in [[5], [29, 20]])]
)
def test_a_killed_driver_changes_neither_tasks_nor_grades(deaths: list[int], tmp_path: Path) -> None:
    function = CountedReward()
    undisturbed, expected = run(tmp_path / "b", [], tasks=curriculum(), group_reward=by_id)
    world, rows = run(tmp_path / "a", deaths, tasks=curriculum(), group_reward=function)
    assert told(rows) == told(expected)
    assert weights_of(world) == weights_of(undisturbed)
    assert tasks_of(world) == tasks_of(undisturbed)
    assert function.repeated <= TASKS * GROUP * len(deaths)
    pools = ("untested", "learnable", "unsolved", "solved")
    assert all(sum(row[f"tasks/drawn/{pool}"] for pool in pools) == 7 for row in rows if row["step"])
    assert all({"source/drawn/reward", "source/listed/reward"} <= {*row} for row in rows if row["step"])


def test_draws_of_dropped_groups_are_known_after_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop_some(self: TrainingGroups, finished: FinishedGroup) -> str | None:
        _, _, number = str(finished.rollouts[0].rollout.group_id).partition("-")
        return "stale" if int(number) % 4 == 2 else None

    monkeypatch.setattr(TrainingGroups, "_drop_reason", drop_some)
    monkeypatch.setattr(TrainingGroups, "_in_order", lambda self: iter(sorted(self._finished)))
    tasks = rl.tasks.Curriculum(list(range(30)))
    undisturbed, _ = run(tmp_path / "b", [], tasks=tasks)
    world, _ = run(tmp_path / "a", [62], tasks=tasks)  # some steps after the last state
    assert tasks_of(world) == tasks_of(undisturbed)


@pytest.mark.parametrize("deaths", [[31, 52], pytest.param([20], marks=pytest.mark.slow)])
def test_each_group_of_an_asynchronous_run_has_one_task(deaths: list[int], tmp_path: Path) -> None:
    function = CountedReward()
    world, rows = run(tmp_path / "a", deaths, tasks=curriculum(), group_reward=function, staleness=2)
    assert rows[-1]["step"] == world.steps
    assert all(len({*tasks}) == 1 for tasks in tasks_of(world).values())
    assert function.repeated <= TASKS * GROUP * len(deaths)


@pytest.mark.parametrize(("passes", "repeated"), [(1, 1), (2, 0)])
def test_the_last_step_names_the_tasks_of_one_more_pass(passes: int, repeated: int, tmp_path: Path) -> None:
    world = World(tmp_path)
    world.steps = passes * 2 if repeated else passes * 2 - 1
    n_tasks = TASKS * 2 - 1 if repeated else TASKS * 3 // 2
    asyncio.run(live(world, tasks=ShuffledTasks(list(range(n_tasks))), n_steps=None, n_epochs=passes))
    notes = [note for note in world.notes if "one more pass" in note]
    named = [
        f"step {world.steps} is the last and was filled from one more pass over the tasks: 1 of its {TASKS}"
    ]
    assert [note.removesuffix(" tasks") for note in notes] == named * repeated
    drawn = {group: tasks[0] for group, tasks in tasks_of(world).items()}
    assert len(drawn) == passes * n_tasks + repeated


def test_stages_advance_by_rewards_before_the_penalty_for_length(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.algorithm, world.reward_of = rl.algorithms.DAPO, lambda rollout_id: 1.0
    tasks = rl.tasks.Stages({"easy": [1, 2], "hard": [3, 4]}, advance_at=1.0, window=1)
    length = {"max_response_tokens": 1, "overlong_buffer": 1}
    rows = asyncio.run(live(world, tasks=tasks, zero_variance_groups="keep", max_rounds=1, **length))
    assert rows[1]["train/reward"] == rows[1]["tasks/stage"] == 1.0


class CountingTasks(ShuffledTasks):
    """Tasks whose sampler counts the outcomes of each draw."""

    def sampler(self, seed: int) -> TaskSampler:
        return CountingSampler(self.tasks, seed)


class CountingSampler(TaskSampler):
    def __init__(self, tasks: Any, seed: int) -> None:
        super().__init__(tasks, seed)
        self.outcomes: Counter[str] = Counter()

    def observe(self, number: int, reward: float | None) -> None:
        self.outcomes[str(number)] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"outcomes": dict(self.outcomes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.outcomes = Counter(state.get("outcomes", {}))


class DrainedRun(FakeRun):
    """The node of the learners drains when they take the update of step 4 again."""

    async def _open(self) -> None:
        await super()._open()
        ranks, before = self.learners.learner, Counter[int]()
        update = ranks.update

        async def count(batch: Any) -> dict[str, float]:
            before[ranks.version] += 1
            if before[3] == 2 and ranks.version == 3:
                self.learners.drain_noticed.set()
            return await update(batch)

        ranks.update = count  # type: ignore[method-assign]


def test_outcomes_are_noted_once_when_an_earlier_step_is_saved_afterwards(tmp_path: Path) -> None:
    """Step 5 is lost after its outcomes were noted, the state of step 4 is saved, and the driver dies."""
    world = World(tmp_path / "a")
    world.folder.mkdir()
    world.run, world.val_tasks, world.faults = DrainedRun, 0, {4: 1}
    tasks = CountingTasks(list(range(10)))
    states = TrainingStates(str(world.folder / "state"))
    asyncio.run(live(world, die_after=45, tasks=tasks, val_every=None))
    assert states.steps()[-1] == 4
    asyncio.run(live(world, tasks=tasks, val_every=None))
    assert states.metadata(9)["tasks"]["outcomes"] == {str(group): 1 for group in range(36)}


def test_the_end_of_a_run_ends_its_stream(tmp_path: Path) -> None:
    passes, ended = [], []

    def rows() -> Any:
        passes.append(1)
        try:
            yield from range(1000)
        finally:
            ended.append(1)

    run(tmp_path / "a", [], tasks=rl.tasks.Stream(rows))
    assert ended == passes == [1]
