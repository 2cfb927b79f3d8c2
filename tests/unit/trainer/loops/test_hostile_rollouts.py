"""The training loop with rollouts that fail, hang, come back, are cancelled and record calls late."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import training_world
from training_world import FakeRun, World, live, mixed, recorded_steps, settings_of

from raylight.errors import InvalidTransitionError, StoreError
from raylight.semconv import reward_attributes
from raylight.types import CallKey, Failure, FinishReason, Generation, RolloutConfig, Span

GONE = Failure(kind="infrastructure", error="LeaseExpired: no heartbeat")
SILENT = Failure(kind="unresponsive", error="Unresponsive: no span or call")
WAYS = ("succeed", "lose", "fail", "no reward", "abort", "cancel", "vanish", "be late", "come back")
"""Behaviours of a rollout; each but the first is chosen by one in ten of these."""


class HostileRun(FakeRun):
    """Its training rollouts do one of `WAYS` in each attempt."""

    ways: tuple[str, ...] = WAYS

    async def _run_agent(self, rollout: Any) -> None:
        world, rollout_id = self.world, rollout.rollout_id
        if self.die_after is not None and sum(world.sampled.values()) >= self.die_after:
            await self.service.close()
            raise StoreError("killed")
        if rollout.mode != "train":
            await super()._run_agent(rollout)
            return
        way = world.delays.choice(self.ways) if world.delays.random() < 0.4 else "succeed"
        turns = world.delays.randrange(1, 4)
        for turn in range(turns):
            cut = way == "abort" and turn == turns - 1
            await self._sample(rollout, turn, "aborted" if cut else "stop")
            await world.delay(100)
        try:
            await self._end(rollout, way)
        except InvalidTransitionError:
            assert way in ("vanish", "be late", "come back", "cancel")  # the store has given it up
            return
        world.sampled[rollout_id] += way in ("succeed", "abort", "no reward", "come back")

    async def _end(self, rollout: Any, way: str) -> None:
        store, attempt = self.store, (rollout.rollout_id, rollout.attempt.attempt_id)
        if way == "lose":
            await store.finish_attempt(rollout, "failed", GONE)
        elif way == "fail":
            await store.finish_attempt(rollout, "failed", Failure(kind="agent", error="ValueError: x"))
        elif way == "cancel":
            late = await self._begin_late(rollout)
            await store.cancel_rollout(rollout.rollout_id)
            await self._end_late(late)
        elif way in ("vanish", "be late", "come back"):
            late = await self._begin_late(rollout)
            failure = SILENT if way == "come back" else GONE
            await store.update_attempt(*attempt, status="unresponsive", failure=failure)
            await self.world.delay(700)
            if way != "vanish":
                await self._end_late(late)
                await self.world.delay(700)
                await store.finish_attempt(rollout, "succeeded", spans=[self._reward(rollout)])
        else:
            spans = [] if way == "no reward" else [self._reward(rollout)]
            await store.finish_attempt(rollout, "succeeded", spans=spans)

    def _reward(self, rollout: Any) -> Span:
        worth = self.world.reward_of(rollout.attempt.attempt_id)
        if worth is None:
            worth = int(mixed(self.engines.weights, rollout.rollout_id.partition("-")[2]), 16) % 997 / 997
        return Span(
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt.attempt_id,
            sequence_id=0,
            trace_id="t",
            span_id="s",
            name="reward",
            start_time=0.0,
            end_time=1.0,
            attributes=reward_attributes({"primary": worth}),
        )

    async def _sample(self, rollout: Any, turn: int, reason: FinishReason) -> None:
        key = CallKey(rollout.rollout_id, rollout.attempt.attempt_id, str(turn))
        await self.store.capture([(key, float(turn))], [(key, self._generation(key, turn, reason), None)])

    def _generation(self, key: CallKey, turn: int, reason: FinishReason = "stop") -> Generation:
        versions = [self.engines.version] * (turn + 1)
        output, logprobs = [7] * len(versions), [-1.0] * len(versions)
        return Generation(key, "policy", [turn, 2], output, logprobs, versions, reason, turn, turn + 1.0)

    async def _begin_late(self, rollout: Any) -> CallKey:
        key = CallKey(rollout.rollout_id, rollout.attempt.attempt_id, "late")
        await self.store.capture([(key, 9.0)], [])
        return key

    async def _end_late(self, key: CallKey) -> None:
        await self.world.delay(100)
        await self.store.capture([], [(key, self._generation(key, 9), None)])


async def check(world: World) -> None:
    """Assert that each group was taken once, and a step always with the same rollouts."""
    steps = await recorded_steps(world)
    assert sorted(steps) == list(range(1, world.steps + 1))
    taken = [group for step in steps.values() for group in (*step.trained, *step.dropped)]
    assert max(Counter(taken).values()) == 1
    lineage = dict(world.trained)
    assert set(world.trained) == set(lineage.items())


def random_life(seed: int, world: World) -> tuple[list[int], dict[str, Any]]:
    """Draw the deaths of a run's drivers, other faults, and the algorithm's settings."""
    draw = random.Random(seed)
    world.staleness, world.delays = draw.choice([0, 1, 2, 8]), random.Random(seed)
    world.max_restarts, rounds = world.steps, draw.choice([1, 2, 3])
    world.faults = {version: 1 for version in range(world.steps) if draw.random() < 0.1}
    world.outages_at = {number for number in range(1, 3 * world.steps) if draw.random() < 0.1}
    deaths = sorted(draw.sample(range(1, 8 * world.steps), draw.choice([0, 1, 3])))
    if not world.staleness and rounds > 1:
        deaths = []  # a killed driver forgets which groups had replacements before an outage
    settings = settings_of(world, draw.choice(["wait", "drop", "mask"]) if world.staleness else "wait")
    if rounds > 1:
        settings |= {"zero_variance_groups": "drop", "max_rounds": rounds}
    limits = RolloutConfig(max_attempts=draw.choice([1, 2]), infrastructure_retries=0)
    return deaths, settings | {"rollout": limits, "failure_reward": draw.choice([None, -1.0])}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 100))])
def test_the_ledger_closes_and_each_group_is_taken_once(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through kills of the driver, lost learners and outages, too."""
    monkeypatch.setattr(training_world, "FakeRun", HostileRun)
    world = World(tmp_path)
    deaths, settings = random_life(seed, world)
    for death in deaths:
        asyncio.run(live(world, die_after=death, **settings))
    rows = asyncio.run(live(world, **settings))
    assert [row["step"] for row in rows] == list(range(world.steps + 1))
    asyncio.run(check(world))


