"""Helpers for the process agent's tests: a scripted model that calls the simulator's tools, and a server."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from scripted_models import completion, listening
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from examples.process_agent.task_definitions import TEST, TRAIN, VALIDATION

DEFINITIONS = {definition["id"]: definition for definition in [*TRAIN, *VALIDATION, *TEST]}
MODEL, KEY = "scripted", "the-key"
RULES = "Call get_schema first. Read every number with get_result before you report it."
"""Rules that the scripted prompt writer adds, and that make the scripted model work carefully."""


def tool_call(name: str, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@dataclass
class ScriptedModel:
    """Scripted model that designs from the references: carefully if the prompt contains RULES, else badly.

    Attributes:
        tasks: task IDs by text.
        requests: bodies of the requests, in order of arrival.
    """

    tasks: dict[str, str]
    requests: list[dict[str, Any]] = field(default_factory=list)
    writings: int = 0

    def answer(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the next message of the assistant."""
        if len(messages) == 2 and messages[1]["content"] not in self.tasks:
            return {"role": "assistant", "content": self.write(messages[1]["content"])}
        definition = DEFINITIONS[self.tasks[messages[1]["content"]]]
        results = [json.loads(message["content"]) for message in messages if message["role"] == "tool"]
        careful = RULES in messages[0]["content"]
        return self.careful(definition, results) if careful else self.careless(definition, results)

    def careful(self, definition: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        """Get the schema, simulate, read the numbers, and report them unchanged."""
        if not results:
            return tool_call("get_schema", {}, 0)
        if len(results) == 1:
            return tool_call("run_simulation", {"flowsheet": definition["reference"]}, 1)
        run_id = results[1]["run_id"]
        if len(results) == 2:
            return tool_call("get_result", {"run_id": run_id}, 2)
        values = {name: look_up(results[2], path) for name, path in definition["asked"].items()}
        return self.final(run_id, values)

    def careless(self, definition: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        """Simulate an invalid and then a valid flowsheet, and report invented numbers without reading any."""
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
        """Rewrite the prompt between <<< and >>>. Every second rewrite drops the placeholder."""
        present = case.partition("<<<\n")[2].partition("\n>>>")[0]
        self.writings += 1
        return (
            f"{present}\n{RULES} Attempt {self.writings}."
            if self.writings % 2
            else f"{RULES} Attempt {self.writings}."
        )

    @property
    def route(self) -> Route:
        """Route at which OpenAI clients send chat completions."""
        return Route("/v1/chat/completions", self.respond, methods=["POST"])

    async def respond(self, request: Request) -> JSONResponse:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse(
                {"error": {"message": "bad key", "type": "authentication_error"}}, status_code=401
            )
        body = await request.json()
        self.requests.append(body)
        message = self.answer(body["messages"])
        return JSONResponse(completion(MODEL, message))


def look_up(results: dict[str, Any], path: str) -> Any:
    value: Any = results
    for part in path.split("."):
        value = value[part]
    return value


@contextlib.contextmanager
def serving(*routes: Route) -> Iterator[str]:
    """Serve routes on a free port in a thread. Yield the base URL for OpenAI's clients."""
    with listening(Starlette(routes=routes)) as url:
        yield f"{url}/v1"
