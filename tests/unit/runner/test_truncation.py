"""Outcome of an attempt that a budget truncated, and the runner's record of it."""

from collections.abc import Callable
from typing import Any

import pytest
from store_helpers import ids_of, open_box
from unit_helpers import make_rollout, run_attempt, serving, within

from raylight.agent.attempt_keys import attempt_key
from raylight.agent.hooks import Hook
from raylight.agent.resources import LLM
from raylight.errors import RewardError
from raylight.traces.reward_spans import get_reward_value
from raylight.types import Budget, Rollout, RolloutConfig, Span


def limited(**config: Any) -> Rollout:
    return make_rollout(task=3).model_copy(update={"config": RolloutConfig(max_turns=2, **config)})


async def spent(rollout: Rollout) -> Budget | None:
    return "max_turns"


def raises(task: int) -> float:
    raise ValueError("no answer")


def returns(task: int) -> float:
    return 0.75


def values(spans: list[Span]) -> list[float | None]:
    return [get_reward_value(span) for span in spans]


@pytest.mark.parametrize(
    ("treatment", "agent", "status", "rewards"),
    [
        ("score", returns, "succeeded", [0.75]),
        ("score", raises, "succeeded", [-0.5]),
        ("mask", returns, "succeeded", [0.75]),
        ("mask", raises, "succeeded", []),
        ("fail", returns, "failed", [0.75]),
        ("fail", raises, "failed", []),
    ],
)
async def test_the_outcome_follows_the_setting(
    treatment: str, agent: Callable[[int], float], status: str, rewards: list[float]
) -> None:
    rollout = limited(truncated=treatment, truncated_reward=-0.5)
    outcome, spans = await run_attempt(agent, rollout=rollout, find_truncation=spent)
    assert (outcome.status, outcome.truncated, values(spans)) == (status, "max_turns", rewards)
    if status == "failed":
        assert outcome.failure.kind == "truncated"
        assert "max_turns=2" in outcome.failure.error
        assert ("ValueError: no answer" in outcome.failure.error) == (agent is raises)
    else:
        assert outcome.failure is None


async def test_other_failures_stay_and_are_marked() -> None:
    def wrong(task: int) -> None:
        raise RewardError("a word")

    outcome, _ = await run_attempt(wrong, rollout=limited(), find_truncation=spent)
    assert (outcome.status, outcome.failure.kind, outcome.truncated) == ("failed", "reward", "max_turns")


async def test_the_reward_of_a_hook_at_the_end_counts() -> None:
    class Score(Hook):
        async def on_rollout_end(self, *, rollout: Rollout, **kwargs: Any) -> None:
            from raylight.agent.emit import emit_reward

            emit_reward(0.25)

    outcome, spans = await run_attempt(raises, rollout=limited(), find_truncation=spent, hooks=[Score()])
    assert (outcome.status, values(spans)) == ("succeeded", [0.0, 0.25])


async def test_only_rollouts_with_budgets_are_asked_for() -> None:
    async def fail(rollout: Rollout) -> Budget | None:
        raise AssertionError("the store was asked")

    outcome, _ = await run_attempt(returns, rollout=make_rollout(task=3), find_truncation=fail)
    assert (outcome.status, outcome.truncated) == ("succeeded", None)


@pytest.mark.parametrize(("config", "use"), [({}, "train"), ({"max_seconds": 5.0}, "train-budgets")])
async def test_the_key_says_if_there_are_budgets(config: dict[str, Any], use: Any) -> None:
    keys = []

    def agent(task: int, llm: LLM) -> float:
        keys.append(llm.api_key)
        return 1.0

    rollout = make_rollout(task=3, mode="train").model_copy(update={"config": RolloutConfig(**config)})
    model = LLM(endpoint="http://x/v1", model="policy", traced=True)
    await run_attempt(agent, rollout=rollout, llm=model)
    assert keys == [attempt_key("secret", "ro-1", "at-1", use)]


async def test_a_runner_records_the_truncation() -> None:
    async with within(), open_box() as box:
        await box.enqueue(max_seconds=5.0, truncated_reward=0.125)

        async def agent(task: Any, rollout: Rollout) -> float:
            box.clock.now += 6
            assert (await box.store.check_budgets(*ids_of(rollout), {}))[0] == "max_seconds"
            raise ValueError("BadRequestError: rollout_truncated")

        async with serving(box.store, agent):
            (rollout,) = await box.store.query_rollouts()
            await box.store.wait_until_decided(rollout_ids=[rollout.rollout_id])
        (finished,) = await box.store.collect([rollout.rollout_id])
        assert (finished.rollout.status, finished.reward) == ("succeeded", 0.125)
        assert finished.rollout.attempt.truncated == "max_seconds"
