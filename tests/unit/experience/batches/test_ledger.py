"""The token ledger closes for any rollouts, and shows tokens that are missing on either side."""

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import BROKEN, LOST, Box, call_of, open_box
from unit_helpers import make_finished, make_generation, make_key

import raylight as rl
from raylight.config import LearnerConfig
from raylight.errors import EmptyTraceError
from raylight.experience.batches.batch import build_batch
from raylight.experience.batches.ledger import Ledger
from raylight.types import (
    EnqueueRolloutRequest,
    FinishedRollout,
    Generation,
    RolloutConfig,
    RolloutTokens,
    TokenTotals,
)

VERSION = 6
SETTINGS = {"max_staleness": 2, "stale": "mask", "off_policy_sampling": "mask"}
ALGORITHMS = [
    rl.GRPO(model="m", **SETTINGS),
    rl.GRPO(model="m", **SETTINGS, failure_reward=0.0, zero_variance_groups="drop"),
    rl.algorithms.ReMax(model="m", **SETTINGS),
    rl.GRPO(model="m", **SETTINGS, trajectory_selection="longest"),
]


@dataclass(frozen=True)
class Call:
    """A call as the store counts it, and as a batch treats it."""

    versions: list[int]
    is_late: bool = False
    finish_reason: str = "stop"
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    forced: bool = False

    def generation(self, rollout_id: str) -> Generation:
        n, forced = len(self.versions), {"policy_logprobs": [-1.0], "allowed": [1]}
        made = make_generation(
            [1, 2],
            list(range(n)),
            key=make_key(rollout_id),
            versions=self.versions,
            **{name: value * n for name, value in forced.items()} if self.forced else {},
        )
        return dataclasses.replace(made, finish_reason=self.finish_reason, sampling=self.sampling)


@dataclass(frozen=True)
class Sampled:
    """A rollout with all that it sampled."""

    group: int
    reward: float | None
    failed: bool
    greedy: bool
    calls: list[Call]
    earlier: list[int]
    """Tokens of earlier attempts."""
    later: int
    """Tokens that are recorded after the rollout was taken."""

    def finish(self) -> FinishedRollout:
        failure = BROKEN if self.failed else None
        item = make_finished(None if self.failed else self.reward, failure=failure, group=str(self.group))
        if self.greedy:
            item.rollout.metadata["greedy"] = True
        calls = [call.generation(item.rollout.rollout_id) for call in self.calls]
        if self.greedy:
            calls = [dataclasses.replace(call, sampling={"temperature": 0.0}) for call in calls]
        return dataclasses.replace(item, generations=calls)

    @property
    def late(self) -> int:
        return sum(len(call.versions) for call in self.calls if call.is_late)

    @property
    def counts(self) -> RolloutTokens:
        on_time = sum(len(call.versions) for call in self.calls) - self.late
        return RolloutTokens(on_time, sum(self.earlier), self.late)


VERSIONS = st.lists(st.integers(0, VERSION), min_size=1, max_size=5)
CALLS = st.builds(
    Call,
    versions=VERSIONS,
    is_late=st.booleans(),
    finish_reason=st.sampled_from(["stop", "stop", "aborted"]),
    sampling=st.sampled_from([{}, {}, {"top_p": 0.5}]),
    forced=st.booleans(),
)
ROLLOUTS = st.builds(
    Sampled,
    group=st.integers(0, 5),
    reward=st.sampled_from([0.0, 1.0, None]),
    failed=st.booleans(),
    greedy=st.booleans(),
    calls=st.lists(CALLS, max_size=3),
    earlier=st.lists(st.integers(1, 9), max_size=2),
    later=st.integers(0, 3),
)


