"""The math agent's script: training, scoring at an endpoint, and tracing a question."""

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
from example_modules import updates
from math_helpers import ROOT, ScriptedModel, first_step, solving
from run_output import metric_rows

import raylight as rl
from examples.math_agent import train
from examples.math_agent.agent import math_agent
from examples.math_agent.config import DATA, MathSettings
from examples.math_agent.demonstrations import demonstrate, questions
from raylight.quickstart import TOOL_MODEL
from raylight.traces.trained_agents import agents_of_generations
from raylight.trainer.spec.task_files import read_tasks

README = ROOT / "examples" / "math_agent" / "README.md"
TASK = read_tasks(DATA / "test.jsonl", 1)[0]


def call(*command: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Run Python from the repository's root, with its own local Ray."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


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
    for name in ("TASKS_PER_STEP", "GROUP_SIZE"):
        monkeypatch.setattr(train, name, 2)
    options = ["--client", "agent_framework", "--steps", "2", "--cpu", "--output-dir", str(run)]
    train.main(["--model", TOOL_MODEL, *options])
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    metrics = metric_rows(run)
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
        options = ("--engine", "upstream", "--set", f"engine.url={model.url}", "--limit", "1")
        done = call(*readme_command("scripted"), *options, "--output-dir", str(tmp_path))
        assert done.returncode == 0, done.stderr[-3000:]
    shown = call("-m", "raylight.cli", "trace", str(tmp_path), "--full").stdout
    for part in (
        TASK["question"][:40],
        "openai.chat.completion",
        ">>> [assistant]",
        "calls calculate({",
        "reward: ",
        "The calculator says",
    ):
        assert part in shown, part
    assert len(model.requests) == 2


def readme_command(model: str) -> list[str]:
    """Return the README's line for `raylight eval`, with a model."""
    line = next(line for line in README.read_text().splitlines() if "`raylight eval" in line)
    return ["-m", "raylight.cli", *re.findall("`(.*?)`", line)[-1].replace("PATH", model).split()[1:]]


@pytest.mark.slow
def test_the_readmes_line_for_raylight_eval_runs(tmp_path: Path) -> None:
    done = call(*readme_command(TOOL_MODEL), "--limit", "2", "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "eval.json").read_text())
    assert (figures["tasks"], figures["failed"]) == (2, 0)
    assert figures["rewards"]["reward"]["mean"] == 0.0  # the quickstart's model can only add


@pytest.mark.slow
async def test_demonstrations_are_what_the_agent_sends() -> None:
    (task,) = questions(1, 1_000_000)  # the first demonstration's
    shown = await asyncio.to_thread(lambda: next(demonstrate(0)))
    with ScriptedModel(solving({task["question"]: first_step(task)})) as model:
        llm = rl.LLM(endpoint=model.url, model="scripted")
        assert await math_agent(task, llm, MathSettings().model_dump()) == 1.0
    first, second = model.requests
    assert first["tools"] == shown["tools"]
    assert first["messages"] == shown["messages"][:2]
    assert second["messages"][3]["content"] == shown["messages"][3]["content"]
    assert shown["messages"][4]["content"] == f"### {task['result']}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_steps_train_with_the_calculator(tmp_path: Path) -> None:
    options = ("--steps", "3", "--cpu", "--output-dir", str(tmp_path))
    done = call("examples/math_agent/train.py", *options, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(updates(tmp_path)) == 3


def test_tasks_of_another_shape_are_reported_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(
        '{"question": "1+1?", "result": "2"}\n{"question": "1+2?", "answer": 3}\n'
    )
    with pytest.raises(rl.errors.DatasetError, match="task 2 needs the strings question and result"):
        train.read_questions(tmp_path / "test.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--model", "no/such/folder/here"), "ModelNotFoundError"),
        (("--model", TOOL_MODEL, "--data", "nowhere"), f"DatasetError: there is no file {ROOT}/nowhere/"),
        (("--model", TOOL_MODEL, "--client", "crewai"), "invalid choice: 'crewai'"),
    ],
)
def test_a_bad_argument_is_reported_in_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    done = call("examples/math_agent/train.py", *arguments)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
