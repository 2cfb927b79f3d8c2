"""Turns of a batch: their states, rewards and rows, and the groups in which they differ."""

import dataclasses
import json
from typing import Any

import pytest
from unit_helpers import make_finished, make_generation, make_key

from raylight import algorithms
from raylight.agent.emit import emit_state
from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.experience.batches.batch import BatchReport, BatchRules, TrainBatch, build_batch
from raylight.experience.batches.shards import shard_batch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.experience.trajectories.reward_rules import RewardRules
from raylight.semconv import ANNOTATION, CALL_ID, GRADE_SPAN_ID, GRADE_TURNS, reward_attributes
from raylight.types import GREEDY, FinishedRollout, PlacedImage, Span


def played(
    reward: float,
    prompts: list[list[int]],
    keys: dict[float, Any] | None = None,
    emitted: dict[float, float] | None = None,
    grades: dict[int, float] | None = None,
) -> FinishedRollout:
    """A rollout of calls with one sampled token, the n-th from n to n + 1 seconds.

    Args:
        keys: keys of states by the time of their spans.
        emitted: rewards of turns by the time of their spans.
        grades: grades of turns by the number of their calls.
    """
    item = make_finished(reward)
    rollout_id = item.rollout.rollout_id
    calls = [
        make_generation(prompt, [9], key=make_key(rollout_id, call_id=f"{rollout_id}-{n}"), start=n)
        for n, prompt in enumerate(prompts)
    ]
    spans = [
        Span.from_core_fields(
            emit_state(key, propagate=False).model_copy(update={"start_time": at, "end_time": at})
        )
        for at, key in (keys or {}).items()
    ]
    spans += [
        Span.from_attributes(
            name=ANNOTATION,
            attributes=dict(reward_attributes({"primary": value})),
            start_time=at,
            end_time=at,
        )
        for at, value in ((emitted or {}) | {99.0: reward}).items()
    ]
    if grades:
        text = json.dumps({f"{rollout_id}-{n}": value for n, value in grades.items()})
        spans.append(
            Span.from_attributes(name=ANNOTATION, attributes={GRADE_TURNS: text}, span_id=GRADE_SPAN_ID)
        )
    return dataclasses.replace(item, generations=calls, spans=spans)


def build(
    items: list[FinishedRollout], groups: Any = "state", **rules: Any
) -> tuple[TrainBatch, BatchReport]:
    rewards = RewardRules(turn_rewards=True, turn_gamma=0.5)
    return build_batch(items, BatchRules(rewards=rewards, turn_groups=groups, **rules))


def states(batch: TrainBatch) -> list[str]:
    return [turn.state for turn in batch.turns]


def test_states_are_named_by_the_agent_or_by_their_prompts() -> None:
    prompts = [[1, 2], [3], [1, 2], [3]]
    named, plain = (
        build([played(1.0, prompts, {0.5: "a", 1.9: {"y": 1, "x": 2}}), played(0.0, prompts)])[0].turns,
        states(build([played(1.0, prompts), played(0.0, [[3]])])[0]),
    )
    # a key belongs to the next call only, or to the first call if it came before it
    assert [turn.state for turn in named[:4]] == [
        named[4].state,
        "key a",
        'key {"x": 2, "y": 1}',
        named[5].state,
    ]
    assert plain[0] == plain[2] != plain[1] == plain[3] == plain[4]
    assert all(state.startswith("prompt ") for state in plain)


def test_the_last_key_before_a_call_counts_and_one_of_a_call_that_was_cut_off_is_kept() -> None:
    item = played(1.0, [[1], [2], [3]], {-1.0: "x", -0.5: "start", 0.5: "middle"})
    cut = dataclasses.replace(item.generations[1], finish_reason="aborted")
    again = dataclasses.replace(item, generations=[item.generations[0], cut, item.generations[2]])
    assert states(build([again, played(0.0, [[1]])])[0])[:2] == ["key start", "key middle"]


def test_the_choices_of_a_request_are_of_one_state() -> None:
    item = played(1.0, [[1], [1], [2]], {-1.0: "a", 0.5: "b"})
    calls = [dataclasses.replace(call, start_time=float(n == 2)) for n, call in enumerate(item.generations)]
    item = dataclasses.replace(item, generations=calls)
    assert states(build([item, played(0.0, [[1]])])[0])[:3] == ["key a", "key a", "key b"]


def test_a_key_is_of_the_next_call_of_whatever_agent() -> None:
    """Agent x calls in the states of its prompts, y in one that it names."""
    items = []
    for reward in (1.0, 0.0):
        item = played(reward, [[1], [2], [3]], {0.5: "of y"})
        calls = [
            dataclasses.replace(call, agent=name) for call, name in zip(item.generations, "xyx", strict=True)
        ]
        spans = [
            Span.from_attributes(
                name="call",
                attributes={CALL_ID: call.key.call_id},
                start_time=call.start_time,
                end_time=call.end_time,
            )
            for call in calls
        ]
        items.append(dataclasses.replace(item, generations=calls, spans=[*item.spans, *spans]))
    found = states(build(items, by_agent=True)[0])[:3]
    assert [state.split()[0] for state in found] == ["prompt", "prompt", "key"]


