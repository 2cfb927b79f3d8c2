"""Helpers of the process agent's tests: modules, a simulator, and a scripted model that calls its tools."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from examples.process_agent.task_definitions import TEST, TRAIN, VALIDATION

DEFINITIONS = {definition["id"]: definition for definition in [*TRAIN, *VALIDATION, *TEST]}
MODEL, KEY = "scripted", "the-key"
RULES = "Call get_schema first. Read every number with get_result before you report it."
"""What the scripted model obeys when its prompt says it. The scripted writer of prompts adds it."""


def tool_call(name: str, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@dataclass
class ScriptedModel:
    """Designs by the references: carefully where its prompt tells it to, and otherwise badly.

    Attributes:
        tasks: id by text.
        requests: bodies in the order in which they came.
    """

    tasks: dict[str, str]
    requests: list[dict[str, Any]] = field(default_factory=list)
    writings: int = 0

    def answer(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The next message of the assistant."""
        if len(messages) == 2 and messages[1]["content"] not in self.tasks:
            return {"role": "assistant", "content": self.write(messages[1]["content"])}
        definition = DEFINITIONS[self.tasks[messages[1]["content"]]]
        results = [json.loads(message["content"]) for message in messages if message["role"] == "tool"]
        careful = RULES in messages[0]["content"]
        return self.careful(definition, results) if careful else self.careless(definition, results)

    def careful(self, definition: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        """Schema, simulation, numbers, and these as they are."""
        if not results:
            return tool_call("get_schema", {}, 0)
        if len(results) == 1:
            return tool_call("run_simulation", {"flowsheet": definition["reference"]}, 1)
        run_id = results[1]["run_id"]
        if len(results) == 2:
            return tool_call("get_result", {"run_id": run_id}, 2)
        values = {name: look(results[2], path) for name, path in definition["asked"].items()}
        return self.final(run_id, values)

    def careless(self, definition: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        """A flowsheet that is none, then a good one of which no number is read; the answer is made up."""
        if not results:
            return tool_call("run_simulation", {"flowsheet": {"units": definition["reference"]["units"]}}, 0)
        if len(results) == 1:
            assert results[0]["error"]["code"] == "bad_flowsheet"
            return tool_call("run_simulation", {"flowsheet": definition["reference"]}, 1)
        return self.final(results[1]["run_id"], dict.fromkeys(definition["asked"], 1.0))

    def final(self, run_id: str, values: dict[str, Any]) -> dict[str, Any]:
        text = f"The design is done.\n```json\n{json.dumps({'run_id': run_id, 'values': values})}\n```"
        return {"role": "assistant", "content": text}

    def write(self, case: str) -> str:
        """A new prompt for the one shown between <<< and >>>: every second one forgets the placeholder."""
        present = case.partition("<<<\n")[2].partition("\n>>>")[0]
        self.writings += 1
        return (
            f"{present}\n{RULES} Attempt {self.writings}."
            if self.writings % 2
            else f"{RULES} Attempt {self.writings}."
        )

    @property
    def route(self) -> Route:
        """Where an OpenAI client finds it."""
        return Route("/v1/chat/completions", self.respond, methods=["POST"])

    async def respond(self, request: Request) -> JSONResponse:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse(
                {"error": {"message": "bad key", "type": "authentication_error"}}, status_code=401
            )
        body = await request.json()
        self.requests.append(body)
        message = self.answer(body["messages"])
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        told = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": MODEL}
        return JSONResponse(told | {"choices": [choice], "usage": usage})


def look(results: dict[str, Any], path: str) -> Any:
    found: Any = results
    for part in path.split("."):
        found = found[part]
    return found


@contextlib.contextmanager
def serving(*routes: Route) -> Iterator[str]:
    """A server on a free port, in a thread; gives its URL as OpenAI's clients take it."""
    app = Starlette(routes=routes)
    listening = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            listening.set()

    server = Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert listening.wait(20)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
