"""Distillation example: the agent, the models, and three steps of each stage."""

import json
from pathlib import Path

import pytest
from example_modules import example_module, run_copy
from math_helpers import ScriptedModel

import raylight as rl


@pytest.mark.parametrize(("answer", "reward"), [("aabcd", 1), (" aabcd\n", 1), ("abcd", 0), (None, 0)])
async def test_the_sorted_letters_alone_count(answer: str | None, reward: float) -> None:
    agent = example_module("distil", "agent")
    with ScriptedModel(lambda messages, tools: {"content": answer}) as model:
        llm = rl.LLM(endpoint=model.url, model="scripted")
        assert await agent.sort_letters({"letters": "dabac"}, llm) == reward
    assert "dabac" in model.requests[0]["messages"][0]["content"]


@pytest.mark.slow
def test_the_teacher_is_not_taught_the_tasks_of_the_run() -> None:
    models = example_module("distil", "models")
    tasks = models.make_tasks(128, 1)
    taught = {question["content"] for question, _ in models.demonstrations(1)}
    known = [task for task in tasks if models.question(task["letters"])[0]["content"] in taught]
    assert len(known) < 40  # a sixth by chance


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_steps_of_each_stage(tmp_path: Path) -> None:
    run_copy("distil", tmp_path, "--steps", "3", "--cpu", "--output-dir", str(tmp_path / "out"))
    for stage, signal in (
        ("sft", "train/loss"),
        ("distil", "learner/teacher_kl"),
        ("grpo", "learner/grad_norm"),
    ):
        lines = (tmp_path / "out" / stage / "metrics.jsonl").read_text().splitlines()
        steps = [step for step in map(json.loads, lines) if signal in step]
        assert len(steps) == 3 or (stage == "sft" and len(steps) > 3), stage  # by the number of right answers
        if stage != "sft":
            assert all(step["mismatch/logprob_abs_max"] < 1e-3 for step in steps), stage
    assert (tmp_path / "out" / "grpo" / "checkpoint" / "config.json").exists()
