"""Client of OpenAI whose model gives the answers of a list."""

import copy
import json
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
from openai.types.chat import ChatCompletion


class ScriptedClient:
    """Client whose model gives the answers one after another; keeps the requests.

    An answer is a message without its role, or an exception to raise.
    """

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.answers, self.requests = list(answers), list[dict[str, Any]]()
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def create(self, **request: Any) -> ChatCompletion:
        self.requests.append({**request, "messages": copy.deepcopy(request["messages"])})
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        message = {"role": "assistant", "content": None, **answer}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return ChatCompletion.model_validate(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )


def tool_calls(*calls: tuple[str, dict[str, Any] | str]) -> dict[str, Any]:
    """Return a message that calls tools; arguments are a dict, or the text that the model wrote."""
    return {
        "tool_calls": [
            {
                "id": f"c{number}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                },
            }
            for number, (name, arguments) in enumerate(calls, 1)
        ]
    }


def bad_request(code: str) -> openai.BadRequestError:
    """Return the error of a request that the endpoint rejects."""
    request = httpx2.Request("POST", "http://model/v1/chat/completions")
    response = httpx2.Response(400, request=request)
    return openai.BadRequestError("rejected", response=response, body={"code": code, "message": "rejected"})
