"""Recipe `play`: who wins a game, and three steps against the initial model."""

from pathlib import Path

import pytest
from example_modules import example_module, train_three_steps
from math_helpers import ScriptedModel, text_of

import raylight as rl


@pytest.mark.parametrize(
    ("stones", "begins", "moves", "reward"),
    [
        (6, 0, {6: "2", 4: "3", 1: "1"}, 1),
        (5, 0, {5: "1", 4: "1", 3: "3"}, 1),
        (5, 1, {5: "1", 4: "1", 3: "3"}, 0),
        (5, 0, {5: "4"}, 0),
        (5, 1, {5: "many"}, 1),
        (2, 0, {2: "3"}, 0),
    ],
)
async def test_who_takes_the_last_stone_wins(
    stones: int, begins: int, moves: dict[int, str], reward: float
) -> None:
    play = example_module("play", "agent").play

    def move(messages: list, tools: list) -> dict:
        return {"content": moves[int(text_of(messages[-1]).split()[2])]}

    with ScriptedModel(move) as model:
        sides = [rl.LLM(endpoint=model.url, model=name) for name in ("policy", "older")]
        assert await play({"stones": stones, "begins": begins}, *sides) == reward
    names = [request["model"] for request in model.requests]
    assert names == [("policy", "older")[(begins + i) % 2] for i in range(len(names))]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_steps_train_against_the_initial_model(tmp_path: Path) -> None:
    steps = train_three_steps("play", tmp_path)
    assert all(0 <= step["opponents/score"] <= 1 for step in steps)
