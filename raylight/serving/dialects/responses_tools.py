"""Tools of a responses request, given to the model as functions of chat.

A custom tool, whose input is plain text, becomes a function with one parameter, `input`. The tools of a
namespace become functions named `NAMESPACE__NAME`. Tools that a provider runs are dropped: no model here can
use them. Those that the agent runs in a form that only OpenAI's models know (local_shell, shell, apply_patch,
computer) are refused: give them as functions. A tool with `defer_loading` is given at once, because nobody
searches for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from raylight.http.body import RequestModel
from raylight.http.errors import RequestError

DEFAULT_NAMESPACE = "functions"
"""Namespace of the tools without one."""
INPUT = "input"
"""Parameter of the function that stands for a custom tool."""


class PlainTool(RequestModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = Field(default=None, exclude=True)
    allowed_callers: list[Literal["direct"]] | None = Field(default=None, exclude=True)
    output_schema: dict[str, Any] | None = Field(default=None, exclude=True)
    """Schema of the tool's results, which chat has no field for; ignored."""


class PlainInput(RequestModel):
    type: Literal["text"]


class GrammarInput(RequestModel):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(RequestModel):
    type: Literal["custom"]
    name: str
    description: str | None = None
    format: Annotated[PlainInput | GrammarInput, Field(discriminator="type")] = PlainInput(type="text")
    defer_loading: bool | None = Field(default=None, exclude=True)
    allowed_callers: list[Literal["direct"]] | None = Field(default=None, exclude=True)


class NamespaceTool(RequestModel):
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[Annotated[PlainTool | CustomTool, Field(discriminator="type")]]


class HostedTool(RequestModel):
    """A tool that is dropped, whatever its settings are."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "code_interpreter",
        "file_search",
        "image_generation",
        "mcp",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]


ResponsesTool = Annotated[PlainTool | CustomTool | NamespaceTool | HostedTool, Field(discriminator="type")]


@dataclass(frozen=True)
class GivenTool:
    """A tool as the agent names it.

    Attributes:
        path: its path in the request.
    """

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None
    path: str


class GivenTools:
    """The tools of a request.

    Args:
        tools: lists of tools, each with its path in the request.

    Attributes:
        functions: the tools as those of a chat request.
        dropped: types of the tools that are dropped.

    Raises:
        RequestError: 400, two tools have the same name.
    """

    def __init__(self, tools: Sequence[tuple[str, Sequence[Any]]]) -> None:
        self.functions: list[dict[str, Any]] = []
        self.dropped: list[str] = []
        self._by_name: dict[str, GivenTool] = {}
        for path, given in tools:
            for index, tool in enumerate(given):
                self._add(tool, f"{path}[{index}]")

    def of(self, chat_name: str) -> GivenTool:
        """Return the tool of a function; a function for a name that the request does not have."""
        return self._by_name.get(chat_name) or GivenTool("function", chat_name, None, "tools")

    def paths(self) -> dict[str, str]:
        """Return the paths of the tools in the request by those in its chat request."""
        return {f"tools[{i}].function": tool.path for i, tool in enumerate(self._by_name.values())}

    def _add(self, tool: Any, path: str) -> None:
        if isinstance(tool, HostedTool):
            self.dropped.append(tool.type)
            return
        for inner, place, namespace in _flatten(tool, path):
            name = chat_name(inner.name, namespace)
            if name in self._by_name:
                raise RequestError(f"{place}.name: another tool has the name {name!r:.200}")
            self._by_name[name] = GivenTool(inner.type, inner.name, namespace, place)
            self.functions.append({"type": "function", "function": _function(inner, name)})


def chat_name(name: str, namespace: str | None) -> str:
    """Return the name of the function that stands for a tool."""
    return name if namespace in (None, DEFAULT_NAMESPACE) else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """Return the arguments of a function for the input of a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool for the arguments of its function.

    Arguments of another form are the input as they are.
    """
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    is_input = isinstance(decoded, dict) and isinstance(decoded.get(INPUT), str)
    return decoded[INPUT] if is_input else arguments


def _flatten(tool: Any, path: str) -> Iterator[tuple[PlainTool | CustomTool, str, str | None]]:
    """Yield the functions and custom tools of a tool, each with its path and namespace."""
    if not isinstance(tool, NamespaceTool):
        yield tool, path, None
        return
    for index, inner in enumerate(tool.tools):
        yield inner, f"{path}.tools[{index}]", tool.name


def _function(tool: PlainTool | CustomTool, name: str) -> dict[str, Any]:
    if isinstance(tool, PlainTool):
        return tool.model_dump(exclude={"type"}, exclude_none=True) | {"name": name}
    description = tool.description or ""
    if isinstance(tool.format, GrammarInput):
        description += f"\nThe input follows this grammar ({tool.format.syntax}):\n{tool.format.definition}"
    properties = {INPUT: {"type": "string", "description": "the tool's input, as plain text"}}
    parameters = {"type": "object", "properties": properties, "required": [INPUT]}
    return {"name": name, "description": description.strip(), "parameters": parameters}
