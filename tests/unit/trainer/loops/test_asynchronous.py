"""The training loop while rollouts, updates and publications overlap, killed at any moment."""

import asyncio
import itertools
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from training_world import (
    GROUP,
    STEPS,
    TASKS,
    FakeRun,
    Publications,
    World,
    live,
    recorded_steps,
    settings_of,
    weights_of,
)
from unit_helpers import within

from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.trainer.components import run_learner
from raylight.trainer.loops import load_watch
from raylight.trainer.loops.policy_rollouts import PolicyRollouts
from raylight.trainer.loops.training_groups import TrainingGroups
from raylight.types import FINISHED, EnqueueRolloutRequest, Rollout, StepGroups

SAMPLED = STEPS * TASKS * GROUP + 2 * (1 + STEPS // 2 + STEPS % 2)
"""Rollouts of a run that drops none: all for training, and two in each evaluation."""


def world_of(folder: Path, staleness: int, seed: int) -> World:
    folder.mkdir()
    world = World(folder)
    world.staleness, world.delays = staleness, random.Random(seed)
    return world


def check(world: World, rows: list[dict]) -> None:
    """Assert that every step was taken once, and every group by one step."""
    assert [row["step"] for row in rows] == list(range(world.steps + 1))
    assert [row["weights/version"] for row in rows[1:]] == list(range(1, world.steps + 1))
    assert rows[-1]["ledger/trained"] > 0
    steps = asyncio.run(recorded_steps(world))
    assert sorted(steps) == list(range(1, world.steps + 1))
    assert {len(step.trained) for step in steps.values()} == {TASKS}
    taken = [group for step in steps.values() for group in (*step.trained, *step.dropped)]
    assert max(Counter(taken).values()) == 1
    lineage = dict(world.trained)
    assert set(world.trained) == set(lineage.items()), "a step that is taken again has the same rollouts"
    trained = Counter(name for names in lineage.values() for name in names)
    assert set(trained.values()) == {1}
    assert len(trained) <= world.steps * TASKS * GROUP
    assert weights_of(world) not in lineage, "the model is the last one"


@pytest.mark.parametrize(
    ("staleness", "stale", "seed"),
    [
        *[(1, "wait", 0), (2, "drop", 0), (2, "mask", 0)],
        *(
            pytest.param(staleness, stale, seed, marks=pytest.mark.slow("other ages and seeds show it"))
            for staleness in [1, 2, 8]
            for stale in ["wait", "drop", "mask"]
            for seed in [1, 2]
        ),
    ],
)
def test_every_group_is_trained_once(staleness: int, stale: str, seed: int, tmp_path: Path) -> None:
    world = world_of(tmp_path / "a", staleness, seed)
    check(world, asyncio.run(live(world, **settings_of(world, stale))))
    assert max(world.sampled.values()) == 1
    if stale != "drop":
        assert sum(world.sampled.values()) == SAMPLED
    if stale == "wait":
        steps = asyncio.run(recorded_steps(world))
        taken = list(itertools.chain.from_iterable(steps[step].trained for step in sorted(steps)))
        assert taken == list(range(STEPS * TASKS))


every_mode = pytest.mark.parametrize(
    "stale", ["wait", *(pytest.param(stale, marks=pytest.mark.slow) for stale in ("mask", "drop"))]
)


@every_mode
def test_learners_leave_nodes_that_drain(stale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_learner, "remove_placement_group", lambda placement: None)
    world = world_of(tmp_path / "a", 2, 0)
    world.drains_at = {12: True, 30: False, 55: True}
    check(world, asyncio.run(live(world, **settings_of(world, stale))))
    assert (world.places, max(world.sampled.values())) == (["elsewhere"] * 2, 1)


@every_mode
@pytest.mark.parametrize(
    "deaths",
    [[20, 47, 60], *(pytest.param(ends, marks=pytest.mark.slow) for ends in [[3], [30], [50, 51], [85]])],
)
def test_a_driver_that_dies_with_a_full_buffer_loses_nothing(
    deaths: list[int], stale: str, tmp_path: Path
) -> None:
    """Finished rollouts are trained and not sampled again, and the others are sampled."""
    world = world_of(tmp_path / "a", 2, seed=len(deaths))
    for death in deaths:
        asyncio.run(live(world, die_after=death, **settings_of(world, stale)))
    check(world, asyncio.run(live(world, **settings_of(world, stale))))
    assert max(world.sampled.values()) == 1


@every_mode
@pytest.mark.parametrize(
    "faults",
    [{2: 1, 7: 1}, *(pytest.param(lost, marks=pytest.mark.slow) for lost in [{0: 1}, {4: 1}, {6: 2}])],
)
def test_learners_that_are_lost_come_to_where_they_were(
    faults: dict[int, int], stale: str, tmp_path: Path
) -> None:
    world = world_of(tmp_path / "a", 2, seed=sum(faults))
    world.faults = dict(faults)
    rows = asyncio.run(live(world, **settings_of(world, stale)))
    check(world, rows)
    assert max(world.sampled.values()) == 1
    assert rows[-1]["learner/restarts"] == sum(faults.values())


@every_mode
@pytest.mark.parametrize("seed", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_groups_that_an_outage_affects_are_sampled_again(seed: int, stale: str, tmp_path: Path) -> None:
    """Groups that are being read, or that the next step drops, are among them."""
    world = world_of(tmp_path / "a", 1, seed)
    world.outages_at = {4, 8, 11, 13}
    rows = asyncio.run(live(world, **settings_of(world, stale)))
    check(world, rows)
    assert {row["train/trained"] for row in rows[1:]} == {TASKS * GROUP}
    assert max(world.sampled.values()) > 1


def test_rollouts_are_in_progress_while_the_learners_update(tmp_path: Path) -> None:
    """Tokens of several versions are in one step, which a synchronous run never has."""
    world = world_of(tmp_path / "a", 2, seed=3)
    rows = asyncio.run(live(world, max_staleness=2))
    assert max(row.get("async/staleness_max", 0) for row in rows) >= 1


def test_groups_may_be_sampled_from_the_weights_of_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the next step had its groups before the publication ended."""
    published: list[int] = []
    publish = TrainingGroups.publish

    def record(groups: TrainingGroups, step: int) -> None:
        published.append(step)
        publish(groups, step)

    monkeypatch.setattr(TrainingGroups, "publish", record)
    asyncio.run(live(world_of(tmp_path / "a", 2, seed=0), max_staleness=2))
    assert published == list(range(-1, STEPS + 1))


@every_mode
def test_learners_that_are_lost_while_a_step_is_recorded(
    stale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups of the step are those that were recorded, and those that it dropped stay dropped."""
    publications: list[Publications] = []
    notice, record = Publications.notice_version, StoreClient.record_step

    def note(self: Publications) -> None:
        publications.append(self)
        notice(self)

    async def record_step(self: StoreClient, lineage: str, step: int, groups: StepGroups) -> StepGroups:
        recorded = await record(self, lineage, step, groups)
        if step in faults:
            faults.remove(step)
            publications[-1].stranded.set()
            await asyncio.Event().wait()
        return recorded

    faults = {4, 7}
    monkeypatch.setattr(Publications, "notice_version", note)
    monkeypatch.setattr(StoreClient, "record_step", record_step)
    world = world_of(tmp_path / "a", 1, seed=1)
    check(world, asyncio.run(live(world, **settings_of(world, stale))))
    assert not faults


def test_rollouts_of_an_evaluation_are_in_progress_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines' load counts them; the limit would take it for the load of a few rollouts."""
    groups: list[TrainingGroups] = []
    load, run_agent = TrainingGroups.load, FakeRun._run_agent
    seen: list[int] = []

    async def note(self: TrainingGroups) -> None:
        groups.append(self)
        await load(self)

    async def run(self: FakeRun, rollout: Any) -> None:
        if rollout.mode == "val":
            seen.append(groups[-1].in_progress)
        await run_agent(self, rollout)

    monkeypatch.setattr(TrainingGroups, "load", note)
    monkeypatch.setattr(FakeRun, "_run_agent", run)
    world = world_of(tmp_path / "a", 0, seed=0)
    asyncio.run(live(world))
    assert set(seen) <= {1, 2}
    assert seen
    assert groups[-1].in_progress == 0


def test_a_group_begins_when_a_rollout_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits neither for the other rollouts of a group, nor for the next look at the engines' loads."""
    requests, start, run_agent = PolicyRollouts.group_requests, FakeRun._open, FakeRun._run_agent
    begun: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    def request(self: PolicyRollouts, group: int, task: Any) -> list[EnqueueRolloutRequest]:
        begun[group].set()
        return requests(self, group, task)

    async def run(self: FakeRun, rollout: Any) -> None:
        """Hold the first rollout of each group until the next group has begun."""
        group, number = rollout.rollout_id.split("-")[-2:]
        if rollout.mode == "train" and number == "0" and int(group) < STEPS * TASKS - 1:
            await begun[int(group) + 1].wait()
        await run_agent(self, rollout)

    async def start_two(self: FakeRun) -> None:
        await start(self)
        self.runners.most_rollouts = lambda: GROUP

    async def live_on() -> list[dict]:
        async with within(240):
            return await live(world_of(tmp_path / "a", 2, seed=0), max_staleness=2)

    monkeypatch.setattr(load_watch, "POLL_S", 1000.0)
    monkeypatch.setattr(PolicyRollouts, "group_requests", request)
    monkeypatch.setattr(FakeRun, "_run_agent", run)
    monkeypatch.setattr(FakeRun, "_open", start_two)
    assert len(asyncio.run(live_on())) == STEPS + 1


def test_nothing_is_left_in_the_queue_of_a_run_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even groups that it was queueing."""
    enqueue, queued = StoreClient.enqueue_many_rollouts, Counter[Any]()
    run_agent = FakeRun._run_agent

    async def hang(self: StoreClient, rollouts: Any) -> list[Rollout]:
        stored = await enqueue(self, rollouts)
        queued.update(rollout.mode for rollout in rollouts)
        if rollouts[0].mode == "train" and queued["train"] > 9 * TASKS * GROUP:
            await asyncio.Event().wait()
        return stored

    async def run(self: FakeRun, rollout: Any) -> None:
        if rollout.mode == "train" and int(rollout.rollout_id.split("-")[2]) >= 9 * TASKS:
            await asyncio.Event().wait()
        await run_agent(self, rollout)

    monkeypatch.setattr(StoreClient, "enqueue_many_rollouts", hang)
    monkeypatch.setattr(FakeRun, "_run_agent", run)
    world = world_of(tmp_path / "a", 8, seed=0)
    world.steps, world.reward_of = 100, lambda rollout_id: 0.5
    rows = asyncio.run(live(world, max_staleness=8, max_steps_without_signal=3))
    assert rows[-1]["step"] == 3
    assert queued["train"] > 9 * TASKS * GROUP
    assert asyncio.run(undecided(world)) == 0


async def undecided(world: World) -> int:
    """Return the number of undecided rollouts in the store."""
    service = StoreService(world.folder / "store.db", read_only=True)
    try:
        counts = await StoreClient(service).statistics()
        return counts["total_rollouts"] - sum(counts[f"rollouts_{status}"] for status in FINISHED)
    finally:
        await service.close()


@pytest.mark.slow
@pytest.mark.parametrize("stale", ["wait", "drop", "mask"])
def test_500_steps_with_outages_and_lost_learners_end(stale: str, tmp_path: Path) -> None:
    """The ledger of each step closes, and no step waits for ever."""
    world = world_of(tmp_path / "a", 2, seed=11)
    world.steps, world.deadline_s = 500, 240.0
    luck = random.Random(stale)
    world.faults = dict.fromkeys(luck.sample(range(world.steps), 20), 1)
    world.faulty_saves = set(luck.sample(range(3, world.steps, 3), 3))
    world.outages_at = set(luck.sample(range(1, world.steps), 40))
    world.max_restarts = len(world.faults) + len(world.faulty_saves)
    rows = asyncio.run(live(world, **settings_of(world, stale)))
    check(world, rows)
    assert rows[-1]["learner/restarts"] == world.max_restarts
    assert rows[-1]["serving/outages"] >= 40
