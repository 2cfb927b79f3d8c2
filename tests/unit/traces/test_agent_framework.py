"""Agents and workflows of agent-framework in the whole capture: the agent of each call, and its spans."""

import asyncio
import json
import pickle
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import pytest

pytest.importorskip("agent_framework")
from agent_framework import Agent, AgentExecutor, Executor, WorkflowBuilder, WorkflowContext, handler
from agent_framework.observability import OBSERVABILITY_SETTINGS, disable_instrumentation
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from asgi_helpers import response_body, stream_start
from capture_helpers import add_token, send_event, send_json
from dialect_helpers import Say, call
from gateway_helpers import MINE, within
from starlette.types import Receive, Scope, Send

from raylight.engines.capture_context import CURRENT
from raylight.errors import TracerError
from raylight.traces.agent_framework import AgentFrameworkTracer, init
from raylight.traces.attributes import response_id_of
from raylight.traces.context import AttemptTrace, current_trace
from raylight.traces.messages import TraceToMessages
from raylight.traces.tracer import OtelTracer
from raylight.traces.trained_agents import AgentFilter, agents_of_generations
from raylight.traces.triplets import TracerTraceToTriplet
from raylight.types import Span
from unit.serving.gateway.test_gateway_stack import Stack

pytestmark = pytest.mark.framework("agent_framework")
ADD = call("call_1", '{"a": 1, "b": 2}', "add")
CLIENTS = [OpenAIChatCompletionClient, OpenAIChatClient]


def add(a: Annotated[int, "one number"], b: Annotated[int, "another"]) -> int:
    """Add two numbers."""
    return a + b


class Sampling:
    """An engine with scripted answers of one token; with `barrier`, it answers once so many requests wait."""

    def __init__(self, *says: Say) -> None:
        self.says = list(says)
        self.asked: list[dict[str, Any]] = []
        self.barrier: asyncio.Barrier | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, asked = CURRENT.get(), json.loads((await receive())["body"])
        assert exchange is not None
        self.asked.append(asked)
        token, say = len(self.asked), self.says.pop(0)
        sample = exchange.sample(0, [1], {"temperature": 1.0})
        if self.barrier is not None:
            await self.barrier.wait()
        add_token(sample, token, version=1)
        sample.finish_reason = "stop"
        # engines take their answers' ids from it
        number: Any = dict(scope["headers"])[b"x-request-id"].decode()
        if not asked.get("stream"):
            await send_json(send, say.answer(number))
            return
        await send(stream_start())
        for piece in (*say.chunks(number), "[DONE]"):
            await send_event(send, piece)
        await send(response_body())


class Traced:
    """A rollout of agents with a model that answers by a script."""

    def __init__(self, *says: Say) -> None:
        self.model = Sampling(*says)
        self.stack = Stack(engine_app=self.model)
        self.trace: AttemptTrace | None = None

    def client(self, kind: type[Any] = OpenAIChatCompletionClient) -> Any:
        return kind(model="policy", async_client=self.stack.openai())

    async def run(self, agent: Any, text: str, tracer: OtelTracer | None = None) -> Any:
        with (tracer or AgentFrameworkTracer()).trace_context(rollout_id="ro-1", attempt_id="at-1"):
            self.trace = current_trace()
            async with within():
                answer = await agent.run(text)
        await self.stack.sink.has(len(self.model.asked), len(self.model.asked))
        return answer

    @property
    def own(self) -> list[Span]:
        return self.trace.spans

    @property
    def spans(self) -> list[Span]:
        """Return agent-framework's spans, then the captured ones."""
        return self.own + [span for _, _, span in self.stack.sink.closed if span is not None]

    @property
    def agents(self) -> list[str | None]:
        """Return the agent of each call in order, by generations and by triplets."""
        records = [
            (generation, span) for _, generation, span in self.stack.sink.closed if generation and span
        ]
        found = agents_of_generations([generation for generation, _ in records], self.spans)
        by_response = {
            response_id_of(span.attributes): agent for (_, span), agent in zip(records, found, strict=True)
        }
        for order in (self.spans, self.spans[::-1]):  # it does not matter which side's spans come first
            triplets = TracerTraceToTriplet().adapt(order)
            assert {t.metadata["response_id"]: t.metadata["agent_name"] for t in triplets} == by_response
        return [
            agent
            for _, agent in sorted(
                (g.output_ids.tolist()[0], agent) for (g, _), agent in zip(records, found, strict=True)
            )
        ]


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    before = dict(vars(OBSERVABILITY_SETTINGS))
    yield
    vars(OBSERVABILITY_SETTINGS).update(before)


@pytest.mark.parametrize("kind", CLIENTS)
async def test_an_agent_with_a_tool(kind: type[Any]) -> None:
    traced = Traced(Say(calls=[ADD]), Say("It is 3."))
    answer = await traced.run(
        Agent(client=traced.client(kind), name="solver", instructions="Solve.", tools=[add]), "1+2"
    )
    assert answer.text == "It is 3."
    names = [span.name for span in traced.own]
    assert names == ["chat policy", "execute_tool add", "chat policy", "invoke_agent solver"]
    assert traced.agents == ["solver", "solver"]
    tool = traced.own[1].attributes
    assert json.loads(tool["gen_ai.tool.call.arguments"]) == {"a": 1, "b": 2}
    assert tool["gen_ai.tool.call.result"] == "3"