@dataclass(frozen=True)
class World:
    """Rollouts in groups; steps take groups 0 to 3, drop group 4, and leave group 5 open."""

    rollouts: list[Sampled]
    algorithm: rl.algorithms.PolicyAlgorithm

    def take(self, ledger: Ledger, step: int, lose: int = 0) -> None:
        """Take two groups in each of two steps; the second one drops a group, too."""
        groups = {2 * step, 2 * step + 1}
        chosen = [item for item in self.rollouts if item.group in groups]
        finished = [item.finish() for item in chosen]
        counts = {f.rollout.rollout_id: item.counts for f, item in zip(finished, chosen, strict=True)}
        if lose:
            calls = finished[0].generations[lose:]
            finished[0] = dataclasses.replace(finished[0], generations=calls)
        try:
            _, report = build_batch(finished, self.algorithm.batch_rules(LearnerConfig(), version=VERSION))
        except EmptyTraceError:
            report = build_batch([], self.algorithm.batch_rules(LearnerConfig()))[1]
            excluded = sum(len(call.output_ids) for item in finished for call in item.generations)
            report = dataclasses.replace(report, excluded_tokens=excluded)
        dropped = {f"dropped-{i}": item.counts for i, item in enumerate(self._of_group(4)) if step}
        ledger.take(finished, report, counts | dropped, list(dropped))

    def _of_group(self, group: int) -> list[Sampled]:
        return [item for item in self.rollouts if item.group == group]

    def totals(self, steps: int) -> TokenTotals:
        taken = set(range(2 * steps)) | ({4} if steps == 2 else set())
        on_time = {item.group: 0 for item in self.rollouts}
        late = 0
        for item in self.rollouts:
            on_time[item.group] += item.counts.latest + item.counts.earlier
            late += item.late + (item.later if item.group in taken else 0)
        is_open = sum(tokens for group, tokens in on_time.items() if group not in taken)
        return TokenTotals(sum(on_time.values()), is_open, late)


WORLDS = st.builds(World, st.lists(ROLLOUTS, max_size=14), st.sampled_from(ALGORITHMS))


@given(WORLDS)
def test_it_closes_after_every_step(world: World) -> None:
    ledger = Ledger()
    assert ledger.row(world.totals(0)).unaccounted == 0
    for step in (0, 1):
        world.take(ledger, step)
        row = ledger.row(world.totals(step + 1))
        assert row.unaccounted == 0
        assert min(dataclasses.astuple(row)) >= 0
        lengths = ledger.length_metrics()
        assert _total(lengths, "trained") == row.trained
        assert _total(lengths, "dropped") == row.dropped
        assert _total(lengths, "stale") <= row.masked
        taken = [item for item in world.rollouts if item.group < 2 * step + 2 or (step and item.group == 4)]
        late = sum(item.late for item in taken if item.group < 4)
        assert _total(lengths, "sampled") == sum(item.counts.latest for item in taken) + late
    dropped = sum(item.counts.latest for item in world.rollouts if item.group == 4)
    assert row.dropped == dropped


@given(WORLDS)
def test_a_step_that_is_taken_again_is_counted_once(world: World) -> None:
    ledger = Ledger()
    world.take(ledger, 0)
    state = ledger.state_dict()
    world.take(ledger, 1)
    expected, lengths = ledger.row(world.totals(2)), ledger.length_metrics()
    assert expected.unaccounted == 0
    ledger.load_state_dict(state)
    assert ledger.row(world.totals(1)).unaccounted == 0
    world.take(ledger, 1)
    assert ledger.row(world.totals(2)) == expected
    assert ledger.length_metrics() == lengths


def test_tokens_are_counted_by_the_length_of_their_rollout() -> None:
    long, old = Call([6] * 20), Call([6] * 60 + [1] * 40)
    rollouts = [
        Sampled(0, 1.0, False, False, [long], [], 0),
        Sampled(0, 0.0, False, False, [Call([6]), Call([6])], [], 0),
        Sampled(1, 1.0, False, False, [old], [], 0),
        Sampled(1, 0.0, False, False, [Call([6] * 16)], [], 0),
        Sampled(4, 1.0, False, False, [Call([6] * 65)], [9], 0),
    ]
    world, ledger = World(rollouts, ALGORITHMS[0]), Ledger()
    world.take(ledger, 0)
    world.take(ledger, 1)
    assert ledger.length_metrics() == {
        "lengths/16/sampled": 18,
        "lengths/16/trained": 18,
        "lengths/64/sampled": 20,
        "lengths/64/trained": 20,
        "lengths/256/sampled": 165,
        "lengths/256/trained": 60,
        "lengths/256/stale": 40,
        "lengths/256/dropped": 65,
    }


def test_a_state_of_an_earlier_version_has_no_lengths() -> None:
    ledger = Ledger()
    ledger.load_state_dict({"trained": 7})
    assert ledger.length_metrics() == {}
    assert ledger.state_dict()["trained"] == 7


@pytest.mark.parametrize("reward", [1.0, None])
def test_tokens_that_were_not_read_are_unaccounted_for(reward: float | None) -> None:
    first = Sampled(0, reward, False, False, [Call([6, 6]), Call([6])], [], 0)
    world = World([first, Sampled(0, 0.0, False, False, [Call([6])], [], 0)], ALGORITHMS[0])
    ledger = Ledger()
    world.take(ledger, 0, lose=1)
    row = ledger.row(world.totals(1))
    assert row.unaccounted == 2
    assert row.metrics()["ledger/unaccounted"] == 2.0
    ledger.load_state_dict({})
    world.take(ledger, 0)
    totals = world.totals(1)
    assert ledger.row(totals).unaccounted == 0
    assert ledger.row(totals._replace(sampled=totals.sampled - 1)).unaccounted == -1


