"""Scripted model behind a real OpenAI-compatible server, for the math agent's tests."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripted_models import completion, serve_chat
from starlette.requests import Request
from starlette.responses import JSONResponse

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "examples" / "math_agent" / "calculator_server.py"
START_S = 30.0

Script = Callable[[list[dict[str, Any]], list[dict[str, Any]]], dict[str, Any]]
"""Function that returns a message for the messages and tools of a request."""


def logging_command(log: Path) -> tuple[str, ...]:
    """Return the command of the calculator server, which logs every call to a file."""
    return (sys.executable, str(SERVER), "--log", str(log))


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def calling(
    expression: str, name: str | None = None, arguments: str | None = None
) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Return a function that builds a call of the first tool of a request."""

    def message(tools: list[dict[str, Any]]) -> dict[str, Any]:
        function = {
            "name": name or tools[0]["function"]["name"],
            "arguments": arguments or json.dumps({"expression": expression}),
        }
        return {
            "content": None,
            "tool_calls": [{"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}],
        }

    return message


def solving(expressions: dict[str, str]) -> Script:
    """Return a script that calls the tool with the question's expression, and answers with the result."""

    def answer(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        last = messages[-1]
        if last["role"] != "tool":
            return calling(expressions[text_of(last)])(tools)
        return {"content": f"The calculator says {text_of(last)}.\n### {text_of(last)}"}

    return answer


def wrong(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Call the tool, and answer with another number."""
    return calling("1+1")(tools) if messages[-1]["role"] != "tool" else {"content": "Surely not.\n### 999999"}


class ScriptedModel:
    """Server on a local port that answers with a script.

    Attributes:
        requests: bodies of the requests, in order of arrival.
        ids: IDs of the answers.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ScriptedModel:
        self.url = self._stack.enter_context(serve_chat(self._answer))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def _answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.requests.append(body)
        message = self.script(body["messages"], body.get("tools") or [])
        self.ids.append(f"chatcmpl-{uuid.uuid4().hex}")
        return JSONResponse(completion(body["model"], message, id=self.ids[-1]))


def first_step(task: dict[str, str]) -> str:
    """Return the first expression of a task's chain."""
    match = re.search(r"<gadget id=\"calculator\">(.*?)</gadget>", task["chain"])
    assert match
    return match[1]
