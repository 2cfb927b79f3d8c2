"""Prompt example: the stand-in proposer, the agent, and three steps with the prompt that was found."""

import json
from pathlib import Path

import httpx
import pytest
from example_modules import example_module, run_copy
from math_helpers import ScriptedModel
from run_output import metric_rows

import raylight as rl


def proposed(url: str, model: str) -> str:
    reply = httpx.post(f"{url}/chat/completions", json={"model": model, "messages": []}, trust_env=False)
    return reply.json()["choices"][0]["message"]["content"]


def test_the_proposer_draws_all_rewrites_in_an_order_of_the_seed() -> None:
    proposer = example_module("prompt", "proposer")
    orders = []
    for seed in (0, 0, 1):
        with proposer.templated_proposer(seed) as url:
            assert proposed(url, proposer.CRITIC) == proposer.CRITIQUE
            orders.append([proposed(url, proposer.EDITOR) for _ in proposer.REWRITES])
    assert orders[0] == orders[1] != orders[2]
    assert set(orders[0]) == {f"<prompt>{rewrite}</prompt>" for rewrite in proposer.REWRITES}


@pytest.mark.parametrize(("answer", "reward"), [("42", 1), (" 42\n", 1), ("It is 42", 0), ("", 0), (None, 0)])
async def test_the_sum_alone_counts(answer: str | None, reward: float) -> None:
    agent = example_module("prompt", "agent")
    with ScriptedModel(lambda messages, tools: {"content": answer}) as model:
        llm = rl.LLM(endpoint=model.url, model="scripted")
        prompt = rl.PromptTemplate(template="{a}+{b}=")
        assert await agent.adder({"a": 12, "b": 30}, llm, prompt) == reward
    assert model.requests[0]["messages"][0]["content"] == "12+30="


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_steps_with_the_prompt_that_was_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_copy("prompt", tmp_path, "--steps", "3", "--rounds", "1", "--cpu", "--output-dir", str(out))
    apo = json.loads((out / "apo" / "apo.json").read_text())
    best = next(candidate for candidate in apo["candidates"] if candidate["version"] == apo["best"])
    assert best["val_score"] >= apo["candidates"][0]["val_score"]
    steps = metric_rows(out / "grpo")
    trained = [step for step in steps if "learner/grad_norm" in step]
    assert len(trained) == 3
    assert all(step["mismatch/logprob_abs_max"] < 1e-3 for step in trained)
    inputs = [item.rollout.mode for item in rl.read_rollouts(out / "store.db")]
    assert len(inputs) > 3 * 128