def test_each_token_has_one_fate() -> None:
    forced, aborted = Call([6], forced=True), Call([6, 6], finish_reason="aborted")
    rollouts = [
        Sampled(0, 1.0, False, False, [Call([6, 6, 1]), forced, aborted], [7], 5),
        Sampled(0, 0.0, False, False, [Call([6, 5], is_late=True)], [], 0),
        Sampled(1, None, True, False, [Call([6] * 5)], [], 0),
        Sampled(4, 1.0, False, False, [Call([6] * 4)], [3], 0),
        Sampled(5, 1.0, False, False, [Call([6] * 8)], [2], 0),
    ]
    world, ledger = World(rollouts, ALGORITHMS[0]), Ledger()
    world.take(ledger, 0)
    world.take(ledger, 1)
    row = ledger.row(world.totals(2))
    assert dataclasses.asdict(row) == {
        "generated": 42,
        "trained": 4,
        "masked": 1 + 1 + 2,
        "auxiliary": 0,
        "unselected": 0,
        "dropped": 4,
        "failed": 7 + 5 + 5 + 3,
        "open": 8 + 2,
    }


def _total(lengths: dict[str, float], fate: str) -> float:
    return sum(count for name, count in lengths.items() if name.endswith(f"/{fate}"))


# the store's counts


async def run_rollout(box: Box, dice: random.Random, late: list[Any]) -> None:
    """Run attempts of a rollout until one decides it. Messages of its calls may come twice, and some come
    after the decision."""
    while True:
        attempt = await box.again()
        closed = []
        for _ in range(dice.randrange(4)):
            key = call_of(attempt)
            await box.store.capture([(key, 0.0)], [])
            output = [7] * dice.randrange(1, 5)
            closed.append((key, make_generation([1, 2], output, key=key), None))
        ends_well = dice.random() < 0.5
        kept, last = (closed, []) if ends_well else (closed[:-1], closed[-1:])
        for call in kept:
            for _ in range(dice.randrange(1, 3)):
                await box.store.capture([], [call])
        late += last
        if ends_well:
            await box.store.finish_attempt(attempt, "succeeded")
        else:
            failure = dice.choice([LOST, BROKEN])
            await box.store.finish_attempt(attempt, "failed", failure, timeout=0)
        status = (await box.status(attempt))[0]
        if status in ("succeeded", "failed"):
            return
        if dice.random() < 0.5 and late:
            await box.store.capture([], [late.pop()])  # while the next attempt waits


@pytest.mark.parametrize("seed", range(5))
async def test_the_store_counts_each_token_once(seed: int) -> None:
    dice, late = random.Random(seed), list[Any]()
    async with open_box() as box:
        names = [f"line-train-{n // 2}-{n % 2}" for n in range(8)]
        config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
        for name in [*names, "line-val-0-0"]:
            request = EnqueueRolloutRequest(input=1, group_id=name[:-2], rollout_id=name, config=config)
            await box.store.enqueue_many_rollouts([request])
            await run_rollout(box, dice, late)
        finished = await box.store.collect(names)
        ledger, algorithm = Ledger(), rl.GRPO(model="m")
        for step in range(3):  # the last group remains open
            taken = finished[2 * step : 2 * step + 2]
            if late:
                await box.store.capture([], [late.pop()])  # between two reads
            counts = await box.store.count_sampled_tokens([item.rollout.rollout_id for item in taken])
            assert all(_tokens(item) == counts[item.rollout.rollout_id].latest for item in taken)
            if any(item.generations and item.reward is not None for item in taken):
                report = build_batch(taken, algorithm.batch_rules(LearnerConfig()))[1]
            else:
                report = build_batch([], algorithm.batch_rules(LearnerConfig()))[1]
                report = dataclasses.replace(report, excluded_tokens=sum(map(_tokens, taken)))
            ledger.take(taken, report, counts)
            totals = await box.store.token_totals("line-train-", step + 1)
            assert ledger.row(totals).unaccounted == 0
        assert totals.sampled > 0


def _tokens(item: FinishedRollout) -> int:
    return sum(len(call.output_ids) for call in item.generations)
