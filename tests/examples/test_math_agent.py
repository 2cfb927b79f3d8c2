"""The math agent in every client library, on real Ray, with a real MCP server, against a scripted model
behind raylight's gateway.

All tests read one run, in which each task names its client library and its MCP server.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from math_helpers import ROOT, ScriptedModel, first_step, logging_command, solving, text_of, wrong
from ray_cluster import Cluster

import raylight as rl
from examples.math_agent.clients import CLIENTS
from examples.math_agent.config import DATA, MathSettings
from raylight.semconv import CHAT_SPAN, INPUT_MESSAGES, RESPONSE_ID, TOOL_DEFINITIONS
from raylight.traces.span_tree import SpanTree
from raylight.trainer.spec.task_files import read_tasks
from raylight.types import FinishedRollout

pytestmark = pytest.mark.framework("agent_framework", "langgraph", "agents")
TASKS = [task for split in ("train", "val", "test") for task in read_tasks(DATA / f"{split}.jsonl")]
TASKS_OF_ONE_STEP = [task for task in TASKS if task["source"] == "raylight/recipe"]
"""Tasks whose first calculation gives the answer."""
ONE_STEP, MISTRUSTED, FATAL = TASKS_OF_ONE_STEP[:2], TASKS_OF_ONE_STEP[2:3], TASKS_OF_ONE_STEP[3]
TWO_STEPS = next(task for task in TASKS if task["source"] == "raylight/shopping")
"""Task whose first calculation does not give the answer."""
SOLVED = [*ONE_STEP, TWO_STEPS]
MISTRUSTED_QUESTIONS = {task["question"] for task in MISTRUSTED}
FATAL_SERVER = """
import os, sys
from mcp.server.mcpserver import MCPServer
server = MCPServer("calculator", log_level="ERROR")
@server.tool(structured_output=False)
async def calculate(expression: str) -> str:
    "Dies of it."
    os._exit(1)
server.run("stdio")
"""


@dataclass(frozen=True)
class Run:
    """Evaluation of the agent.

    Attributes:
        figures: what `Trainer.evaluate` returned.
        items: the finished rollouts by client and kind of task: "solved", "mistrusted", "fatal", "absent".
        calls: the calls that the MCP server of a client's solved tasks received.
        model: the scripted model, with the requests that it received.
    """

    figures: dict[str, Any]
    items: dict[tuple[str, str], list[FinishedRollout]]
    calls: dict[str, list[dict[str, Any]]]
    model: ScriptedModel


def tasks_in(folder: Path) -> list[dict[str, Any]]:
    """Return the tasks: three to solve and a fatal one for each client, one to get wrong, and one without a
    server."""
    fatal = folder / "fatal.py"
    fatal.write_text(FATAL_SERVER)
    tasks: list[dict[str, Any]] = []

    def add(kind: str, client: str, command: tuple[str, ...], *chosen: dict[str, Any]) -> None:
        tasks.extend({**task, "kind": kind, "client": client, "command": command} for task in chosen)

    for client in CLIENTS:
        add("solved", client, logging_command(folder / f"{client}.jsonl"), *SOLVED)
        add("fatal", client, (sys.executable, str(fatal)), FATAL)
    add("mistrusted", "openai", logging_command(folder / "mistrusted.jsonl"), *MISTRUSTED)
    add("absent", "openai", (str(folder / "nothing"),), FATAL)
    return tasks


def script(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Answer the mistrusted questions wrongly, and all others with what the calculator returns."""
    if any(text_of(message) in MISTRUSTED_QUESTIONS for message in messages):
        return wrong(messages, tools)
    return solving({FATAL["question"]: "1+1"} | {task["question"]: first_step(task) for task in SOLVED})(
        messages, tools
    )


def agent_of_tasks() -> Any:
    """Return the math agent with the client and the MCP server of its task.

    A local function, so that it is pickled by value.
    """

    @rl.rollout
    async def math_agent_of_task(task: dict, llm: rl.LLM, settings: dict[str, Any]) -> float:
        from examples.math_agent.agent import math_agent

        chosen = {"client": task["client"], "mcp_command": tuple(task["command"])}
        return await math_agent(task, llm, settings | chosen)

    return math_agent_of_task


