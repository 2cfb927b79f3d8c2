"""Credit per agent: parts of rollouts with their own rewards, groups and weights, and closed counts."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import make_finished, make_generation, make_key

import raylight as rl
from raylight.config import LearnerConfig
from raylight.errors import ConfigError, RewardError
from raylight.experience.batches.batch import BatchReport, TrainBatch, build_batch
from raylight.experience.batches.ledger import Ledger
from raylight.traces.reward_spans import find_final_reward, has_reward, is_reward_span
from raylight.types import Failure, FinishedRollout, RolloutTokens, Span, TokenTotals


def emitted(value: Any, agent: str | None = None, at: float = 0.0, key: str | None = None) -> Span:
    core = rl.emit_reward(value, agent=agent, primary_key=key, propagate=False)
    return Span.from_core_fields(core).model_copy(update={"start_time": at})


def play(
    calls: list[str | None], reward: float | None, *spans: Span, group: str = "g", **more: Any
) -> FinishedRollout:
    """A rollout with a call of two tokens for each name, one a second."""
    item = make_finished(reward, group=group, calls=0, **more)
    rollout_id = item.rollout.rollout_id
    generations = [
        replace(make_generation([1, n], [7, 8], key=make_key(rollout_id), start=float(n)), agent=agent)
        for n, agent in enumerate(calls)
    ]
    rewards = {} if reward is None else {"primary": reward}
    return replace(item, generations=generations, spans=list(spans), rewards=rewards)


def build(finished: list[FinishedRollout], **settings: Any) -> tuple[TrainBatch, BatchReport]:
    agents = settings.pop("trained_agents", None)
    algorithm = rl.GRPO(model="m", credit="agent", **settings)
    return build_batch(finished, algorithm.batch_rules(LearnerConfig(), agents))


def table(batch: TrainBatch) -> list[tuple[str, float, int]]:
    """Group, reward and number of rows of each part."""
    return [
        (group, reward, batch.owners.count(number))
        for number, (group, reward) in enumerate(zip(batch.groups, batch.rewards, strict=True))
    ]


def test_each_agent_has_its_last_reward_and_its_own_group() -> None:
    first = play(
        ["planner", "coder", "coder"],
        0.5,
        emitted(0.1, "planner"),
        emitted(1.0, "planner"),
        emitted(2.0, "coder"),
    )
    second = play(["planner", "coder"], 0.0, emitted(0.0, "planner"), emitted(3.0, "coder"))
    batch, report = build([first, second])
    assert table(batch) == [
        ("g/planner", 1.0, 1),
        ("g/coder", 2.0, 2),
        ("g/planner", 0.0, 1),
        ("g/coder", 3.0, 1),
    ]
    assert (report.trained, report.groups, report.groups_without_signal) == (4, 2, 0)
    assert report.agent_rewards == {"planner": 0.5, "coder": 2.5}
    assert batch.weights is None


def test_an_agent_without_a_reward_and_unnamed_calls_have_the_rollouts() -> None:
    items = [play(["planner", "coder", None], reward, emitted(-reward, "planner")) for reward in (1.0, 0.0)]
    batch, _ = build(items)
    assert table(batch) == [
        ("g/planner", -1.0, 1),
        ("g/coder", 1.0, 1),
        ("g", 1.0, 1),
        ("g/planner", 0.0, 1),
        ("g/coder", 0.0, 1),
        ("g", 0.0, 1),
    ]


def test_a_reward_of_an_agent_is_not_the_rollouts() -> None:
    span = emitted(1.0, "planner")
    assert has_reward(span)  # of the kinds of spans that are not dropped
    assert not is_reward_span(span)
    assert find_final_reward([emitted(0.25), span]) == 0.25
    batch, _ = build_batch(
        [play(["planner"], 0.5, span), play(["planner"], 0.0, span)],
        rl.GRPO(model="m").batch_rules(LearnerConfig()),
    )
    assert table(batch) == [("g", 0.5, 1), ("g", 0.0, 1)]


def test_rewards_of_turns_belong_to_the_agents_calls() -> None:
    spans = [emitted(0.25, "a", at=1.5), emitted(0.5, "b", at=2.5), emitted(1.0, "a", at=9.0)]
    items = [play(["a", "b", "a"], 0.0, *spans), play(["a", "b", "a"], 0.0)]
    batch, _ = build(items, turn_rewards=True)
    assert batch.rewards == [1.0, 0.5, 0.0, 0.0]
    assert [(turn.value, turn.rollout) for turn in batch.turn_rewards] == [(0.25, 0)]


def test_turn_rewards_of_the_rollout_go_to_the_agent_that_earned_them() -> None:
    """Agents without rewards share the final one only."""
    spans = [emitted(0.25, at=1.5), emitted(0.5, at=2.5), emitted(1.0, at=9.0)]
    items = [play(["a", "b", "a"], 1.0, *spans), play(["a", "b", "a"], 0.0)]
    batch, _ = build(items, turn_rewards=True)
    assert batch.rewards == [1.0, 1.0, 0.0, 0.0]
    assert [(turn.value, turn.rollout) for turn in batch.turn_rewards] == [(0.25, 0), (0.5, 1)]


def test_a_reward_that_cannot_be_read_is_no_reward() -> None:
    bad = emitted(1.0, "a")
    bad.attributes["agentlightning.reward.0.value"] = float("nan")
    plain = emitted(1.0)
    plain.attributes["agentlightning.reward.0.value"] = float("nan")
    failure = Failure(kind="reward", error="RewardError: nan")
    items = [play(["a"], 0.5, emitted(0.75, "a"), bad), play(["a"], 0.0, bad)]
    batch, report = build([*items, play(["a"], None, plain, emitted(1.0, "a"), failure=failure)])
    assert (batch.rewards, report.failed) == ([0.75, 0.0], 1)


def test_a_rollout_without_a_reward_of_its_own_is_not_trained() -> None:
    items = [play(["a"], None, emitted(value, "a")) for value in (0.0, 1.0)]
    batch, report = build(items)
    assert (batch.rewards, report.unscored) == ([], 2)
    assert not rl.GRPO(model="m", credit="agent").batch_rules(LearnerConfig()).is_informative(items)


def test_tokens_are_counted_by_the_length_of_the_whole_rollout() -> None:
    items = [play(["a", "b"] * 5, reward) for reward in (0.0, 1.0)]
    _, report = build(items)
    assert sum(report.trained_by_length.values()) == report.trained_tokens == 40
    whole = build_batch(items, rl.GRPO(model="m").batch_rules(LearnerConfig()))[1]
    assert report.trained_by_length == whole.trained_by_length


def test_a_group_is_informative_if_an_agents_rewards_differ() -> None:
    rules = rl.GRPO(model="m", credit="agent").batch_rules(LearnerConfig())
    differing = [play(["a", "b"], 1.0, emitted(value, "a")) for value in (0.0, 1.0)]
    assert rules.is_informative(differing)
    swapped = [play(["a", "b"], 1.0, emitted(0.0, "a"), emitted(1.0, "b")) for _ in range(2)]
    assert not rules.is_informative(swapped)
    assert not rl.GRPO(model="m").batch_rules(LearnerConfig()).is_informative(differing)
    others = rl.GRPO(model="m", credit="agent").batch_rules(LearnerConfig(), "^b$")
    assert not others.is_informative(differing)


def test_weights_and_named_rewards_of_agents() -> None:
    items = [
        play(["a", "b"], 0.0, emitted({"right": value, "short": 1 - value}, "a", key="right"))
        for value in (0.0, 1.0)
    ]
    batch, _ = build(items, agent_weights={"b": 0.5})
    assert batch.weights == [1.0, 0.5, 1.0, 0.5]
    rules = rl.algorithms.GDPO(
        model="m", credit="agent", reward_weights={"right": 1.0, "short": 2.0}
    ).batch_rules(LearnerConfig(), "^a$")
    parts, _ = build_batch(items, rules)
    assert parts.parts == [(0.0, 1.0), (1.0, 0.0)]


def test_agents_that_are_not_trained_are_counted_and_have_no_part() -> None:
    items = [play(["a", "b", "b"], value) for value in (0.0, 1.0)]
    batch, report = build(items, trained_agents="^a$")
    assert table(batch) == [("g/a", 0.0, 1), ("g/a", 1.0, 1)]
    assert (report.other_agents, report.empty) == (4, 0)
    none, report = build([*items, play(["b"], 1.0)], trained_agents="^a$")
    assert table(none) == table(batch)
    assert (report.other_agents, report.empty) == (5, 1)


def test_greedy_baselines_are_the_agents() -> None:
    greedy = play(["a", "b"], 0.25, emitted(0.75, "a"))
    greedy.rollout.metadata["greedy"] = True
    for call in greedy.generations:
        call.sampling["temperature"] = 0.0
    rules = rl.algorithms.ReMax(model="m", credit="agent").batch_rules(LearnerConfig())
    batch, _ = build_batch([greedy, play(["a", "b"], 1.0)], rules)
    assert batch.baselines == [0.75, 0.25]


def test_a_failed_agent_gives_all_parts_the_failure_reward() -> None:
    failure = Failure(kind="agent", error="ValueError: no")
    failed = play(["a", "b"], None, emitted(5.0, "a"), failure=failure)
    batch, report = build([failed, play(["a", "b"], 1.0)], failure_reward=-1.0)
    assert batch.rewards == [-1.0, -1.0, 1.0, 1.0]
    batch, report = build([failed, play(["a"], 1.0), play(["a"], 0.0)])
    assert (batch.rewards, report.failed) == ([1.0, 0.0], 1)


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(["a", "b", None]), max_size=4),
            st.sampled_from([None, 0.0, 1.0]),
            st.sampled_from(["g", "h"]),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([None, "a"]),
)
def test_every_sampled_token_has_one_fate(rollouts: list[Any], trained: str | None) -> None:
    finished = [
        play(calls, reward, *([emitted(1.0, "a")] if own else []), group=group)
        for calls, reward, group, own in rollouts
    ]
    rules = rl.GRPO(model="m", credit="agent").batch_rules(LearnerConfig(), trained)
    try:
        batch, report = build_batch(finished, rules)
    except rl.errors.EmptyTraceError:
        return
    sampled = sum(2 * len(item.generations) for item in finished)
    assert sum(row.trained_tokens for row in batch.rows) == report.trained_tokens
    ledger = Ledger()
    counts = {i.rollout.rollout_id: RolloutTokens(2 * len(i.generations), 0, 0) for i in finished}
    ledger.take(finished, report, counts)
    row = ledger.row(TokenTotals(sampled=sampled, late=0, open=0))
    assert row.unaccounted == 0
    assert row.masked >= 0
    assert row.trained + row.masked + row.failed == sampled


def test_wrong_settings_and_names_are_errors() -> None:
    with pytest.raises(ConfigError, match='agent_weights are read with credit="agent"'):
        rl.GRPO(model="m", agent_weights={"a": 1.0})
    with pytest.raises(ConfigError, match="agent_weights"):
        rl.GRPO(model="m", credit="agent", agent_weights={"a": 0.0})
    for name in ("", 3):
        with pytest.raises(RewardError, match="is not the name of an agent"):
            rl.emit_reward(1.0, agent=name)  # type: ignore[arg-type]