def test_turns_with_the_same_number_are_compared() -> None:
    batch, _ = build([played(1.0, [[1], [2]], {0.5: "a"}), played(0.0, [[5]])], "turn")
    assert states(batch) == ["0", "1", "0"]


def test_turns_have_their_rewards_and_their_tokens() -> None:
    """The calls of the first rollout grow one row; the second has two rows, one of them too long."""
    first = played(1.0, [[1, 2], [1, 2, 9, 5]], emitted={1.5: 0.25}, grades={0: 0.5, 1: 0.125, 7: 9.0})
    second = played(2.0, [[1, 2, 3, 4, 5, 6], [1, 2]])
    batch, _ = build([first, second], row_limit=6, long_rows="drop")
    assert [(turn.rollout, turn.row, turn.token) for turn in batch.turns] == [
        (0, 0, 2),
        (0, 0, 4),
        (1, None, 6),
        (1, 1, 2),
    ]
    assert [turn.reward for turn in batch.turns] == [0.75, 1.125, 0.0, 2.0]
    # the rewards of rollouts count the same turns
    assert [(turn.value, turn.token) for turn in batch.turn_rewards] == [(0.25, 2), (0.5, 2), (0.125, 4)]
    (shard,) = shard_batch(batch, PolicySettings(), 1)
    assert [(turn.start, turn.end) for turn in shard.outline.turns] == [(0, 1), (1, 2), (0, 0), (0, 1)]


def test_rollouts_with_equal_rewards_differ_if_one_took_more_turns() -> None:
    short, long, failed = played(1.0, [[1]]), played(1.0, [[1], [2]]), played(0.0, [[1], [2]])
    informative = algorithms.GiGPO(model="m").batch_rules(LearnerConfig()).is_informative
    for items, differ in (
        ([short, long], True),
        ([long, long], False),
        ([failed, played(0.0, [[1]])], False),
        ([failed, long], True),
    ):
        assert build(items)[1].has_signal is informative(items) is differ
    rewards = RewardRules()
    assert not build_batch([short, long], BatchRules(rewards=rewards))[1].has_signal


def test_rules_come_from_the_algorithm() -> None:
    algorithm = algorithms.GiGPO(model="m", turn_groups="turn", turn_gamma=0.9, turn_rewards=True)
    rules = algorithm.batch_rules(LearnerConfig())
    assert (rules.turn_groups, rules.rewards.turn_gamma, rules.min_group) == ("turn", 0.9, 2)
    assert not algorithms.GRPO(model="m").needs_spans
    assert algorithms.GiGPO(model="m").needs_spans  # for the states
    assert not algorithms.GiGPO(model="m", turn_groups="turn").needs_spans
    assert build([played(1.0, [[1]]), played(0.0, [[1]])], None)[0].turns == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"turn_coef": 0.0}, "use rl.GRPO"),
        ({"kl_reward_coef": 0.1}, "reads the rewards of rollouts or turns"),
        ({"group_size": 1}, "group_size"),
        ({"turn_groups": "agent"}, "turn_groups"),
        ({"gamma": 0.9}, "nothing reads gamma"),
    ],
)
def test_settings_that_do_not_fit_are_errors(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithms.GiGPO(model="m", **given)


def test_a_greedy_baseline_counts_the_grades_of_the_calls_that_are_trained() -> None:
    """The second call is another agent's."""
    items = []
    for metadata in ({}, {GREEDY: True}):
        item = played(1.0, [[1], [2]], grades={0: 0.25, 1: 4.0})
        calls = [
            dataclasses.replace(call, agent=name, sampling={"temperature": float(not metadata)})
            for call, name in zip(item.generations, "xy", strict=True)
        ]
        rollout = item.rollout.model_copy(update={"metadata": metadata})
        items.append(dataclasses.replace(item, rollout=rollout, generations=calls))
    rules = {"rewards": RewardRules(turn_rewards=True), "baseline_kind": "greedy"}
    parts = build_batch(items, BatchRules(by_agent=True, **rules))[0]
    assert parts.baselines == [1.25, 5.0]
    whole = build_batch(items, BatchRules(trained_agents="x", **rules))[0]
    assert whole.baselines == [1.25]


def test_states_differ_where_images_do() -> None:
    """Screens of the same size have the same tokens."""
    item = played(1.0, [[1, 7, 7, 2]] * 3)
    screens = ["a" * 64, "b" * 64, "a" * 64]
    calls = [
        dataclasses.replace(call, images=(PlacedImage(screen, 1, 3),))
        for call, screen in zip(item.generations, screens, strict=True)
    ]
    groups = BatchRules(turn_groups="state")
    turns = build_batch([dataclasses.replace(item, generations=calls)], groups)[0].turns
    states = [turn.state for turn in turns]
    assert states[0] == states[2] != states[1]
