"""The agents of the framework pages run in environments with the frameworks' own packages.

Each runs with a scripted model that adds with the page's tool, and so shows that tool calls and structured
answers pass through raylight. Then it is trained for two steps with the small model that calls tools.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from docs_snippets import snippet, write_files
from framework_agents import (
    CLIENTS,
    MAX_TOKENS,
    Environments,
    agent_of_page,
    failures,
    modules,
    noisy,
    requirements,
    run_once,
    train,
)
from ray_cluster import Cluster
from scripted_model import scripted_model

import raylight as rl
from raylight.quickstart import TOOL_MODEL

pytestmark = [pytest.mark.slow(parts=60), pytest.mark.timeout(600)]

TASKS = [{"a": 12, "b": 30}, {"a": 45, "b": 21}]


@dataclass(frozen=True)
class Shown:
    """Agent that a page shows.

    Attributes:
        block: name of the page's block.
        replaced: texts in the block, each followed by its replacement.
        calls: model calls with the scripted model.
        rows: rows of each conversation of the trained model; None if they differ.
        named: whether the agent's calls have the name "solver".
        trained: whether the small model can write the form of answers that the framework reads.
    """

    block: str = "agent"
    replaced: tuple[str, ...] = ()
    calls: int = 2
    rows: int | None = 1
    named: bool = True
    trained: bool = True


AGENTS = {
    "pydantic_ai": Shown(),
    "pydantic_ai/responses": Shown(replaced=("OpenAIChatModel", "OpenAIResponsesModel")),
    "pydantic_ai/native": Shown("native output", calls=1, named=False),
    "smolagents": Shown(replaced=("max_steps=4", "max_steps=2"), rows=None),
    "smolagents/code": Shown("code agent", ("max_steps=4", "max_steps=2"), calls=1, rows=None),
    "dspy": Shown(calls=3, trained=False),
    "haystack": Shown(),
    "agno": Shown(),
    "instructor": Shown(calls=1, named=False),
    "crewai": Shown(rows=None),
    "crewai/structured": Shown("structured", calls=1),
    "llamaindex": Shown(replaced=("streaming=True", "streaming=False")),  # the scripted model does not stream
    "google_adk": Shown(rows=None),
    "semantic_kernel": Shown(rows=None),
    "autogen": Shown(),
    "langgraph/structured": Shown("structured", calls=1, named=False),
    "langgraph/schema": Shown("structured", ("function_calling", "json_schema"), calls=1, named=False),
}
"""Agents by the name of their page and a variant."""


def page_of(name: str) -> Path:
    return CLIENTS / f"{name.partition('/')[0]}.md"


def check(rollouts: list[Any], shown: Shown) -> None:
    """Check rollouts with the scripted model."""
    assert failures(rollouts) == []
    for item in rollouts:
        assert item.reward == 1.0
        triplets = rl.TracerTraceToTriplet().adapt(item.spans)
        assert len(triplets) == shown.calls
        names = {triplet.metadata["agent_name"] for triplet in triplets}
        assert names == {"solver" if shown.named else None}
        asked = [span.attributes.get("raylight.request.parameters") for span in item.spans]
        assert {json.loads(text)["temperature"] for text in asked if text} == {1.0}


def long_model(folder: Path) -> Path:
    """Return a copy of the model that takes longer prompts than it was trained with."""
    model = folder / "model"
    shutil.copytree(TOOL_MODEL, model)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": MAX_TOKENS}
    (model / "config.json").write_text(json.dumps(config))
    return model


def check_training(agent: Any, shown: Shown, folder: Path) -> None:
    """Train an agent for two steps, and check what was trained."""
    training = train(agent, TASKS, str(long_model(folder)), folder / "run", failure_reward=0.0)
    assert len(training.metrics) == 2
    for row in training.metrics:
        assert row["train/trained"] == row["train/rollouts"] == 8
        assert row["learner/grad_norm"] > 0
        assert row["mismatch/logprob_abs_max"] < 1e-3
        assert row["trace/rows_per_rollout"] == (shown.rows or row["trace/rows_per_rollout"])
    assert len(training.failures) < len(training.rollouts), training.failures


@pytest.fixture(scope="module", autouse=True)
def connected(shared_cluster: Cluster) -> Iterator[None]:
    with shared_cluster.connected(import_path=Path(__file__).parent):
        yield


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_adds_with_its_tool(name: str, environments: Environments, tmp_path: Path) -> None:
    shown = AGENTS[name]
    agent = agent_of_page(page_of(name), environments, shown.block, *shown.replaced)
    with scripted_model() as url:
        check(run_once(agent, TASKS[:1], url, tmp_path), shown)


@pytest.mark.parametrize("name", [name for name, shown in AGENTS.items() if shown.trained])
def test_an_agent_is_trained(name: str, environments: Environments, tmp_path: Path) -> None:
    shown = AGENTS[name]
    agent = agent_of_page(page_of(name), environments, shown.block, *shown.replaced, noise=True)
    check_training(agent, shown, tmp_path)


@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")
@pytest.mark.parametrize("program", ["agent.mjs", "structured.mjs"])
def test_the_agent_in_typescript(program: str, tmp_path: Path) -> None:
    page = CLIENTS / "vercel_ai.md"
    write_files(page, tmp_path)
    modules(requirements(page), tmp_path)
    block = snippet(page, "agent")
    code = block.code.replace("/home/me/agent", str(tmp_path)).replace("agent.mjs", program)
    agent = replace(block, code=code).run()["agent"]
    shown = Shown() if program == "agent.mjs" else Shown(calls=1, named=False)
    with scripted_model() as url:
        check(run_once(agent, TASKS[:1], url, tmp_path / "scripted"), shown)
    trained = rl.CommandAgent(["node", program], cwd=tmp_path, reward=noisy)
    check_training(trained, shown, tmp_path / "trained")
