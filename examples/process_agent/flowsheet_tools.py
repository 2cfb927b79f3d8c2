"""Three tools on the simulator's HTTP interface.

Every call is a span with its arguments and its result as JSON.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import httpx2

import raylight as rl
from examples.process_agent.flowsheets.local import SimulatorUnavailableError
from raylight.types import SpanCoreFields

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_schema",
            "description": "How to write a flowsheet: unit types with their settings and results, units of "
            "measure, an example.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run_simulation",
            "description": "Simulate a flowsheet. Returns a run_id and whether it converged; the numbers are "
            "had by get_result.",
            "parameters": {
                "type": "object",
                "properties": {
                    "flowsheet": {
                        "type": "object",
                        "description": "package, components, feeds and units, as get_schema describes them",
                    }
                },
                "required": ["flowsheet"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_result",
            "description": "The numbers of a simulation that converged.",
            "parameters": {
                "type": "object",
                "properties": {
                    "run_id": {"type": "string"},
                    "paths": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "such as streams.gas.flow_kmol_h or units.drum; all results if left "
                        "out",
                    },
                },
                "required": ["run_id"],
            },
        },
    },
]
TOOL_NAMES = tuple(tool["function"]["name"] for tool in TOOLS)
KIND = "tool"
"""Value of the attribute `kind` in spans of tools."""
TIMEOUT_S = 60.0


class BadCallError(Exception):
    """A tool call is malformed; the message is returned to the model."""


class Toolbox:
    """Tools of one rollout, whose calls are recorded as spans.

    Args:
        client: client with the simulator's base URL.
    """

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client
        self.spans: list[SpanCoreFields] = []

    async def call(self, name: str, arguments: str) -> str:
        """Call a tool; returns its result as JSON, or `{"error": {"code", "message"}}` for a bad call.

        Args:
            arguments: JSON text from the model.

        Raises:
            SimulatorUnavailableError: the simulator did not respond.
        """
        with rl.operation(name=name, kind=KIND) as op:
            op.set_input(arguments=arguments)
            try:
                answer = json.dumps(await self._answer(name, _read(arguments)))
            except BadCallError as error:
                answer = json.dumps({"error": {"code": "bad_call", "message": str(error)}})
            op.set_output(answer)
        self.spans.append(op.span())
        return answer

    async def _answer(self, name: str, given: dict[str, Any]) -> Any:
        if name == "get_schema":
            return await self._ask("GET", "/schema")
        if name == "run_simulation":
            return await self._ask("POST", "/simulations", content=json.dumps(read_flowsheet(given)))
        if name == "get_result":
            run_id, paths = given.get("run_id"), given.get("paths") or []
            if not isinstance(paths, list) or not all(
                isinstance(text, str) and text.isascii() for text in (run_id, *paths)
            ):
                raise BadCallError("get_result takes run_id, a string, and paths, a list of strings")
            return await self._ask(
                "GET",
                f"/simulations/{quote(str(run_id), safe='')}",
                params=[("path", path) for path in paths],
            )
        raise BadCallError(f"there is no tool {name!r:.100}; there are {', '.join(TOOL_NAMES)}")

    async def _ask(self, method: str, path: str, **content: Any) -> Any:
        try:
            answer = await self._client.request(method, path, **content)
        except httpx2.InvalidURL as error:  # for example too long
            raise BadCallError(f"the run_id or the paths cannot be asked for: {error}") from None
        except httpx2.HTTPError as error:
            raise SimulatorUnavailableError(
                f"the simulator at {self._client.base_url} failed: {error!r}"
            ) from error
        if answer.status_code >= 500:
            raise SimulatorUnavailableError(
                f"the simulator at {self._client.base_url} answered with status {answer.status_code}: "
                f"{answer.text[:200]}"
            )
        try:
            return answer.json()
        except ValueError:
            raise BadCallError(
                f"the simulator knows no {path}; give the run_id that run_simulation returned"
            ) from None


def read_flowsheet(arguments: dict[str, Any]) -> Any:
    """Return the flowsheet in the arguments of run_simulation; some models pass it as JSON text.

    Raises:
        BadCallError: the arguments have no flowsheet.
    """
    given = arguments.get("flowsheet")
    if given is None:
        raise BadCallError(
            "run_simulation takes flowsheet, an object with package, components, feeds and units"
        )
    return _read(given) if isinstance(given, str) else given


def _read(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        BadCallError: the text is not a JSON object.
    """
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise BadCallError(f"the arguments are not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadCallError(f"the arguments must be a JSON object, not {type(found).__name__}")
    return found