async def read(folder: Path) -> list[FinishedRollout]:
    """Return the rollouts in the store, in the order of their tasks."""
    service = rl.StoreService(str(folder / "eval.db"), read_only=True)
    store = rl.StoreClient(service)
    ids = [json.loads(line)["rollout_id"] for line in (folder / "eval.jsonl").read_text().splitlines()]
    found = await store.collect(ids, with_spans=True)
    await service.close()
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("math")
    with shared_cluster.connected(import_path=ROOT), ScriptedModel(script) as model:
        trainer = rl.Trainer(
            engine={"kind": "upstream", "url": model.url},
            n_runners=1,
            output_dir=folder,
            progress=False,
            initial_resources={"settings": MathSettings().model_dump()},
        )
        figures = trainer.evaluate(
            agent_of_tasks(), tasks_in(folder), model="scripted", sampling={"temperature": 0.5}
        )
    items: dict[tuple[str, str], list[FinishedRollout]] = {}
    for item in await read(folder):
        task = item.rollout.input
        items.setdefault((task["client"], task["kind"]), []).append(item)
    calls = {
        client: [json.loads(line) for line in (folder / f"{client}.jsonl").read_text().splitlines()]
        for client in CLIENTS
    }
    return Run(figures, items, calls, model)


def captured(item: FinishedRollout) -> list[rl.Span]:
    return [span for span in item.spans if span.name == CHAT_SPAN]


def error_of(item: FinishedRollout) -> str:
    assert item.reward is None
    return item.rollout.attempt.failure.error


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_calls_the_tool_and_is_rewarded_for_the_answer(client: str, run: Run) -> None:
    solved, calls = run.items[client, "solved"], run.calls[client]
    assert [item.reward for item in solved] == [1.0, 1.0, 0.0]
    assert sorted(call["expression"] for call in calls) == sorted(first_step(task) for task in SOLVED)

    spans = [captured(item) for item in solved]
    assert [len(pair) for pair in spans] == [2, 2, 2]
    by_expression = {call["expression"]: call["result"] for call in calls}
    for task, (first, second) in zip(SOLVED, spans, strict=True):
        assert "calculate" in first.attributes[TOOL_DEFINITIONS]
        returned = json.loads(second.attributes[INPUT_MESSAGES])[-1]
        assert returned["role"] == "tool"
        assert by_expression[first_step(task)] in json.dumps(returned["content"])


def test_every_call_is_captured_once_with_the_sampling_of_the_run(run: Run) -> None:
    spans = [span for items in run.items.values() for item in items for span in captured(item)]
    assert sorted(span.attributes[RESPONSE_ID] for span in spans) == sorted(run.model.ids)
    assert all(request["temperature"] == 0.5 for request in run.model.requests)


def test_chats_of_agent_framework_are_the_captured_calls(run: Run) -> None:
    item = run.items["agent_framework", "solved"][0]
    ids = [span.attributes[RESPONSE_ID] for span in captured(item)]
    chats = [span for span in item.spans if span.name.startswith("chat ")]
    assert [span.attributes[RESPONSE_ID] for span in chats] == ids
    tree = SpanTree.from_spans(item.spans)
    tree.repair_hierarchy()
    assert tree.agents_of_responses() == dict.fromkeys(ids, "calculator")
    assert any(span.name == "execute_tool calculate" for span in item.spans)


def test_a_wrong_answer_has_reward_0(run: Run) -> None:
    assert [item.reward for item in run.items["openai", "mistrusted"]] == [0.0]
    assert run.figures["rewards"]["reward"]["mean"] == pytest.approx(8 / 18)  # a failed rollout counts as 0
    assert run.figures["failed"] == len(CLIENTS) + 1


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_dies_fails_the_rollout_and_scores_nothing(client: str, run: Run) -> None:
    (item,) = run.items[client, "fatal"]
    assert re.search(r"CalculatorError.*fatal\.py.* was lost in a call: Connection closed", error_of(item))


def test_a_server_that_does_not_start_fails_the_rollout(run: Run) -> None:
    (item,) = run.items["openai", "absent"]
    assert re.search(r"CalculatorError.*did not start.*No such file", error_of(item))
