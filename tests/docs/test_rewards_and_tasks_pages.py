"""The pages on rewards and on tasks: their blocks run, and their tables match the code."""

import asyncio
import inspect
from typing import Any, get_args

import pytest
from docs_snippets import DOCS, snippets
from judged_group import rollout
from page_tables import code, tables

import raylight as rl
from raylight.rewards.group import call_group_reward
from raylight.rewards.scoring_model import find_reward_models, scoring_by
from raylight.tasks.curriculum import DEFAULT_WEIGHTS, Pool

REWARDS, TASKS = DOCS / "rewards.md", DOCS / "tasks.md"
GIVEN: dict[str, dict[str, Any]] = {
    "rewards": {},
    "tasks": {name: [1, 2, 3] for name in ("tasks", "math_tasks", "code_tasks", "easy_tasks", "hard_tasks")},
}


def run(name: str) -> list[dict[str, Any]]:
    """Run the blocks of a page; return the names that each defines."""
    blocks = [block for block in snippets(DOCS / f"{name}.md") if not block.not_run]
    return [block.run({"rl": rl, **GIVEN[name]}) for block in blocks]


def test_the_rewards_can_be_computed() -> None:
    first, ruler, rubric, terms, process, model, two, own = run("rewards")
    group = [rollout(0, "<answer>1</answer>", 1.0, 4), rollout(1, "2", 0.0, 9)]

    def rewards_of(function: Any) -> list[dict[str, float]]:
        return asyncio.run(call_group_reward(function, group))

    assert rewards_of(first["shortest_wins"]) == [{"primary": 1.0}, {"primary": 0.0}]
    assert first["trainer"].group_reward is first["shortest_wins"]
    assert ruler["trainer"].group_reward.name == "ruler"
    assert rubric["group_reward"].name == "rubric"
    assert rewards_of(terms["group_reward"])[0] == {
        "total": pytest.approx(1.25),
        "correct": 1.0,
        "format": 1.0,
        "short": 0.5,
    }
    assert process["trainer"].group_reward.name == "turn"
    assert model["trainer"].group_reward.name == "reward_model"
    assert find_reward_models(two["group_reward"]) == (two["preference"],)

    async def scorer(conversations: list[rl.rewards.RewardModelInput]) -> list[float | None]:
        return [float(len(one.messages)) for one in conversations]

    (served,) = find_reward_models(own["worst_conversation"])
    with scoring_by({served: scorer}):
        assert rewards_of(own["worst_conversation"]) == [{"primary": 3.0}] * 2


def test_the_sets_of_tasks_can_be_drawn_from() -> None:
    sets = [names["train"] for names in run("tasks")]
    assert [type(found) for found in sets] == [rl.tasks.Mixture, rl.tasks.Curriculum, rl.tasks.Stages]
    assert all(found.sampler(0).draw(0).task in (1, 2, 3) for found in sets)


def test_the_tables_are_those_of_the_code() -> None:
    view, _, model = tables(REWARDS)
    for row in view.rows:
        for name in row[0].split(", "):
            assert (
                hasattr(rl.rewards.GroupRollout, code(name))
                or code(name) in rl.rewards.GroupRollout.__dataclass_fields__
            )
    fields = {name: field.get_default() for name, field in rl.rewards.RewardModelConfig.model_fields.items()}
    fields["name"], fields["max_tokens"] = (
        inspect.signature(rl.rewards.reward_model).parameters["name"].default,
        None,
    )
    for row in model.rows:
        for name, shown in zip(row[0].split(", "), row[1].split(", "), strict=True):
            default, field = shown.split(";")[0].strip("`").strip('"'), fields[code(name)]
            own = f"{field:g}" if isinstance(field, float) else str(field)
            assert default == ("the model's limit" if name == "`max_tokens`" else own)
    _, pools = tables(TASKS)
    assert {code(row[0]): float(row[2]) for row in pools.rows} == DEFAULT_WEIGHTS
    assert {*DEFAULT_WEIGHTS} == {*get_args(Pool)}
