"""The math agent's script: training with the VERL dict, scoring at an endpoint, and tracing a question."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from math_helpers import ROOT, ScriptedModel, first_step, solving

import raylight as rl
from examples.math_agent import train
from examples.math_agent.agent import math_agent
from examples.math_agent.config import DATA, MathSettings, shortened, verl_config
from examples.math_agent.starter import make_starter
from raylight.quickstart import STARTER_MODEL
from raylight.traces.trained_agents import agents_of_generations
from raylight.trainer.spec.task_files import read_tasks

README = ROOT / "examples" / "math_agent" / "README.md"
TASK = read_tasks(DATA / "test.jsonl", 1)[0]


def call(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script from the repository's root, with its own local Ray."""
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, "examples/math_agent/train.py", *arguments],
        cwd=ROOT,
        env=kept | env,
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_the_config_is_grpo_on_8_questions_4_times() -> None:
    algorithm = rl.VERL(verl_config(STARTER_MODEL))
    assert (algorithm.advantage.name, algorithm.tasks_per_step, algorithm.group_size) == ("grpo", 8, 4)
    small = rl.VERL(shortened(verl_config(STARTER_MODEL, "hf"), steps=2))
    assert (small.tasks_per_step, small.group_size, small.n_steps) == (2, 2, 2)


def alternating(folder: Path) -> Any:
    """Return the agent with alternating rewards 0 and 1: the tiny model's answers are all wrong.

    Equal rewards would give no training signal.
    """

    @rl.rollout(settings=MathSettings().model_dump())
    async def agent(task: dict[str, Any], llm: rl.LLM, settings: dict[str, Any]) -> float:
        assert await math_agent(task, llm, settings) == 0.0
        for number in itertools.count():
            with contextlib.suppress(FileExistsError):
                (folder / f"{task['id']}-{number}").touch(exist_ok=False)
                return float(number % 2)
        raise AssertionError

    return agent


async def read(path: Path) -> list[Any]:
    service = rl.StoreService(str(path), read_only=True)
    store = rl.StoreClient(service)
    ids = [rollout.rollout_id for rollout in await store.query_rollouts(status_in=["succeeded"])]
    found = await store.collect(ids, with_spans=True)
    await service.close()
    return found


@pytest.mark.slow
@pytest.mark.framework("agent_framework")
def test_a_model_is_trained_through_agent_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model calls no tool, but its requests are real: they are captured, joined and trained on."""
    claims, run = tmp_path / "claims", tmp_path / "run"
    claims.mkdir()
    monkeypatch.setattr(train, "math_agent", alternating(claims))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the runners import the agent
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    train.main(
        [
            "--model",
            make_starter(tmp_path / "model"),
            "--client",
            "agent_framework",
            "--fast",
            "--output-dir",
            str(run),
        ]
    )
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if line.get("learner/grad_norm", 0.0) > 0.0] == [1, 2]
    assert (run / "checkpoint" / "model.safetensors").exists()
    finished = asyncio.run(read(run / "store.db"))
    assert sorted(item.reward for item in finished if item.rollout.mode == "train") == [0.0] * 4 + [1.0] * 4
    for item in finished:
        assert item.generations
        assert agents_of_generations(item.generations, item.spans) == ["calculator"] * len(item.generations)


@pytest.mark.slow
def test_one_question_at_an_endpoint_is_shown_with_its_whole_trace(tmp_path: Path) -> None:
    with ScriptedModel(solving({TASK["question"]: first_step(TASK)})) as model:
        done = call(
            "--model",
            "scripted",
            "--endpoint",
            model.url,
            "--debug",
            "--output-dir",
            str(tmp_path),
            OPENAI_API_KEY="mine",
        )
    assert done.returncode == 0, done.stderr[-3000:]
    for shown in (
        TASK["question"][:40],
        "openai.chat.completion",
        ">>> [assistant]",
        "calls calculate({",
        "reward: ",
        "The calculator says",
    ):
        assert shown in done.stdout, shown
    assert len(model.requests) == 2


@pytest.mark.slow
def test_the_readmes_line_for_raylight_eval_runs(tmp_path: Path) -> None:
    line = next(line for line in README.read_text().splitlines() if "`raylight eval" in line)
    command = re.findall("`(.*?)`", line)[-1].replace("PATH", make_starter(tmp_path / "model")).split()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "raylight.cli",
            *command[1:],
            "--limit",
            "2",
            "--output-dir",
            str(tmp_path / "run"),
        ],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert (figures["tasks"], figures["failed"], figures["rewards"]["reward"]["mean"]) == (
        2,
        0,
        0.0,
    )  # the starter model can only add


def test_tasks_of_another_shape_are_reported_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(
        '{"question": "1+1?", "result": "2"}\n{"question": "1+2?", "answer": 3}\n'
    )
    assert len(train.read_questions(tmp_path / "test.jsonl", 1)) == 1
    with pytest.raises(rl.errors.DatasetError, match="task 2 needs the strings question and result"):
        train.read_questions(tmp_path / "test.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--model", "no/such/folder/here"), "ModelNotFoundError"),
        (("--model", STARTER_MODEL, "--data", "nowhere"), f"DatasetError: there is no file {ROOT}/nowhere/"),
        (("--model", STARTER_MODEL, "--client", "crewai"), "invalid choice: 'crewai'"),
        (("--debug",), "--model is missing"),
    ],
)
def test_a_bad_argument_is_reported_in_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    done = call(*arguments)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
