"""Reward models as group rewards: what they score, and what they refuse. The scores are made up."""

import asyncio
import json
from typing import Any

import pytest
from judged_group import rollout

import raylight as rl
from raylight.errors import ConfigError, RewardModelError
from raylight.rewards.group import GroupRollout, call_group_reward
from raylight.rewards.scoring_model import find_reward_models, scoring_by
from raylight.semconv import TOOL_DEFINITIONS

GROUP = [rollout(0, "Goethe", 1.0), rollout(1, "Schiller", 0.0)]
EMPTY = GroupRollout(type(GROUP[0].finished)(GROUP[0].finished.rollout, None, []))


class Lengths:
    """Scores a conversation by the length of its answer, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[rl.rewards.RewardModelInput] = []

    async def __call__(self, conversations: list[rl.rewards.RewardModelInput]) -> list[float | None]:
        self.asked += conversations
        return [float(len(one.messages[-1]["content"])) for one in conversations]


def rewards_of(
    function: Any, group: list[GroupRollout], *models: rl.rewards.ScoringModel
) -> tuple[Any, Lengths]:
    scorer = Lengths()

    async def call() -> Any:
        with scoring_by(dict.fromkeys(models, scorer)):
            return await call_group_reward(function, group)

    return asyncio.run(call()), scorer


def test_the_last_conversation_of_a_rollout_is_scored_with_its_tools() -> None:
    model = rl.rewards.reward_model("m")
    tools = [{"type": "function", "function": {"name": "find", "description": "", "parameters": {}}}]
    asked = rollout(2, "Lessing")
    asked.finished.spans[0].attributes[TOOL_DEFINITIONS] = json.dumps(tools)
    found, scorer = rewards_of(model, [*GROUP, EMPTY, asked], model)
    assert found == [{"reward_model": 6.0}, {"reward_model": 8.0}, {}, {"reward_model": 7.0}]
    assert [one.messages[-1]["content"] for one in scorer.asked] == ["Goethe", "Schiller", "Lessing"]
    assert [one.tools for one in scorer.asked] == [None, None, tools]
    assert rewards_of(model, [EMPTY], model)[0] == [{}]


def test_a_reward_model_is_a_term() -> None:
    model = rl.rewards.reward_model("m", name="other", replicas=2)
    total = rl.rewards.RewardSum({"right": rl.rewards.agent_reward(), "taste": model}, weights={"taste": 0.5})
    assert find_reward_models(total) == (model,)
    assert rewards_of(total, GROUP, model)[0] == [
        {"total": 4.0, "right": 1.0, "taste": 6.0},
        {"total": 4.0, "right": 0.0, "taste": 8.0},
    ]
    assert find_reward_models(rl.rewards.RewardSum({"a": model, "b": total})) == (model,)
    assert find_reward_models(rl.rewards.agent_reward()) == find_reward_models(None) == ()


def test_a_group_reward_of_ones_own_names_the_models_that_it_calls() -> None:
    model = rl.rewards.reward_model("m")

    async def first_messages(group: list[GroupRollout]) -> list[float | None]:
        return await model.score([item.messages[1:] for item in group])

    with pytest.raises(RewardModelError, match=r"'m' is not served.*reward_models"):
        rewards_of(first_messages, GROUP)
    first_messages.reward_models = [model]  # type: ignore[attr-defined]
    assert find_reward_models(first_messages) == (model,)
    found, scorer = rewards_of(first_messages, GROUP, model)
    assert found == [{"primary": 6.0}, {"primary": 8.0}]
    assert len(scorer.asked[0].messages) == 2
    first_messages.reward_models = ["m"]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="reward_models of the group reward has 'm'"):
        find_reward_models(first_messages)


@pytest.mark.parametrize(
    "settings",
    [{"replica": 2}, {"replicas": 0}, {"num_gpus": 2}, {"kind": "vllm"}, {"args": {"x": 1}}, {"name": ""}],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        rl.rewards.reward_model("m", **settings)
