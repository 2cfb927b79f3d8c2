"""Tools of Anthropic's messages dialect, given to the model as functions of chat.

Tools that a provider runs are dropped: no model here can use them. Those that the agent runs in a form that
only Anthropic's models know (bash, text_editor, memory, computer) are refused: give them with a schema.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from raylight.http.body import RequestModel


class CacheableBlock(RequestModel):
    cache_control: Any = None


class MessagesTool(CacheableBlock):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool = False
    """True for a tool that the model gets once a search has found it."""
    allowed_callers: list[Literal["direct"]] | None = None


PROVIDER_TOOL = r"(?:web_search|web_fetch|code_execution|tool_search_tool_(?:regex|bm25))_[0-9]{8}"
"""Types of tools that Anthropic runs."""
TOOL_SEARCH = "tool_search_tool_"


class ProviderTool(RequestModel):
    """A tool that is dropped, whatever its settings are."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(pattern=f"^{PROVIDER_TOOL}$")]
    name: str


def _tool_tag(tool: Any) -> str:
    """Return the tag of a tool's model; a tool needs no type."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") else "provider"


AnyTool = Annotated[
    Annotated[MessagesTool, Tag("custom")] | Annotated[ProviderTool, Tag("provider")],
    Discriminator(_tool_tag),
]


def provider_tools(tools: Sequence[MessagesTool | ProviderTool]) -> list[str]:
    """Return the types of a request's tools that are dropped, without their dates."""
    return [tool.type.rpartition("_")[0] for tool in tools if isinstance(tool, ProviderTool)]


def given_tools(
    tools: Sequence[MessagesTool | ProviderTool], found: Container[str]
) -> dict[int, MessagesTool]:
    """Return the tools that the model gets, by their index in the request.

    A deferred tool is given once a search has found it, or if the search is the provider's, which nobody runs
    here.

    Args:
        found: names of tools that results of a search name.
    """
    is_searched = not any(kind.startswith(TOOL_SEARCH) for kind in provider_tools(tools))
    return {
        index: tool
        for index, tool in enumerate(tools)
        if isinstance(tool, MessagesTool)
        and not (tool.defer_loading and is_searched and tool.name not in found)
    }


def as_function(tool: MessagesTool) -> dict[str, Any]:
    """Return a tool as one of a chat request."""
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}
