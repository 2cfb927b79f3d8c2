"""GEPA with real runners, a real store and a real client, against scripted models."""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from ray_cluster import Cluster
from run_output import metric_rows
from scripted_models import add_a_missing_word, serve_script

import raylight as rl

pytest.importorskip("gepa")
TASKS = [{"a": a, "b": b} for a, b in itertools.product(range(4), range(3))]
SEED = rl.PromptTemplate(template="What is {a} and {b}?")
DRIVER = Path(__file__).with_name("gepa_run.py")


@rl.rollout
async def adder(task: dict, prompt_template: rl.PromptTemplate, worker: rl.LLM) -> float:
    model = worker.client()
    messages: list[Any] = [{"role": "user", "content": prompt_template.format(**task)}]
    reply = await model.chat.completions.create(model=worker.model, messages=messages)
    expected = str(task["a"] + task["b"])
    rl.emit_message(f"expected exactly {expected!r}")
    return 1.0 if reply.choices[0].message.content == expected else 0.0


def add(text: str) -> str:
    """Answer as the prompt asks: the sum alone only if it demands that."""
    total = sum(map(int, re.findall(r"\d+", text)))
    return str(total) if "nothing but" in text else f"The answer is {total}"


def reflect(text: str) -> str:
    """Write a prompt from the feedback alone: what was expected, and what was answered."""
    (current,) = re.findall(r"instructions to perform a task for me:\n```\n(.*?)\n```", text, re.DOTALL)
    expected, answered = (
        re.findall(pattern, text) for pattern in (r"expected exactly '(\d+)'", r"The answer is (\d+)")
    )
    is_wordy = bool(expected) and expected == answered  # the sums are right, and the words around them wrong
    return f"```\n{current} Answer with nothing but the number.\n```" if is_wordy else f"```\n{current}\n```"


@pytest.mark.slow
def test_reflection_on_traces_improves_the_prompt(shared_cluster: Cluster, tmp_path: Path) -> None:
    with (
        shared_cluster.connected(),
        serve_script(lambda model, text: add(text) if model == "worker" else reflect(text)) as models,
    ):
        client = AsyncOpenAI(base_url=models.url, api_key="key", max_retries=1, timeout=20)
        algorithm = rl.GEPA(client, reflection_model="reflector", max_rollouts=20)
        worker = rl.LLM(endpoint=models.url, model="worker", api_key="k", traced=True)
        resources = {"prompt_template": SEED, "worker": worker}
        trainer = rl.Trainer(
            algorithm=algorithm,
            n_runners=1,
            output_dir=tmp_path,
            initial_resources=resources,
            progress=False,
        )
        trainer.fit(adder, TASKS[:6], TASKS[6:])
        asked = [text for model, text in models.requests if model == "reflector"]
    best = f"{SEED.template} Answer with nothing but the number."
    assert algorithm.get_best_prompt().template == best
    assert "Reward: 0." in asked[0]
    assert "[user] What is" in asked[0]  # the recorded conversation
    assert "Keep these placeholders" in asked[0]
    result = json.loads((tmp_path / "gepa.json").read_text())
    assert [candidate["val_score"] for candidate in result["candidates"]] == [0.0, 1.0]
    assert (tmp_path / "best_prompt.txt").read_text() == best
    rows = metric_rows(tmp_path)
    assert rows[-1]["val/reward"] == 1.0
    assert rows[-1]["gepa/rollouts"] == result["rollouts"]


@pytest.mark.slow
def test_a_search_goes_on_after_its_driver_was_killed(shared_cluster: Cluster, tmp_path: Path) -> None:
    """It is killed in its second round, while the model reflects; this round is repeated."""
    asked, killed = itertools.count(1), threading.Event()
    in_second_round = threading.Event()

    def script(model: str, text: str) -> str:
        if next(asked) == 2:
            in_second_round.set()
            assert killed.wait(60)
        return add_a_missing_word(model, text)

    with serve_script(script) as models:
        command = [sys.executable, str(DRIVER), str(tmp_path), models.url]
        first = subprocess.Popen(command, env=shared_cluster.env())
        assert in_second_round.wait(120)
        first.kill()
        first.wait()
        killed.set()
        (row,) = metric_rows(tmp_path)
        before = json.loads((tmp_path / "gepa" / "candidates.json").read_text())
        subprocess.run(command, env=shared_cluster.env(), check=True, timeout=120)
    result = json.loads((tmp_path / "gepa.json").read_text())
    texts = [candidate["text"] for candidate in result["candidates"]]
    assert texts[:2] == [candidate["prompt_template"] for candidate in before]
    assert result["candidates"][result["best"]]["val_score"] == 1.0
    assert [row["step"] for row in metric_rows(tmp_path)] == list(range(1, len(metric_rows(tmp_path)) + 1))
    with sqlite3.connect(f"file:{tmp_path}/store.db?mode=ro", uri=True) as db:
        ((made,),) = db.execute("SELECT COUNT(*) FROM rollouts WHERE status = 'succeeded'")
    assert made == result["rollouts"] - row["gepa/rollouts"]  # the seed was not scored again
