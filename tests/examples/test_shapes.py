"""Shapes example: the drawings, the model that is made, and three steps."""

import itertools
from pathlib import Path

import pytest
from example_modules import example_module, run_copy, train_three_steps
from math_helpers import ScriptedModel
from run_output import metric_rows

import raylight as rl


def test_drawings_differ_by_shape_and_seed() -> None:
    drawing = example_module("shapes", "drawing")
    drawn = [
        {drawing.data_url(drawing.draw_shape(letter, seed)) for seed in range(20)}
        for letter in drawing.SHAPES
    ]
    assert all(len(seeds) > 10 for seeds in drawn)
    assert not any(one & other for one, other in itertools.combinations(drawn, 2))
    assert drawing.data_url(drawing.draw_shape("c", 3)) in drawn[0]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("x", 1), (" X.\n", 1), ("**x** cross", 1), ("Cross", 1), ("c", 0), ("xc", 0), ("", 0), (None, 0)],
)
async def test_the_first_word_of_an_answer_counts(answer: str | None, reward: float) -> None:
    agent = example_module("shapes", "agent")
    with ScriptedModel(lambda messages, tools: {"content": answer}) as model:
        llm = rl.LLM(endpoint=model.url, model="scripted")
        assert await agent.name_shape({"shape": "x", "seed": 0}, llm) == reward
    question = model.requests[0]["messages"][0]["content"][1]["text"]
    assert all(f"{letter} {name}" in question for letter, name in agent.SHAPES.items())


@pytest.mark.slow
def test_three_steps_train_on_images(tmp_path: Path) -> None:
    train_three_steps("shapes", tmp_path)
    assert (tmp_path / "out" / "checkpoint" / "preprocessor_config.json").exists()


def validation_rewards(parent: Path, *arguments: str) -> list[float]:
    """Run the example; return the validation rewards, from before the first step to the last."""
    run_copy("shapes", parent, "--cpu", "--output-dir", str(parent / "out"), *arguments)
    return [step["val/reward"] for step in metric_rows(parent / "out") if "val/reward" in step]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_learns_to_name_the_shapes(tmp_path: Path) -> None:
    before, *_, after = validation_rewards(tmp_path)
    assert before < 0.65
    assert after >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_learns_nothing_from_white_images(tmp_path: Path) -> None:
    assert max(validation_rewards(tmp_path, "--blank")) < 0.65
