"""Scripted models behind a real OpenAI-compatible server, for the multi-agent example."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any

from scripted_models import completion, listening
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from examples.tau2_agent.helpdesk.desk import HelpDesk

START_S = 30.0
TASKS = {task["id"]: task for task in HelpDesk().tasks()}
TASK_BY_OPENING = {task["script"]["opening"]: task for task in TASKS.values()}
TASK_BY_GOAL = {task["user"]["goal"]: task for task in TASKS.values()}

Script = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""Function that returns the next message of a conversation."""


def tool_calls(*calls: tuple[str, Any]) -> dict[str, Any]:
    """Return a message that calls tools. Arguments given as text are sent unchanged."""
    numbers = itertools.count()
    functions = [
        {"name": name, "arguments": args if isinstance(args, str) else json.dumps(args)}
        for name, args in calls
    ]
    return {
        "content": None,
        "tool_calls": [{"id": f"c{next(numbers)}", "type": "function", "function": f} for f in functions],
    }


def facts_sentence(task: dict[str, Any]) -> str:
    """Return a sentence with every fact of a task, in its first wording."""
    facts = [fact.split("|")[0] for fact in task["expected"]["facts"]]
    return f"It is done. To know: {'; '.join(facts)}."


def scripted_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Take the task's gold actions, one call at a time, and then report the facts."""
    task = TASK_BY_OPENING[next(message["content"] for message in messages if message["role"] == "user")]
    done = sum(message["role"] == "tool" for message in messages)
    if done < len(task["gold"]):
        call = task["gold"][done]
        return tool_calls((call["name"], call["arguments"]))
    return {"content": facts_sentence(task)}


def scripted_user(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Play the user of a task: send the opening, and end the conversation after the first answer."""
    task = next(task for goal, task in TASK_BY_GOAL.items() if goal in messages[0]["content"])
    return {"content": task["script"]["opening"] if len(messages) == 2 else "[[END]]"}


class BadRequest(Exception):
    """Error in a script to which the server responds with status 400."""


class ScriptedServer:
    """Server on a local port with one model per script.

    Attributes:
        requests: bodies of the requests, in order of arrival.
        keys: Authorization headers of the requests.
    """

    def __init__(self, **scripts: Script) -> None:
        self._scripts = scripts
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ScriptedServer:
        answers = Route("/v1/chat/completions", self._answer, methods=["POST"])
        app = Starlette(routes=[answers, Route("/v1/models", self._models)])
        self.url = f"{self._stack.enter_context(listening(app))}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def requests_to(self, model: str) -> list[dict[str, Any]]:
        """Return the requests to one model."""
        return [body for body in self.requests if body["model"] == model]

    async def _models(self, request: Request) -> JSONResponse:
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "test"} for name in self._scripts]
        return JSONResponse({"object": "list", "data": models})

    async def _answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.requests.append(body)
        self.keys.add(request.headers.get("authorization"))
        for message in body["messages"]:  # as engines do: chat templates expect mappings
            for call in message.get("tool_calls") or ():
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
        try:
            message = self._scripts[body["model"]](body["messages"])
        except BadRequest as error:
            return JSONResponse(
                {"error": {"message": str(error), "type": "invalid_request_error", "code": None}}, 400
            )
        return JSONResponse(completion(body["model"], message, id=f"chatcmpl-{len(self.requests)}"))