@pytest.mark.parametrize(
    ("stale", "failure_reward"),
    [
        *[("drop", -1.0), ("mask", None)],
        *(
            pytest.param(stale, reward, marks=pytest.mark.slow("each value is shown with another one"))
            for stale, reward in [("wait", None), ("wait", -1.0), ("drop", None), ("mask", -1.0)]
        ),
    ],
)
def test_rollouts_that_come_back_after_they_were_read_change_nothing(
    stale: str, failure_reward: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what a step is trained on when it is taken again, nor the ledger."""
    monkeypatch.setattr(training_world, "FakeRun", HostileRun)
    monkeypatch.setattr(HostileRun, "ways", ("come back",))
    world = World(tmp_path)
    world.staleness, world.delays, world.faults = 1, random.Random(3), {4: 1, 7: 1}
    settings = settings_of(world, stale) | {"failure_reward": failure_reward}
    asyncio.run(live(world, rollout=RolloutConfig(infrastructure_retries=0), **settings))
    asyncio.run(check(world))


def test_a_group_that_gets_a_signal_in_an_outage_makes_no_token_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replacement has begun: nothing is sampled in advance of what the bound allows."""
    monkeypatch.setattr(training_world, "FakeRun", HostileRun)
    monkeypatch.setattr(HostileRun, "ways", ("succeed",))
    world = World(tmp_path)
    world.staleness, world.delays, world.outages_at = 1, random.Random(0), set(range(2, 40, 3))
    attempts: dict[str, int] = {}

    def reward(attempt_id: str) -> float | None:
        """Make the rewards of the first attempts equal, in two of three groups."""
        number = attempts.setdefault(attempt_id, len(attempts))
        return 0.5 if number % 24 < 16 else None

    world.reward_of = reward
    settings = {"zero_variance_groups": "drop", "max_rounds": 3, "max_staleness": 1}
    asyncio.run(live(world, **settings))  # whose updates check the age of their tokens
    asyncio.run(check(world))
