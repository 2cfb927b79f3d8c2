"""Requests of OpenAI's responses dialect, translated to chat requests.

A replica remembers a response for `previous_response_id` unless the request has `store=false`. It never
stores one for later retrieval, so that answers have `store: false`. `metadata` and `user` are echoed.
Messages of developers become messages of the system. A request that includes `reasoning.encrypted_content`,
as agent-framework's client always does, gets reasoning as plain text, which may be sent back unchanged.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from raylight.http.body import RequestModel
from raylight.serving.dialects.field_names import FieldNames
from raylight.serving.dialects.responses_items import (
    AdditionalToolsItem,
    ConfigurationUpdateItem,
    Effort,
    InputItem,
    as_items,
    to_messages,
)
from raylight.serving.dialects.responses_tools import GivenTools, ResponsesTool
from raylight.types.request_fields import log_dropped

CHAT_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "reasoning": "reasoning",
    "verbosity": "text.verbosity",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.allowed_tools": "tool_choice",
    "tool_choice.function": "tool_choice",
}
"""Fields of a responses request by those of its chat request."""
INCLUDED = Literal[
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Additions to an answer; those of tools that providers run have nothing to add here."""


class OneToolChoice(RequestModel):
    type: Literal["function", "custom"]
    name: str


class AllowedTool(RequestModel):
    type: Literal["function", "custom"]
    name: str


class AllowedToolsChoice(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class TextFormat(RequestModel):
    type: Literal["text", "json_object"]


class SchemaFormat(RequestModel):
    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(RequestModel):
    format: Annotated[TextFormat | SchemaFormat, Field(discriminator="type")] = TextFormat(type="text")
    verbosity: str | None = None


class Reasoning(RequestModel):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Reasoning is answered in full, so that there is no summary."""
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesStreamOptions(RequestModel):
    include_obfuscation: bool = False
    """Padding against an observer of the network; an answer has none."""


def _as_object(choice: Any) -> Any:
    """Turn a tool choice that is a string into an object, so that a wrong one is reported once."""
    return {"type": choice} if isinstance(choice, str) else choice


class ToolMode(RequestModel):
    type: Literal["none", "auto", "required"]


class ResponsesRequest(RequestModel):
    """A request to `/v1/responses`."""

    model: str
    input: Annotated[list[InputItem], BeforeValidator(as_items)] = Field(default=[])
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = None
    tools: list[ResponsesTool] = Field(default=[])
    tool_choice: (
        Annotated[
            ToolMode | OneToolChoice | AllowedToolsChoice,
            Field(discriminator="type"),
            BeforeValidator(_as_object),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    store: Any = True
    metadata: Any = None
    user: Any = None
    truncation: Literal["auto", "disabled"] = "disabled"
    background: Literal[False] = False
    include: list[INCLUDED] = Field(default=[])
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None

    def given_tools(self) -> GivenTools:
        """Return the tools of the request, and those that its input adds.

        Raises:
            RequestError: 400, two tools have the same name.
        """
        added = [
            (f"input[{index}].tools", item.tools)
            for index, item in enumerate(self.input)
            if isinstance(item, AdditionalToolsItem)
        ]
        return GivenTools([("tools", self.tools), *added])

    def to_chat(self, messages: list[dict[str, Any]], tools: GivenTools) -> dict[str, Any]:
        """Return the chat request.

        Args:
            messages: the conversation, this request's input included.
        """
        if self.truncation != "disabled":
            log_dropped("truncation", "no engine here does: a conversation that is too long is an error")
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        settings: dict[str, Any] = {
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tools": tools.functions or None,
            "tool_choice": self._chat_tool_choice(),
            "response_format": _response_format(self.text.format),
            "reasoning_effort": self._effort(),
            "verbosity": self.text.verbosity,
        }
        chat: dict[str, Any] = {"model": self.model, "messages": system + messages}
        chat |= {name: value for name, value in settings.items() if value is not None}
        return chat | ({"stream": True, "stream_options": {"include_usage": True}} if self.stream else {})

    def messages(self) -> list[dict[str, Any]]:
        """Return the input as chat messages."""
        return [message for message, _ in to_messages(self.input)]

    def _effort(self) -> str | None:
        """Return the effort of reasoning, which the input may change."""
        updates = [item for item in self.input if isinstance(item, ConfigurationUpdateItem)]
        efforts = [update.reasoning.effort for update in updates if update.reasoning]
        return next((effort for effort in reversed(efforts) if effort), self.reasoning.effort)

    def field_names(self, previous: int, tools: GivenTools) -> FieldNames:
        """Return the names of this request's fields by those of its chat request.

        Args:
            previous: messages of the conversation before this request's input.
        """
        before = [{"": "instructions"}] if self.instructions else []
        before += [{"": "previous_response_id"}] * previous
        names = CHAT_FIELDS | tools.paths()
        return FieldNames(names, lambda: [*before, *(source for _, source in to_messages(self.input))])

    def echo(self) -> dict[str, Any]:
        """Return the fields of a response that repeat its request."""
        choice = self.tool_choice
        echoed_choice: Any = choice.type if choice else "auto"
        if isinstance(choice, OneToolChoice | AllowedToolsChoice):
            echoed_choice = choice.model_dump()
        return {
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [tool.model_dump() for tool in self.tools],
            "tool_choice": echoed_choice,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {"format": self.text.format.model_dump(by_alias=True, exclude_none=True)},
            "reasoning": {"effort": self.reasoning.effort, "summary": self.reasoning.summary},
            "metadata": self.metadata or {},
            "truncation": "disabled",
            "background": self.background,
            "user": self.user,
            "store": False,
        }

    def _chat_tool_choice(self) -> str | dict[str, Any] | None:
        if isinstance(self.tool_choice, OneToolChoice):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        if isinstance(self.tool_choice, AllowedToolsChoice):
            tools = [{"type": "function", "function": {"name": t.name}} for t in self.tool_choice.tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": self.tool_choice.mode, "tools": tools}}
        return self.tool_choice.type if self.tool_choice else None


def _response_format(text_format: TextFormat | SchemaFormat) -> dict[str, Any] | None:
    if isinstance(text_format, SchemaFormat):
        return {
            "type": "json_schema",
            "json_schema": text_format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True),
        }
    return None if text_format.type == "text" else {"type": text_format.type}
