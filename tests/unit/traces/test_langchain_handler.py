"""LangChain's handler: real chains and graphs name the agent of each of their calls."""

import asyncio
import time
from typing import Any, TypedDict

import pytest

pytest.importorskip("langgraph")
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph

from raylight.semconv import RESPONSE_ID
from raylight.traces.context import current_trace
from raylight.traces.langchain_handler import CHAIN_SPAN, MODEL_SPAN, TOOL_SPAN
from raylight.traces.span_tree import SpanTree
from raylight.traces.tracer import DummyTracer
from raylight.types import Span

pytestmark = pytest.mark.framework("langgraph")


class State(TypedDict, total=False):
    question: str
    query: str
    verdict: str


def model(response_id: str) -> GenericFakeChatModel:
    answer = AIMessage("answer", response_metadata={"id": response_id})
    return GenericFakeChatModel(messages=iter([answer]))


def graph() -> Any:
    """Two nodes: one calls a model behind a prompt, the other calls one directly and in a coroutine."""
    prompt = ChatPromptTemplate.from_messages([("user", "{question}")])

    def write(state: State) -> State:
        return {"query": str((prompt | model("r-write")).invoke({"question": state["question"]}).content)}

    async def check(state: State) -> State:
        return {"verdict": str((await model("r-check").ainvoke(state["query"])).content)}

    built = StateGraph(State)
    built.add_node("write_query", write)
    built.add_node("check_query", check)
    built.add_edge(START, "write_query")
    built.add_edge("write_query", "check_query")
    built.add_edge("check_query", END)
    return built.compile()


def call(response_id: str) -> Span:
    """Return the span of a captured call, which has no parent."""
    return Span.from_attributes(name="openai.chat.completion", attributes={RESPONSE_ID: response_id})


async def test_the_nodes_of_a_graph_name_the_agents_of_its_calls() -> None:
    tracer = DummyTracer()
    async with tracer.trace_context():
        result = await graph().ainvoke(
            {"question": "how many?"}, {"callbacks": [tracer.get_langchain_handler()]}
        )
    assert result["verdict"] == "answer"
    spans = tracer.get_last_trace()
    tree = SpanTree.from_spans([*spans, call("r-write"), call("r-check")])
    assert tree.agents_of_responses() == {"r-write": "write_query", "r-check": "check_query"}
    (root,) = [span for span in spans if span.parent_id is None]
    assert root.attributes == {"langchain.chain.type": "LangGraph"}
    assert len({span.trace_id for span in spans}) == 1
    assert {span.name for span in spans} == {CHAIN_SPAN, MODEL_SPAN}


async def test_a_streamed_call_belongs_to_the_node_that_encloses_it_in_time() -> None:
    captured: list[Span] = []

    def node(name: str) -> Any:
        def write(state: State) -> State:
            began = time.time()
            text = "".join(str(chunk.content) for chunk in model("lost").stream("question"))
            captured.append(
                call(f"r-{name}").model_copy(update={"start_time": began, "end_time": time.time()})
            )
            return {"query": text}

        return write

    built = StateGraph(State)
    built.add_sequence([("first", node("first")), ("second", node("second"))])
    built.add_edge(START, "first")
    tracer = DummyTracer()
    async with tracer.trace_context():
        built.compile().invoke({"question": "?"}, {"callbacks": [tracer.get_langchain_handler()]})
    spans = tracer.get_last_trace()
    assert [span.attributes for span in spans if span.name == MODEL_SPAN] == [{}, {}]
    tree = SpanTree.from_spans([*spans, *captured])
    tree.repair_hierarchy()
    assert tree.agents_of_responses() == {"r-first": "first", "r-second": "second"}


async def test_rollouts_at_once_share_a_handler_without_mixing() -> None:
    tracer = DummyTracer()
    handler = tracer.get_langchain_handler()

    async def rollout(number: int) -> list[str | None]:
        async with tracer.trace_context(rollout_id=f"r{number}", attempt_id="a"):
            await graph().ainvoke({"question": "?"}, {"callbacks": [handler]})
        return [span.rollout_id for span in tracer.get_last_trace()]

    found = await asyncio.gather(*(rollout(number) for number in range(3)))
    assert [set(ids) for ids in found] == [{"r0"}, {"r1"}, {"r2"}]
    assert handler._open == {}


def test_a_tool_and_a_chain_that_fails() -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    def fail(_: Any) -> None:
        raise KeyError("x")

    tracer = DummyTracer()
    with tracer.trace_context():
        config: Any = {"callbacks": [tracer.get_langchain_handler()]}
        assert add.invoke({"a": 1, "b": 2}, config) == 3
        with pytest.raises(KeyError):
            RunnableLambda(fail, name="planner").invoke(1, config)
    ran, failed = tracer.get_last_trace()
    assert (ran.name, ran.attributes["gen_ai.tool.name"], ran.attributes["gen_ai.tool.call.result"]) == (
        TOOL_SPAN,
        "add",
        "3",
    )
    assert "1" in ran.attributes["gen_ai.tool.call.arguments"]
    assert failed.attributes == {"langchain.chain.type": "planner"}
    assert (failed.status.status_code, failed.status.description) == ("ERROR", "KeyError")


def test_outside_a_rollout_it_records_nothing() -> None:
    handler = DummyTracer().get_langchain_handler()
    assert RunnableLambda(lambda x: x + 1).invoke(1, {"callbacks": [handler]}) == 2
    assert current_trace() is None
    assert handler._open == {}
