"""Evaluations compared by their files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from raylight.errors import ConfigError
from raylight.trainer.output.displays.tables import print_comparison
from raylight.trainer.output.eval_comparison import compare, read_evaluation

OK = "succeeded"


def written(
    folder: Path, rewards: list[Any], agent: str = "gsm8k", first_task: int = 0, **config: Any
) -> Path:
    """Write an evaluation: a reward, or None for a failure, for each rollout of tasks with one sample."""
    folder.mkdir()
    settings = {"samples": 1, "sampling": {}, "pass_reward": 1.0, "failure_reward": None} | config
    figures = {"agent": agent, "model": "models/base", "config": settings}
    (folder / "eval.json").write_text(json.dumps(figures))
    lines = [
        {
            "task": {"n": first_task + n // settings["samples"]},
            "status": OK if reward is not None else "failed",
            "failure": None if reward is not None else "agent",
            "reward": reward,
        }
        for n, reward in enumerate(rewards)
    ]
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_difference_is_paired_by_task(tmp_path: Path) -> None:
    first = read_evaluation(written(tmp_path / "a", [0.0, 1.0] * 20))
    better = read_evaluation(written(tmp_path / "b", [0.5, 1.5] * 20))
    assert first.mean.mean == 0.5
    assert first.mean.interval[0] < 0.4
    found = compare(first, better)
    assert (found.mean, found.error, found.rollouts) == (0.5, 0.0, 40)


def test_samples_of_a_task_are_averaged(tmp_path: Path) -> None:
    first = read_evaluation(written(tmp_path / "a", [0.0, 1.0, 1.0, 1.0], samples=2))
    assert sorted(first.rewards.values()) == [0.5, 1.0]


def test_equal_tasks_count_as_often_as_they_occur(tmp_path: Path) -> None:
    found = []
    for name, rewards in (("a", [1.0, 1.0, 1.0, 0.0]), ("b", [1.0, 0.0, 1.0, 0.0])):
        folder = written(tmp_path / name, rewards)
        lines = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
        lines = [line | {"task": n // 3, "task_index": n} for n, line in enumerate(lines)]
        (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        found.append(read_evaluation(folder))
    first, other = found
    assert (first.mean.mean, first.mean.rollouts) == (0.75, 4)  # as in eval.json
    difference = compare(first, other)
    assert difference is not None
    assert (difference.mean, difference.rollouts) == (-0.25, 4)


def test_failures_count_and_lost_rollouts_do_not(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", [1.0, None, -1.0])
    assert read_evaluation(folder).mean.mean == pytest.approx(-1 / 3)
    text = (folder / "eval.jsonl").read_text().replace('"agent"', '"infrastructure"')
    (folder / "eval.jsonl").write_text(text)
    assert read_evaluation(folder).mean.mean == 0.0
    scored = read_evaluation(written(tmp_path / "b", [1.0, None], failure_reward=-3.0))
    assert scored.mean.mean == -1.0


def test_only_common_tasks_are_compared(tmp_path: Path) -> None:
    first = read_evaluation(written(tmp_path / "a", [1.0, 0.0]))
    other = read_evaluation(written(tmp_path / "b", [1.0, 1.0], first_task=1))
    found = compare(first, other)
    assert (found.mean, found.rollouts, found.interval) == (1.0, 1, None)
    assert compare(first, read_evaluation(written(tmp_path / "c", [1.0], first_task=9))) is None


def test_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    names = {
        "base": written(Path("base"), [0.0, 1.0, 0.0, 0.0]),
        "rl": written(Path("rl"), [1.0, 1.0, 0.0], sampling={"temperature": 1.0}),
        "math": written(Path("math"), [1.0], agent="math500"),
        "new": written(Path("new"), [1.0], first_task=9),
    }
    print_comparison([read_evaluation(folder) for folder in names.values()])
    shown = " ".join(re.sub("[─-╿]", " ", capsys.readouterr().out).split())
    assert "gsm8k base models/base 0.2500 -0.2400 to 0.7400 4 rl models/base 0.6667" in shown
    assert "3 +0.3333 -0.3200 to +0.9867" in shown
    assert "new models/base 1.0000 - 1 no common task math500 math models/base 1.0000 - 1" in shown
    assert "gsm8k: base and rl share 3 tasks" in shown
    assert "gsm8k: base and rl differ in sampling ({} and {'temperature': 1.0})" in shown


@pytest.mark.parametrize("content", [None, "{}", '{"agent": 1', "[]"])
def test_a_folder_without_an_evaluation(tmp_path: Path, content: str | None) -> None:
    folder = written(tmp_path / "a", [1.0])
    if content is None:
        (folder / "eval.jsonl").write_text("")
    else:
        (folder / "eval.json").write_text(content)
    with pytest.raises(ConfigError, match=r"no evaluation that can be compared .* give the output_dir of"):
        read_evaluation(folder)
