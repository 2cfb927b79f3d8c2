"""GEPA with real runners, a real store and a real client, against scripted models."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from ray_cluster import Cluster
from scripted_models import serve_script

import raylight as rl
from raylight.errors import CheckpointError, ConfigError, CriticError, RolloutsFailedError

pytest.importorskip("gepa")
TASKS = [{"a": a, "b": b} for a, b in itertools.product(range(4), range(3))]
TRAIN, VAL = TASKS[:6], TASKS[6:]
SEED = rl.PromptTemplate(template="What is {a} and {b}?")


@pytest.fixture(scope="module", autouse=True)
def connected(shared_cluster: Cluster) -> Iterator[None]:
    with shared_cluster.connected():
        yield


def gepa(url: str, **settings: Any) -> rl.GEPA:
    client = AsyncOpenAI(base_url=url, api_key="key", max_retries=1, timeout=20)
    return rl.GEPA(client, **{"reflection_model": "reflector", "max_rollouts": 60} | settings)


def fit(algorithm: rl.GEPA, url: str, folder: Path, agent: Any = None, **more: Any) -> dict[str, Any]:
    resources = {"prompt_template": SEED, "worker": rl.LLM(endpoint=url, model="worker", api_key="k")}
    trainer = rl.Trainer(
        algorithm=algorithm, n_runners=2, output_dir=folder, initial_resources=resources, progress=False
    )
    return trainer.fit(agent or adder, TRAIN, VAL, **more)


@rl.rollout
async def adder(task: dict, prompt_template: rl.PromptTemplate, worker: rl.LLM) -> float:
    async with AsyncOpenAI(base_url=worker.endpoint, api_key=worker.api_key) as client:
        messages = [{"role": "user", "content": prompt_template.format(**task)}]
        reply = await client.chat.completions.create(model=worker.model, messages=messages)  # type: ignore[arg-type]
    expected = str(task["a"] + task["b"])
    rl.emit_message(f"expected exactly {expected!r}")
    return 1.0 if reply.choices[0].message.content == expected else 0.0


def worker(text: str) -> str:
    """Answer as the prompt asks: the sum alone only if it demands that."""
    total = sum(map(int, re.findall(r"\d+", text)))
    return str(total) if "nothing but" in text else f"The answer is {total}"


def reflector(text: str) -> str:
    """Write a prompt from the feedback alone: what was expected, and what was answered."""
    (current,) = re.findall(r"instructions to perform a task for me:\n```\n(.*?)\n```", text, re.DOTALL)
    expected, answered = (
        re.findall(r"expected exactly '(\d+)'", text),
        re.findall(r"The answer is (\d+)", text),
    )
    if (
        expected and answered and expected[0] in answered
    ):  # the sums are right, and the words around them wrong
        return f"```\n{current} Answer with nothing but the number.\n```"
    return f"```\n{current}\n```"


def test_an_honest_reflection_improves_the_prompt(tmp_path: Path) -> None:
    def script(model: str, text: str) -> str:
        return worker(text) if model == "worker" else reflector(text)

    with serve_script(script) as models:
        algorithm = gepa(models.url)
        fit(algorithm, models.url, tmp_path)
    assert algorithm.get_best_prompt().template == f"{SEED.template} Answer with nothing but the number."
    result = json.loads((tmp_path / "gepa.json").read_text())
    seed, best = result["candidates"][0], result["candidates"][result["best"]]
    assert (seed["val_score"], best["val_score"], best["parents"]) == (0.0, 1.0, [0])
    assert (tmp_path / "best_prompt.txt").read_text() == best["text"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["val/reward"] == 1.0
    assert rows[-1]["gepa/rollouts"] == result["rollouts"] <= 60 + len(VAL) + 6
    asked = [text for model, text in models.requests if model == "reflector"]
    assert "Reward: 0." in asked[0]  # the reflective dataset is of raylight's traces
    assert "[user] What is" in asked[0]
    assert "Keep these placeholders" in asked[0]


def test_a_prompt_that_cannot_be_filled_in_is_rejected_without_rollouts(tmp_path: Path) -> None:
    def script(model: str, text: str) -> str:
        return worker(text) if model == "worker" else "```\nWhat is {a} plus {c}?\n```"

    with serve_script(script) as models:
        algorithm = gepa(models.url, max_rollouts=18)
        fit(algorithm, models.url, tmp_path)
        rolled_out = {text for model, text in models.requests if model == "worker"}
    assert algorithm.get_best_prompt() == SEED
    assert algorithm.result is not None
    assert "unknown placeholders c" in algorithm.result["rejected"][0]["reason"]
    assert not any("plus" in text for text in rolled_out)


def test_a_search_resumes_and_only_its_own(tmp_path: Path) -> None:
    def script(model: str, text: str) -> str:
        return worker(text) if model == "worker" else reflector(text)

    with serve_script(script) as models:
        fit(gepa(models.url, max_rollouts=6), models.url, tmp_path)
        first = json.loads((tmp_path / "gepa.json").read_text())
        models.requests.clear()
        fit(gepa(models.url, max_rollouts=30), models.url, tmp_path, resume=True)
        second = json.loads((tmp_path / "gepa.json").read_text())
        seeds = [text for model, text in models.requests if model == "worker"]
        with pytest.raises(CheckpointError, match="another prompt, other tasks or other settings"):
            fit(gepa(models.url, seed=1), models.url, tmp_path, resume=True)
    assert first["candidates"][0] == second["candidates"][0]
    assert second["rollouts"] > first["rollouts"] >= 6
    assert len(seeds) == second["rollouts"] - first["rollouts"]  # the seed was not scored again
    assert second["candidates"][second["best"]]["val_score"] == 1.0


@pytest.mark.parametrize(("reply", "error"), [(401, CriticError), (404, CriticError)], ids=["key", "name"])
def test_a_reflection_model_that_rejects_requests_ends_the_search(
    reply: int, error: type[Exception], tmp_path: Path
) -> None:
    with (
        serve_script(lambda model, text: worker(text) if model == "worker" else reply) as models,
        pytest.raises(error, match="reflection_model"),
    ):
        fit(gepa(models.url), models.url, tmp_path)


@rl.rollout
def silent(task: dict, prompt_template: rl.PromptTemplate) -> None:
    return None


def test_an_agent_without_rewards_ends_the_search(tmp_path: Path) -> None:
    with (
        serve_script(lambda model, text: "x") as models,
        pytest.raises(RolloutsFailedError, match="returns None"),
    ):
        fit(gepa(models.url), models.url, tmp_path, silent)


@pytest.mark.parametrize(
    "settings", [{"max_rollouts": 0}, {"minibatch_size": 0}, {"reflection_model": ""}, {"temperature": -1.0}]
)
def test_wrong_settings_raise(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        gepa("http://127.0.0.1:1/v1", **settings)
    with pytest.raises(ConfigError, match=r"needs an openai\.AsyncOpenAI"):
        rl.GEPA("gpt-5")  # type: ignore[arg-type]
