"""Recipe `wordle`: its teacher wins through the agent, and three steps train."""

from pathlib import Path

import pytest
from example_modules import example_module, train_three_steps
from math_helpers import ScriptedModel

import raylight as rl

pytestmark = pytest.mark.framework("textarena")


@pytest.mark.parametrize("seed", range(4))
async def test_a_model_that_uses_the_feedback_wins(seed: int) -> None:
    best_guess = example_module("wordle", "demonstrations").best_guess
    player = example_module("wordle", "agent").make_player()
    with ScriptedModel(lambda messages, tools: {"content": best_guess(messages)}) as model:
        llm = rl.LLM(endpoint=model.url, model="scripted")
        assert await player({"seed": seed}, llm) == {"primary": 1.0}
    assert len(model.requests) <= 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_steps_train(tmp_path: Path) -> None:
    train_three_steps("wordle", tmp_path)
