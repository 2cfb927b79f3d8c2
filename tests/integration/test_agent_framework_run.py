"""GRPO trains one executor of an agent-framework workflow; the executors' names select its calls."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_output import metric_rows
from scripted_models import serve_chat
from starlette.requests import Request
from starlette.responses import JSONResponse

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.traces.trained_agents import agents_of_generations
from raylight.types import FinishedRollout

pytestmark = [pytest.mark.slow, pytest.mark.framework("agent_framework")]

TRAIN, _ = additions(0)


async def checker(request: Request) -> JSONResponse:
    """Answer with a call of the tool, then with the tool's result."""
    body = await request.json()
    last = body["messages"][-1]
    if last["role"] == "tool":
        message: dict[str, Any] = {"role": "assistant", "content": last["content"]}
    else:
        tool = {"name": body["tools"][0]["function"]["name"], "arguments": "{}"}
        calls = [{"id": "call_1", "type": "function", "function": tool}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
    reason = "tool_calls" if "tool_calls" in message else "stop"
    number = sum(entry["role"] == "tool" for entry in body["messages"])
    return JSONResponse(
        {
            "id": f"chatcmpl-{body['metadata']['task']}-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        }
    )


@pytest.fixture(scope="module")
def fixed_model() -> Iterator[str]:
    with serve_chat(checker) as url:
        yield url


@rl.rollout(trained_agents="^solver$")
async def workflow(task: dict[str, int], llm: rl.LLM, fixed: rl.LLM, rollout: rl.Rollout) -> float:
    """Run solver and critic in parallel, then a checker with a tool, whose answer counts."""
    from agent_framework import (
        Agent,
        AgentExecutor,
        AgentExecutorResponse,
        Executor,
        WorkflowBuilder,
        WorkflowContext,
        handler,
    )
    from agent_framework.openai import OpenAIChatCompletionClient
    from openai import AsyncOpenAI

    from raylight.quickstart.additions import is_right, question

    class ResumePoint(Executor):
        @handler
        async def begin(self, text: str, ctx: WorkflowContext[str]) -> None:
            await ctx.send_message(text)

    class Join(Executor):
        @handler
        async def join(self, answers: list[AgentExecutorResponse], ctx: WorkflowContext[str, str]) -> None:
            texts = {answer.executor_id: answer.agent_response.text for answer in answers}
            await ctx.yield_output(texts["solver"])
            await ctx.send_message("check it")

    def look_up() -> int:
        """Return the correct answer."""
        return task["a"] + task["b"]

    async with (
        AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as here,
        AsyncOpenAI(base_url=fixed.endpoint, api_key=fixed.api_key) as there,
    ):
        policy = OpenAIChatCompletionClient(model=llm.model, async_client=here)
        other = OpenAIChatCompletionClient(model=fixed.model, async_client=there)
        sampling: Any = {"temperature": 1.0, "max_tokens": 8}
        start, join = ResumePoint(id="start"), Join(id="join")
        both = [
            AgentExecutor(Agent(client=policy, default_options=sampling), id=name)
            for name in ("solver", "critic")
        ]
        options: Any = {"metadata": {"task": rollout.rollout_id}}
        judge = AgentExecutor(
            Agent(client=other, name="Judge", tools=[look_up], default_options=options), id="checker"
        )
        built = WorkflowBuilder(start_executor=start, output_from=[join, judge]).add_fan_out_edges(
            start, both
        )
        result = await built.add_fan_in_edges(both, join).add_edge(join, judge).build().run(question(task))
    answer, verdict = result.get_outputs()
    assert verdict.text == str(task["a"] + task["b"])
    return float(is_right(task, answer))


@pytest.fixture(scope="module")
def folder(fixed_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    algorithm = rl.GRPO(
        model=STARTER_MODEL, n_steps=1, tasks_per_step=4, group_size=2, lr=2e-4, max_steps_without_signal=100
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        n_runners=1,
        output_dir=folder,
        progress=False,
        address="local",
        tracer=rl.traces.AgentFrameworkTracer(),
        initial_resources={"fixed": rl.LLM(endpoint=fixed_model, model="fixed", traced=True)},
    )
    trainer.fit(workflow, TRAIN)
    return folder


async def read(folder: Path) -> list[FinishedRollout]:
    service = rl.StoreService(folder / "store.db", read_only=True)
    store = rl.StoreClient(service)
    try:
        rollouts = await store.query_rollouts()
        return await store.collect([rollout.rollout_id for rollout in rollouts], with_spans=True)
    finally:
        await service.close()


@pytest.fixture(scope="module")
def finished(folder: Path) -> list[FinishedRollout]:
    return asyncio.run(read(folder))


def test_only_the_solvers_calls_are_trained(folder: Path) -> None:
    (row,) = metric_rows(folder)
    assert (row["train/failed"], row["train/trained"], row["train/other_agents"]) == (0, 8, 8)


def test_triplets_have_tokens_and_the_names_of_executors(finished: list[FinishedRollout]) -> None:
    assert [item.rollout.status for item in finished] == ["succeeded"] * 8
    for item in finished:
        agents = agents_of_generations(item.generations, item.spans)
        tokens = {
            agent: generation.output_ids.tolist()
            for generation, agent in zip(item.generations, agents, strict=True)
        }
        assert set(tokens) == {"solver", "critic"}
        triplets = rl.TracerTraceToTriplet().adapt(item.spans)
        assert sorted(t.metadata["agent_name"] for t in triplets) == [
            "checker",
            "checker",
            "critic",
            "solver",
        ]
        assert {
            t.metadata["agent_name"]: t.response["token_ids"] for t in triplets if t.response["token_ids"]
        } == tokens


def test_responses_belong_to_the_right_executor(finished: list[FinishedRollout]) -> None:
    """agent-framework's own spans record the response that each executor received."""
    for item in finished:
        by_id = {span.span_id: span for span in item.spans}
        expected: dict[str, str] = {}
        for chat in (span for span in item.spans if span.name.startswith("chat ")):
            agent = by_id[chat.parent_id or ""]
            expected[chat.attributes["gen_ai.response.id"]] = by_id[agent.parent_id or ""].attributes[
                "executor.id"
            ]
        triplets = rl.TracerTraceToTriplet().adapt(item.spans)
        assert {t.metadata["response_id"]: t.metadata["agent_name"] for t in triplets} == expected


def test_spans_of_agents_tools_and_executors_are_in_the_store(finished: list[FinishedRollout]) -> None:
    for item in finished:
        names = {span.name for span in item.spans}
        assert {
            "workflow.run",
            "executor.process solver",
            "executor.process join",
            "invoke_agent Judge",
        } <= names
        (tool,) = [span for span in item.spans if span.name == "execute_tool look_up"]
        assert tool.attributes["gen_ai.tool.call.result"] == str(
            item.rollout.input["a"] + item.rollout.input["b"]
        )
