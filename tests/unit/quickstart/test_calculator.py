"""The quickstart's agent with a tool, in front of a scripted model."""

from types import SimpleNamespace
from typing import Any

import pytest
from scripted_client import ScriptedClient, tool_calls

import raylight as rl
from raylight.quickstart import calculator as module
from raylight.quickstart.calculator import calculator, run_tool

TASK = {"a": 12, "b": 30}


def call(arguments: str) -> Any:
    return SimpleNamespace(function=SimpleNamespace(name="add", arguments=arguments))


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"a": 12, "b": 30}', "42"),
        ('{"a": "12", "b": "30"}', "42"),
        ('{"a": 12}', "error: KeyError('b')"),
        ("[1, 2]", "error: TypeError"),
        ('{"a": "x", "b": 1}', "error: ValueError"),
    ],
)
def test_the_tool_adds_or_says_what_is_wrong(arguments: str, result: str) -> None:
    assert run_tool(call(arguments)).startswith(result)


CALL = tool_calls(("add", TASK))


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([CALL, {"content": "42"}], 1.0),
        ([CALL, {"content": "41"}], 0.0),
        ([{"content": "42"}], 1.0),
        ([{"content": None}], 0.0),
        ([CALL, CALL, CALL], 0.0),
    ],
)
async def test_the_reward_is_that_of_the_answer(
    answers: list[dict[str, Any]], reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ScriptedClient(*answers)
    monkeypatch.setattr(rl.LLM, "client", lambda llm: client)
    llm = rl.LLM(endpoint="http://model/v1", model="m")
    assert await calculator(TASK, llm=llm) == reward
    assert all(request["tools"] == [module.ADD] for request in client.requests)
    for request, answer in zip(client.requests[1:], answers, strict=False):
        assert request["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "42"}, answer
