"""Recipe `judge`: preferences, the stand-in's scores, and three steps with each reward."""

from pathlib import Path

import pytest
from example_modules import example_module, train_three_steps
from judged_group import rollout
from run_output import metric_rows

import raylight as rl


@pytest.mark.parametrize(
    ("answer", "points", "reward"),
    [
        ("Thank you. We are sorry.", 2, 1.0),
        ("Thanks! We apologise. It is your fault.", 1, 0.5),
        ("It is YOUR fault.", -1, 0.0),
        ("", 0, 0.0),
    ],
)
async def test_the_rule_and_the_rubric_agree(answer: str, points: int, reward: float) -> None:
    assert example_module("judge", "agent").courtesy(answer) == points
    stand_in = example_module("judge", "stand_in")
    with stand_in.serve_stand_in() as judge:
        (scores,) = await rl.rewards.rubric(stand_in.CRITERIA, judge)([rollout(0, answer)])
    assert scores["rubric"] == reward


def test_pairs_prefer_merit_with_some_mistakes() -> None:
    replies, merit = example_module("judge", "replies"), example_module("judge", "agent").merit
    pairs = replies.make_pairs(400, 0)
    right = [merit(pair["chosen"][0]["content"]) > merit(pair["rejected"][0]["content"]) for pair in pairs]
    assert 0.85 < sum(right) / len(right) < 0.95
    assert sum(merit(answer) == 2 for answer in replies.ANSWERS) == 1


@pytest.mark.slow
def test_a_judge_without_its_reward_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example_module("judge", "train").main(["--judge", "http://127.0.0.1:1/v1", "any"])
    assert "--judge needs --reward judge" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("reward", ["model", "judge"])
def test_three_steps_train_with_each_reward(tmp_path: Path, reward: str) -> None:
    train_three_steps("judge", tmp_path, "--reward", reward)
    assert all(
        "val/reward/courteous" in step for step in metric_rows(tmp_path / "out") if "val/reward" in step
    )
