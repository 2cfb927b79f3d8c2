"""The quickstart's agent with a tool, in front of a scripted model."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

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


class ScriptedClient:
    """Client whose model gives the answers one after another; keeps the requests."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers, self.requests = list(answers), list[dict[str, Any]]()
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def create(self, **request: Any) -> ChatCompletion:
        self.requests.append({**request, "messages": list(request["messages"])})
        message = {"role": "assistant", "content": None, **self.answers.pop(0)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return ChatCompletion.model_validate(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )


CALL = {
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": json.dumps(TASK)}}
    ]
}


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
