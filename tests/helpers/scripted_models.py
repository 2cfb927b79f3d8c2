"""Scripted models behind a real OpenAI-compatible server in a thread."""

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

Script = Callable[[str, str], "str | int | tuple[str, str]"]
"""Function of model name and last message. Returns a text, a text and finish reason, or an HTTP status."""


@contextlib.contextmanager
def listening(app: ASGIApp) -> Iterator[str]:
    """Serve an application on a free port, in a thread; yields its URL.

    At the end, requests in progress are cancelled. uvicorn's own `serve` needs 0.2 s to end.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        started: Future[Callable[[], object]] = Future()

        async def serve() -> None:
            await server.startup(sockets=[listener])
            await server.on_tick(0)  # sets the default headers
            ended = asyncio.Event()
            started.set_result(functools.partial(asyncio.get_running_loop().call_soon_threadsafe, ended.set))
            await ended.wait()
            for listening_server in server.servers:
                listening_server.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()

        thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        thread.start()
        end = started.result(20)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            end()
            thread.join(20)
            assert not thread.is_alive()


def completion(
    model: str, message: dict[str, Any], reason: str | None = None, id: str = "chatcmpl-1"
) -> dict[str, Any]:
    """Return an answer of chat completions.

    Args:
        reason: finish reason. None: as the message has tool calls or none.
    """
    reason = reason or ("tool_calls" if message.get("tool_calls") else "stop")
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    answer = {"id": id, "object": "chat.completion", "created": 1_700_000_000, "model": model}
    return answer | {"choices": [choice], "usage": usage}


@dataclass
class ScriptedModels:
    """Server application that answers every request with a script."""

    script: Script
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Model name and last message of every request."""

    async def chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        name, text = body["model"], body["messages"][-1]["content"]
        self.requests.append((name, text))
        reply: Any = self.script(name, text)
        if isinstance(reply, int):
            return JSONResponse({"error": {"message": "by script"}}, status_code=reply)
        content, reason = reply if isinstance(reply, tuple) else (reply, "stop")
        return JSONResponse(completion(name, {"content": content}, reason))


@contextlib.contextmanager
def serve_script(script: Script) -> Iterator[ScriptedModels]:
    """Serve models with this script until the block ends."""
    models = ScriptedModels(script)
    with serve_chat(models.chat) as models.url:
        yield models


@contextlib.contextmanager
def serve_chat(chat: Callable[[Request], Awaitable[Response]]) -> Iterator[str]:
    """Serve a function as chat completions until the block ends; the value is the base URL."""
    with listening(Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])) as url:
        yield f"{url}/v1"


def add_a_missing_word(model: str, text: str) -> str:
    """Reflect for GEPA: add the first word that the feedback misses to the prompt."""
    current = text.partition("for me:\n```\n")[2].partition("\n```")[0]
    words = text.partition("missing: [")[2].partition("]")[0].replace("'", "").split(", ")
    return f"```\n{current} Answer {words[0]}.\n```"
