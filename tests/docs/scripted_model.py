"""OpenAI-compatible mock model that adds two numbers, with a tool if the request offers one."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


def reply(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer to a conversation.

    Two numbers are answered by a call of the first tool, or by their sum if there are no tools. A tool result
    or a single number is repeated.

    Raises:
        ValueError: the last message contains neither a tool result nor one or two numbers.
    """
    last = messages[-1]
    text = (
        last["content"]
        if isinstance(last["content"], str)
        else "".join(part["text"] for part in last["content"] or [])
    )
    if last["role"] == "tool":
        return {"role": "assistant", "content": text}
    numbers = re.findall(r"\d+", text)
    if len(numbers) == 1:  # the answer of another agent
        return {"role": "assistant", "content": numbers[0]}
    if len(numbers) != 2:
        raise ValueError(f"no two numbers in {text!r}")
    a, b = map(int, numbers)
    if not tools:
        return {"role": "assistant", "content": str(a + b)}
    function = {"name": tools[0]["function"]["name"], "arguments": json.dumps({"a": a, "b": b})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


@contextmanager
def scripted_model() -> Iterator[str]:
    """Serve the model on a free local port. Yield its base URL, which ends in `/v1`."""
    numbers = iter(range(1, 1_000_000))

    async def chat(request: Request) -> JSONResponse:
        body = await request.json()
        message = reply(body["messages"], body.get("tools", []))
        reason = "tool_calls" if "tool_calls" in message else "stop"
        return JSONResponse(
            {
                "id": f"chatcmpl-{next(numbers)}",
                "object": "chat.completion",
                "created": 1_700_000_000,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": reason}],
                "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
            }
        )

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join(20)
