"""The math agent in every client library, on real Ray, with a real MCP server, against a scripted model behind raylight's proxy."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from math_helpers import ROOT, Script, ScriptedModel, first_step, logging_command, solving, wrong

import raylight as rl
from examples.math_agent.agent import math_agent
from examples.math_agent.clients import CLIENTS
from examples.math_agent.config import DATA, MathSettings
from raylight.semconv import CHAT_SPAN, INPUT_MESSAGES, RESPONSE_ID, TOOL_DEFINITIONS
from raylight.traces.span_tree import SpanTree
from raylight.trainer.data_files import read_tasks
from raylight.types import FinishedRollout

TASKS = [task for split in ("train", "val", "test") for task in read_tasks(DATA / f"{split}.jsonl")]
ONE_STEP = [task for task in TASKS if task["source"] == "raylight/recipe"][:2]
"""Their first calculation gives the answer."""
TWO_STEPS = next(task for task in TASKS if task["source"] == "raylight/shopping")
"""Its first calculation does not."""
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


@pytest.fixture(scope="module", autouse=True)
def a_cluster() -> Iterator[None]:
    import ray

    here = {"env_vars": {"PYTHONPATH": str(ROOT)}}  # the runners import the agent
    ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False, runtime_env=here)
    yield
    ray.shutdown()


def score(
    client: Any, script: Script, command: tuple[str, ...], tasks: list[Any], folder: Path
) -> tuple[dict[str, Any], ScriptedModel]:
    """Have the agent solve the tasks with a scripted model, and keep what is written into `folder`."""
    settings = MathSettings(client=client, mcp_command=command)
    with ScriptedModel(script) as model:
        trainer = rl.Trainer(
            engine={"kind": "upstream", "url": model.url},
            n_runners=1,
            output_dir=folder,
            progress=False,
            initial_resources={"settings": settings},
        )
        return trainer.evaluate(math_agent, tasks, model="scripted", sampling={"temperature": 0.5}), model


async def read(folder: Path) -> list[FinishedRollout]:
    """What the store has of the rollouts, in the order of their tasks."""
    service = rl.StoreService(str(folder / "eval.db"), read_only=True)
    store = rl.StoreClient(service)
    ids = [json.loads(line)["rollout_id"] for line in (folder / "eval.jsonl").read_text().splitlines()]
    found = await store.collect(ids, with_spans=True)
    await service.close()
    return found


@pytest.mark.parametrize("client", CLIENTS)
async def test_every_client_calls_the_tool_and_is_rewarded_for_the_answer(
    client: str, tmp_path: Path
) -> None:
    tasks, log = [*ONE_STEP, TWO_STEPS], tmp_path / "calls.jsonl"
    figures, model = score(
        client,
        solving({task["question"]: first_step(task) for task in tasks}),
        logging_command(log),
        tasks,
        tmp_path,
    )
    finished = await read(tmp_path)

    assert [item.reward for item in finished] == [1.0, 1.0, 0.0]
    assert figures["rewards"]["reward"]["mean"] == pytest.approx(2 / 3)
    calls = [json.loads(line) for line in log.read_text().splitlines()]  # noted by the server's process
    assert sorted(call["expression"] for call in calls) == sorted(first_step(task) for task in tasks)

    captured = [[span for span in item.spans if span.name == CHAT_SPAN] for item in finished]
    assert [len(spans) for spans in captured] == [2, 2, 2]
    assert sorted(span.attributes[RESPONSE_ID] for spans in captured for span in spans) == sorted(model.ids)
    by_expression = {call["expression"]: call["result"] for call in calls}
    for task, (asked, answered) in zip(tasks, captured, strict=True):
        assert "calculate" in asked.attributes[TOOL_DEFINITIONS]
        returned = json.loads(answered.attributes[INPUT_MESSAGES])[-1]
        assert returned["role"] == "tool"
        assert by_expression[first_step(task)] in json.dumps(returned["content"])
    assert all(request["temperature"] == 0.5 for request in model.requests)


async def test_chats_of_agent_framework_are_the_captured_calls(tmp_path: Path) -> None:
    task = ONE_STEP[0]
    _, model = score(
        "agent_framework",
        solving({task["question"]: first_step(task)}),
        logging_command(tmp_path / "log"),
        [task],
        tmp_path,
    )
    (finished,) = await read(tmp_path)
    chats = [span for span in finished.spans if span.name.startswith("chat ")]
    assert [span.attributes[RESPONSE_ID] for span in chats] == model.ids
    tree = SpanTree.from_spans(finished.spans)
    tree.repair_hierarchy()
    assert tree.agents_of_responses() == dict.fromkeys(model.ids, "calculator")
    assert any(span.name == "execute_tool calculate" for span in finished.spans)


async def test_a_wrong_answer_is_worth_nothing(tmp_path: Path) -> None:
    figures, _ = score("openai", wrong, logging_command(tmp_path / "log"), ONE_STEP, tmp_path)
    assert figures["rewards"]["reward"]["mean"] == 0.0
    assert figures["failed"] == 0


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_server_that_dies_fails_the_rollout_and_scores_nothing(client: str, tmp_path: Path) -> None:
    fatal = tmp_path / "fatal.py"
    fatal.write_text(FATAL_SERVER)
    task = ONE_STEP[0]
    with pytest.raises(
        rl.errors.RolloutsFailedError, match=r"CalculatorError.*was lost in a call: Connection closed"
    ):
        score(client, solving({task["question"]: "1+1"}), (sys.executable, str(fatal)), [task], tmp_path)
    (finished,) = await read(tmp_path)
    assert finished.reward is None
    assert str(fatal) in finished.rollout.attempt.failure.error


async def test_a_server_that_does_not_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(rl.errors.RolloutsFailedError, match=r"CalculatorError.*did not start.*No such file"):
        score("openai", wrong, (os.path.join(tmp_path, "nothing"),), [ONE_STEP[0]], tmp_path)
