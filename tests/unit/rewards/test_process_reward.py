"""Process rewards: a group reward of each turn."""

import asyncio
import dataclasses
import json
from typing import Any

import pytest
from unit_helpers import make_finished, make_generation, make_key

import raylight as rl
from raylight.errors import ConfigError, GroupRewardError, JudgeError
from raylight.rewards.criteria import Rubric
from raylight.rewards.group import GroupRollout, call_group_reward, recording
from raylight.semconv import CALL_ID, CHAT_SPAN, INPUT_MESSAGES, OUTPUT_MESSAGES
from raylight.types import Span


def chat(answers: list[str], reward: float | None) -> GroupRollout:
    """A conversation of these answers; each is a call with as many tokens as characters."""
    item = make_finished(reward)
    rollout_id = item.rollout.rollout_id
    messages: list[dict[str, str]] = []
    calls, spans = [], []
    for number, answer in enumerate(answers):
        call_id = f"{rollout_id}-{number}"
        messages = [*messages, {"role": "user", "content": f"turn {number}"}]
        calls.append(
            make_generation(
                [1], [2] * len(answer), key=make_key(rollout_id, call_id=call_id), start=float(number)
            )
        )
        reply = {"role": "assistant", "content": answer}
        attributes = {
            CALL_ID: call_id,
            INPUT_MESSAGES: json.dumps(messages),
            OUTPUT_MESSAGES: json.dumps([reply]),
        }
        spans.append(Span.from_attributes(name=CHAT_SPAN, attributes=attributes))
        messages = [*messages, reply]
    rewards = {} if reward is None else {"correct": reward}
    return GroupRollout(dataclasses.replace(item, generations=calls, spans=spans, rewards=rewards))


def graded(function: Any, group: list[GroupRollout]) -> tuple[list[dict[str, float]], list[dict[int, float]]]:
    """Return the rewards of the rollouts, and of their turns by number."""
    with recording() as records:
        rewards = asyncio.run(call_group_reward(function, group))
    turns = [records.turns.get(item.finished.rollout.rollout_id, {}) for item in group]
    return rewards, [{int(key.rpartition("-")[2]): value for key, value in one.items()} for one in turns]


def test_a_function_scores_each_turn_and_the_final_rewards_stay() -> None:
    group = [chat(["good", "bad", "good"], 1.0), chat(["bad"], 0.0), chat(["good"], None)]
    function = rl.rewards.each_turn(rl.rewards.matches("good"))
    rewards, turns = graded(function, group)
    assert turns == [{0: 1.0, 1: 0.0, 2: 1.0}, {0: 0.0}, {}]
    assert rewards == [{"correct": 1.0, "turn": pytest.approx(2 / 3)}, {"correct": 0.0, "turn": 0.0}, {}]


def test_a_relative_reward_compares_the_turns_with_the_same_number() -> None:
    seen: list[list[tuple[int, str, int, int]]] = []

    def longest(group: list[rl.rewards.GroupRollout]) -> list[float | None]:
        seen.append([(t.number, t.answer, t.sampled_tokens, len(t.messages)) for t in group])  # type: ignore[attr-defined]
        best = max(turn.sampled_tokens for turn in group)
        return [float(turn.sampled_tokens == best) if turn.answer else None for turn in group]

    group = [chat(["aa", "b"], 1.0), chat(["a", "bb"], 0.0)]
    final = rl.rewards.each_rollout(lambda rollout: len(rollout.messages))
    rewards, turns = graded(rl.rewards.each_turn(longest, final=final, name="step"), group)
    assert sorted(seen) == [
        [(0, "aa", 2, 2), (0, "a", 1, 2)],
        [(1, "b", 1, 4), (1, "bb", 2, 4)],
    ]
    assert turns == [{0: 1.0, 1: 0.0}, {0: 0.0, 1: 1.0}]
    assert rewards == [{"primary": 4.0, "step": 0.5}] * 2


class FailingJudge:
    """A judge whose third answer cannot be read, and whose others do not come."""

    identity = ("m",)

    def __init__(self) -> None:
        self.asked = self.cancelled = 0

    async def ask(self, *_: Any) -> dict[str, float]:
        self.asked += 1
        if self.asked == 3:
            raise JudgeError("no answer could be read")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return {}

    async def __call__(self, group: list[GroupRollout]) -> list[float]:
        return [await self.ask() for _ in group]  # type: ignore[misc]


@pytest.mark.parametrize("per_turn", [True, False])
def test_a_group_that_is_not_scored_ends_the_other_requests_for_it(per_turn: bool) -> None:
    judge = FailingJudge()
    rubric = Rubric([rl.rewards.Criterion("right", "It is right.")], judge, "rubric")  # type: ignore[arg-type]
    group = [chat(["good", "bad", "good"], 1.0)] * (1 if per_turn else 3)

    async def score() -> None:
        with pytest.raises(JudgeError):
            await call_group_reward(rl.rewards.each_turn(judge) if per_turn else rubric, group)
        assert (judge.asked, judge.cancelled) == (3, 2)

    asyncio.run(asyncio.wait_for(score(), 60))


def test_a_reward_model_of_turns_is_served() -> None:
    model, other = rl.rewards.reward_model("m"), rl.rewards.reward_model("n")
    assert rl.rewards.each_turn(model, final=other).reward_models == [model, other]


def test_what_does_not_fit_is_an_error() -> None:
    for reward, more in ((1.0, {}), (rl.rewards.matches("a"), {"name": ""})):
        with pytest.raises(ConfigError, match="takes group rewards and a name"):
            rl.rewards.each_turn(reward, **more)  # type: ignore[arg-type]
    function = rl.rewards.each_turn(rl.rewards.matches("a"), name="correct")
    with pytest.raises(GroupRewardError, match="both have a reward 'correct'"):
        graded(function, [chat(["a"], 1.0)])
    with pytest.raises(ConfigError, match="give the sum to each_turn"):
        rl.rewards.RewardSum({"steps": function})
