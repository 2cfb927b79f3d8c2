"""Scripted model behind a real OpenAI-compatible server, for the math agent's tests."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

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
        self._server = uvicorn.Server(
            uvicorn.Config(self._app(), port=0, log_level="warning", lifespan="off")
        )
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> ScriptedModel:
        self._thread.start()
        assert self._listening.wait(START_S), "the scripted model did not start to listen"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(START_S)

    @property
    def url(self) -> str:
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/v1"

    def _app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])

    def _serve(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup()
        self._listening.set()
        await self._server.main_loop()
        await self._server.shutdown()

    async def _answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.requests.append(body)
        message = {"role": "assistant", **self.script(body["messages"], body.get("tools") or [])}
        self.ids.append(f"chatcmpl-{uuid.uuid4().hex}")
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        }
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {
            "id": self.ids[-1],
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body["model"],
        }
        return JSONResponse(answer | {"choices": [choice], "usage": usage})


def first_step(task: dict[str, str]) -> str:
    """Return the first expression of a task's chain."""
    match = re.search(r"<gadget id=\"calculator\">(.*?)</gadget>", task["chain"])
    assert match
    return match[1]
