"""The agents of the framework pages run in environments with the frameworks' own packages.

Each runs with a scripted model that adds with the page's tool, and so shows that tool calls and structured
answers pass through raylight; then it is trained.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from framework_agents import CLIENTS, Environments, agent_of_page, failures, requirements, run_once
from ray_cluster import Cluster
from scripted_model import scripted_model

import raylight as rl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TASK = {"a": 12, "b": 30}
AGENTS: dict[str, tuple[str, ...]] = {
    "pydantic_ai": ("agent",),
    "pydantic_ai/responses": ("agent", "OpenAIChatModel", "OpenAIResponsesModel"),
    "smolagents": ("agent",),
    "smolagents/code": ("code agent",),
    "dspy": ("agent",),
    "haystack": ("agent",),
    "agno": ("agent",),
    "instructor": ("agent",),
}
"""Block of each agent, with a text in it and its replacement, by the page's name and a variant."""
CALLS = {"dspy": 3, "smolagents/code": 1, "instructor": 1}
"""Model calls of an agent with a scripted model, if they are not two."""


def page_agent(name: str, environments: Environments) -> rl.CommandAgent:
    page = CLIENTS / f"{name.partition('/')[0]}.md"
    return agent_of_page(page, environments.python(requirements(page)), *AGENTS[name])


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_adds_with_its_tool(
    name: str, cluster: Cluster, environments: Environments, tmp_path: Path
) -> None:
    with scripted_model() as url:
        (item,) = run_once(page_agent(name, environments), [TASK], url, tmp_path)
    assert failures([item]) == []
    assert item.reward == 1.0
    triplets = rl.TracerTraceToTriplet().adapt(item.spans)
    assert len(triplets) == CALLS.get(name, 2)
    assert {triplet.metadata["agent_name"] for triplet in triplets} == {
        None if name == "instructor" else "solver"
    }
    asked = [span.attributes.get("raylight.request.parameters") for span in item.spans]
    assert {json.loads(text)["temperature"] for text in asked if text} == {1.0}