@pytest.mark.parametrize("kind", CLIENTS)
async def test_executors_of_a_workflow_name_the_calls_of_their_agents(kind: type[Any]) -> None:
    """The second agent has no name: agent-framework gives it a random one, which no filter can match."""
    traced = Traced(Say("a draft"), Say(calls=[ADD]), Say("fine"))
    client = traced.client(kind)
    writer = AgentExecutor(Agent(client=client, name="Author", instructions="Write."), id="writer")
    reviewer = AgentExecutor(Agent(client=client, instructions="Review.", tools=[add]), id="reviewer")
    await traced.run(WorkflowBuilder(start_executor=writer).add_edge(writer, reviewer).build(), "a poem")
    executors = {"executor.process writer", "executor.process reviewer"}
    assert {"workflow.run", "invoke_agent Author", *executors} <= {span.name for span in traced.own}
    assert traced.agents == ["writer", "reviewer", "reviewer"]
    trained = AgentFilter("^reviewer$")
    assert [trained.keeps(agent) for agent in traced.agents] == [False, True, True]


class ResumePoint(Executor):
    @handler
    async def begin(self, text: str, ctx: WorkflowContext[str]) -> None:
        await ctx.send_message(text)


async def test_calls_at_the_same_time_keep_their_executors() -> None:
    """Their times are equal, so only the response ids distinguish them."""
    traced = Traced(Say("one"), Say("two"))
    traced.model.barrier = asyncio.Barrier(2)
    client, start = traced.client(), ResumePoint(id="start")
    both = [
        AgentExecutor(Agent(client=client, instructions=f"You are {name}."), id=name)
        for name in ("left", "right")
    ]
    await traced.run(WorkflowBuilder(start_executor=start).add_fan_out_edges(start, both).build(), "go")
    said = [asked["messages"][0]["content"].rstrip(".").split()[-1] for asked in traced.model.asked]
    assert sorted(said) == ["left", "right"]
    assert traced.agents == said


async def test_an_agent_that_is_the_tool_of_another() -> None:
    traced = Traced(Say(calls=[call("call_1", '{"task": "add"}', "helper")]), Say("3"), Say("It is 3."))
    client = traced.client()
    helper = Agent(client=client, name="helper", instructions="Help.")
    await traced.run(Agent(client=client, name="boss", instructions="Lead.", tools=[helper.as_tool()]), "1+2")
    assert traced.agents == ["boss", "helper", "boss"]


async def test_a_streamed_answer() -> None:
    class Streamed:
        def __init__(self, agent: Agent) -> None:
            self.agent = agent

        async def run(self, text: str) -> str:
            return "".join([update.text async for update in self.agent.run(text, stream=True)])

    traced = Traced(Say("It is 3."))
    assert await traced.run(Streamed(Agent(client=traced.client(), name="solver")), "1+2") == "It is 3."
    assert traced.agents == ["solver"]


async def test_an_agent_that_is_named_by_its_url_keeps_that_name() -> None:
    traced = Traced(Say("fine"))
    client = traced.stack.openai(f"{MINE}/agent/mine")
    await traced.run(
        Agent(client=OpenAIChatCompletionClient(model="policy", async_client=client), name="solver"), "1+2"
    )
    assert traced.agents == ["mine"]


@pytest.mark.parametrize("contents", [True, False])
async def test_messages_are_told_once_and_with_their_tools(contents: bool) -> None:
    traced = Traced(Say(calls=[ADD]), Say("It is 3."))
    tracer = AgentFrameworkTracer(contents=contents)
    agent = Agent(client=traced.client(), name="solver", instructions="Solve.", tools=[add])
    await traced.run(agent, "1+2", tracer)
    assert ("gen_ai.input.messages" in traced.own[0].attributes) is contents
    assert ("gen_ai.tool.call.arguments" in traced.own[1].attributes) is contents
    first, second = TraceToMessages().adapt(traced.spans)
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant"]
    roles = [message["role"] for message in second["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    for conversation in (first, second):
        assert [tool["function"]["name"] for tool in conversation["tools"] or []] == ["add"]


async def test_spans_that_the_environment_turned_off_are_on_again() -> None:
    OBSERVABILITY_SETTINGS.enable_instrumentation = False  # as ENABLE_INSTRUMENTATION=false does on import
    quiet = Traced(Say("fine"))
    await quiet.run(Agent(client=quiet.client(), name="solver"), "1+2", OtelTracer())
    assert quiet.own == []
    traced = Traced(Say("fine"))
    tracer = AgentFrameworkTracer()
    tracer.init()
    await traced.run(Agent(client=traced.client(), name="solver"), "1+2", tracer)
    assert [span.name for span in traced.own] == ["chat policy", "invoke_agent solver"]
    tracer.teardown()


def test_a_program_that_turned_them_off_for_good_is_told() -> None:
    disable_instrumentation()
    with pytest.raises(TracerError, match=r"disable_instrumentation\(\).*trace with OtelTracer"):
        AgentFrameworkTracer().setup()


def test_without_agent_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "agent_framework.observability", None)
    with pytest.raises(TracerError, match=r"is too old to be traced .*; pip install"):
        init()
    monkeypatch.setattr("raylight.traces.agent_framework.DISTRIBUTION", "no-such-package")
    with pytest.raises(TracerError, match=r"agent-framework is not installed .*; pip install"):
        init()


def test_it_travels_with_its_settings() -> None:
    tracer = AgentFrameworkTracer("service", contents=False, export_timeout=1.0)
    tracer.setup()
    copy = pickle.loads(pickle.dumps(tracer))
    tracer.teardown()
    assert (copy.service_name, copy.contents, copy.export_timeout) == ("service", False, 1.0)
    assert not copy._is_set_up
