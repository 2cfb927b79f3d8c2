"""The agents that the pages of docs/clients show run on a real Ray cluster.

Agents without tools are trained with the starter model. Agents with tools use a scripted model. One run
covers all pages of a kind: each task names the page whose agent runs it.
"""

import asyncio
import importlib.metadata
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docs_snippets import Snippet, snippet
from framework_agents import CLIENTS, RunTasks
from packaging.version import Version
from ray_cluster import Cluster
from run_output import metric_rows
from scripted_model import scripted_model

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.types import FinishedRollout

TRAINED = ["openai", "anthropic", "litellm", "plain_http"]
WITH_TOOLS = ["openai_agents", "langgraph", "agent_framework"]
RESPONSES = {
    "openai_agents": ("OpenAIChatCompletionsModel", "OpenAIResponsesModel"),
    "agent_framework": ("OpenAIChatCompletionClient", "OpenAIChatClient"),
}
"""Chat class that a page shows and the Responses class that it names as the alternative, by page."""
VERSION = re.compile(r"\b([a-z]+(?:-[a-z]+)*) (\d+\.\d+\.\d+)\b")
TASKS, _ = additions(0)


class PageAgents(rl.LitAgent):
    """Agent that runs the agent of the page that a task names, as that page's own decorator would."""

    def __init__(self, agents: dict[str, Any]) -> None:
        super().__init__()
        self.agents = agents

    async def rollout_async(
        self, task: dict[str, Any], resources: rl.NamedResources, rollout: rl.Rollout
    ) -> Any:
        agent = self.agents[task["page"]]
        if inspect.iscoroutinefunction(agent.__wrapped__):
            return await agent(task, resources["llm"])
        return await asyncio.to_thread(agent, task, resources["llm"])


def agent_of(block: Snippet) -> Any:
    return block.run()["agent"]


@pytest.fixture(scope="module")
def connected(shared_cluster: Cluster) -> Iterator[None]:
    with shared_cluster.connected(import_path=Path(__file__).parent, LITELLM_LOCAL_MODEL_COST_MAP="True"):
        yield


@pytest.fixture(scope="module")
def trained(connected: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of the index page's run, in which every agent without tools has two tasks."""
    folder = tmp_path_factory.mktemp("trained")
    tasks = [task | {"page": page} for task, page in zip(TASKS, TRAINED * 2, strict=False)]
    agents = PageAgents({page: agent_of(snippet(CLIENTS / f"{page}.md", "agent")) for page in TRAINED})
    settings = {"model": STARTER_MODEL, "n_steps": 1, "output_dir": folder, "agent": agents, "tasks": tasks}
    snippet(CLIENTS / "README.md", "train").run(settings)
    return folder


@pytest.fixture(scope="module")
def scripted(connected: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, FinishedRollout]:
    """Rollout of each agent with tools, and of its variant with the Responses API, by page."""
    agents = {}
    for page in WITH_TOOLS:
        block = snippet(CLIENTS / f"{page}.md", "agent")
        agents[page] = agent_of(block)
        if page in RESPONSES:
            assert RESPONSES[page][0] in block.code
            agents[f"{page}/responses"] = agent_of(replace(block, code=block.code.replace(*RESPONSES[page])))
    tasks = [{"a": 12, "b": 30 + number, "page": page} for number, page in enumerate(agents)]
    shown = snippet(CLIENTS / "agent_framework.md", "tracer").run({"rl": rl, "model": STARTER_MODEL})[
        "trainer"
    ]
    algorithm = RunTasks()
    with scripted_model() as url:
        trainer = rl.Trainer(
            algorithm=algorithm,
            n_runners=1,
            output_dir=tmp_path_factory.mktemp("scripted"),
            progress=False,
            initial_resources={"llm": rl.LLM(endpoint=url, model="scripted", traced=True)},
            tracer=shown.tracer,
        )
        trainer.fit(PageAgents(agents), tasks)
    return {item.rollout.input["page"]: item for item in algorithm.results}


@pytest.mark.slow
@pytest.mark.framework("litellm")
async def test_agents_without_tools_are_trained(trained: Path) -> None:
    rows = metric_rows(trained)
    (row,) = [row for row in rows if "learner/grad_norm" in row]
    assert row["train/failed"] == 0
    service = rl.StoreService(trained / "store.db", read_only=True)
    store = rl.StoreClient(service)
    try:
        rollouts = await store.query_rollouts(status_in=["succeeded"])
        found = await store.collect([rollout.rollout_id for rollout in rollouts], with_spans=True)
    finally:
        await service.close()
    calls = Counter()
    for item in found:
        (generation,) = item.generations
        (triplet,) = rl.TracerTraceToTriplet().adapt(item.spans)
        assert triplet.response["token_ids"] == generation.output_ids.tolist()
        assert generation.sampling["temperature"] == 1.0
        calls[item.rollout.input["page"]] += 1
    assert set(calls) == set(TRAINED)
    assert sum(calls.values()) == row["train/trained"]


@pytest.mark.framework("agents", "langgraph", "agent_framework")
@pytest.mark.parametrize("page", [*WITH_TOOLS, *(f"{page}/responses" for page in RESPONSES)])
def test_agents_with_tools_answer_correctly(scripted: dict[str, FinishedRollout], page: str) -> None:
    item = scripted[page]
    failure = item.rollout.attempt.failure if item.rollout.attempt else None
    assert (item.rollout.status, item.reward) == ("succeeded", 1.0), failure
    names = [triplet.metadata["agent_name"] for triplet in rl.TracerTraceToTriplet().adapt(item.spans)]
    assert names == ["solver", "solver", "editor"] if "agent_framework" in page else ["solver", "solver"]
    dialect = "responses" if page.endswith("/responses") else "chat"
    assert {
        span.attributes["raylight.dialect"] for span in item.spans if "raylight.dialect" in span.attributes
    } == {dialect}


@pytest.mark.framework("agents", "langgraph", "agent_framework")
@pytest.mark.parametrize("page", ["agent_framework", "agent_framework/responses"])
def test_agent_framework_traces_agents_tools_and_executors(
    scripted: dict[str, FinishedRollout], page: str
) -> None:
    spans = {span.name: span for span in scripted[page].spans}
    assert {
        "workflow.run",
        "executor.process solver",
        "executor.process editor",
        "chat scripted",
        "execute_tool add",
    } <= set(spans)
    tool = spans["execute_tool add"].attributes
    assert json.loads(tool["gen_ai.tool.call.arguments"])["a"] == 12
    assert tool["gen_ai.tool.call.result"] == str(sum(scripted[page].rollout.input[name] for name in "ab"))


@pytest.mark.framework("litellm", "agents", "langgraph", "agent_framework")
@pytest.mark.parametrize("page", [*TRAINED, *WITH_TOOLS, "own_process"])
def test_a_page_names_compatible_versions(page: str) -> None:
    named = VERSION.findall((CLIENTS / f"{page}.md").read_text())
    for name, version in named:  # the installed version may be newer, but of the same major version
        assert (
            Version(version)
            <= Version(importlib.metadata.version(name))
            < Version(str(Version(version).major + 1))
        ), name
    assert named or page == "plain_http"


@pytest.mark.parametrize("page", sorted(path.stem for path in CLIENTS.glob("*.md") if path.stem != "README"))
def test_a_page_is_in_the_index(page: str) -> None:
    assert f"]({page}.md)" in (CLIENTS / "README.md").read_text()
