"""The example that chains APO and GRPO, run as a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"RAY_ADDRESS": "local"}
    return subprocess.run(
        [sys.executable, "examples/apo_then_grpo.py", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def run(*arguments: str) -> str:
    done = start(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_help() -> None:
    assert "--critic-url" in run("--help")


@pytest.mark.slow
def test_a_missing_model_is_reported_in_one_line(tmp_path: Path) -> None:
    done = start("--model", "/no/such/model", "--output-dir", str(tmp_path))
    assert done.returncode == 1
    line = "ModelNotFoundError: there is no model folder /no/such/model; give the path of one"
    assert done.stderr.splitlines()[-1].startswith(line)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_debug_shows_one_rollout_with_its_trace(tmp_path: Path) -> None:
    shown = run("--debug", "--output-dir", str(tmp_path))
    assert shown.count("=== ro-") == 1
    assert "openai.chat.completion" in shown
    assert "Could you please tell me what" in shown


@pytest.mark.slow
def test_a_better_prompt_and_then_a_better_model(tmp_path: Path) -> None:
    shown = run("--rounds", "1", "--steps", "4", "--output-dir", str(tmp_path))
    apo = json.loads((tmp_path / "apo" / "apo.json").read_text())
    best = next(candidate for candidate in apo["candidates"] if candidate["version"] == apo["best"])
    assert best["template"]["template"] == "{a}+{b}="
    assert apo["candidates"][0]["val_score"] < 0.05
    assert best["val_score"] > 0.15
    assert [rejection["kind"] for rejection in apo["rejections"]] == ["placeholders"]
    before = json.loads((tmp_path / "before" / "eval.json").read_text())
    assert before["rewards"]["reward"]["mean"] < 0.05
    trained = json.loads((tmp_path / "grpo" / "summary.json").read_text())
    assert trained["steps"] == 4
    assert trained["reward_before"] > 0.15
    assert (tmp_path / "grpo" / "checkpoint" / "config.json").exists()
    assert shown.splitlines()[-2].endswith("{a}+{b}=")
