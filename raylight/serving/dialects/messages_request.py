"""Anthropic's messages dialect: its requests as chat requests.

Hints of caching (`cache_control`), `metadata` and signatures of thinking are taken and mean nothing here. A
failed tool's result begins with "Error: ", because chat has no other word for it. A conversation cannot end
with the assistant's own words.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from raylight.http.body import Asked, as_content, image_part, text_part
from raylight.http.errors import RequestError
from raylight.serving.dialects.answers import normalize_message

INVALID_JSON = "INVALID_JSON"
"""Key under which a call's input holds what the model wrote for arguments where that is no JSON object. It is
Anthropic's own."""


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class CacheControl(Asked):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Asked):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class UrlSource(Asked):
    type: Literal["url"]
    url: str


class Base64Source(Asked):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageBlock(Block):
    type: Literal["image"]
    source: Annotated[UrlSource | Base64Source, Field(discriminator="type")]


class ThinkingBlock(Asked):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class DirectCaller(Asked):
    type: Literal["direct"]


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]], BeforeValidator(_as_blocks)
    ] = Field(default=[])
    is_error: bool = False


Texts = Annotated[list[TextBlock], BeforeValidator(_as_blocks)]
UserBlocks = list[Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]]
AssistantBlocks = list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]]


class UserMessage(Asked):
    role: Literal["user"]
    content: Annotated[UserBlocks, BeforeValidator(_as_blocks), Field(min_length=1)]


class AssistantMessage(Asked):
    role: Literal["assistant"]
    content: Annotated[AssistantBlocks, BeforeValidator(_as_blocks)]


class SystemMessage(Asked):
    role: Literal["system"]
    content: Texts


class Tool(Block):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    strict: bool | None = None
    eager_input_streaming: bool | None = None


class FreeChoice(Asked):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool = False


class NamedChoice(Asked):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class NoChoice(Asked):
    type: Literal["none"]


class ThinkingOn(Asked):
    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1)


class ThinkingByItself(Asked):
    type: Literal["adaptive", "disabled"]


class JsonFormat(Asked):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Asked):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountTokensRequest(Asked):
    """What counting tokens and sampling have in common."""

    model: str
    messages: Annotated[
        list[Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    system: Texts = Field(default=[])
    tools: list[Tool] = Field(default=[])
    tool_choice: Annotated[FreeChoice | NamedChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingOn | ThinkingByItself, Field(discriminator="type")] | None = None
    cache_control: CacheControl | None = None

    def to_chat(self) -> dict[str, Any]:
        """The fields of a chat request that make its prompt."""
        system = (
            [{"role": "system", "content": "\n".join(block.text for block in self.system)}]
            if self.system
            else []
        )
        chat: dict[str, Any] = {
            "model": self.model,
            "messages": system + [m for said in self.messages for m in _to_chat(said)],
        }
        if self.tools:
            chat["tools"] = [_tool(tool) for tool in self.tools]
        if self.thinking:
            chat["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        return chat


class MessagesRequest(CountTokensRequest):
    """A request to `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] = Field(default=[])
    stream: bool = False
    metadata: dict[str, Any] | None = None
    output_config: OutputConfig = OutputConfig()
    service_tier: Literal["auto"] = "auto"

    def to_chat(self) -> dict[str, Any]:
        """The chat request.

        Raises:
            RequestError: 400, the conversation ends with the assistant's words.
        """
        if self.messages[-1].role == "assistant":
            raise RequestError(
                "messages: the last message is the assistant's; this endpoint cannot continue one"
            )
        chat = super().to_chat() | {"max_completion_tokens": self.max_tokens} | _choice(self.tool_choice)
        settings = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            "reasoning_effort": self.output_config.effort,
        }
        chat |= {name: value for name, value in settings.items() if value is not None}
        if isinstance(self.thinking, ThinkingOn):
            chat["thinking_token_budget"] = self.thinking.budget_tokens
        if wanted := self.output_config.format:
            chat["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": wanted.schema_},
            }
        if self.stream:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        return chat


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: FreeChoice | NamedChoice | NoChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    if isinstance(choice, NoChoice):
        return {"tool_choice": "none"}
    one = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if isinstance(choice, NamedChoice):
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}} | one
    return {"tool_choice": "required" if choice.type == "any" else "auto"} | one


def _to_chat(message: UserMessage | AssistantMessage | SystemMessage) -> list[dict[str, Any]]:
    if isinstance(message, UserMessage):
        return _user_to_chat(message)
    if isinstance(message, AssistantMessage):
        return [_assistant_to_chat(message)]
    return [{"role": "system", "content": "\n".join(block.text for block in message.content)}]


def _user_to_chat(message: UserMessage) -> list[dict[str, Any]]:
    """Results of tools become messages of their own. Their images follow in the user's, because chat allows
    tools only text.
    """
    results: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            if said:
                raise RequestError("messages: in a user's message the tool_result blocks come first")
            parts = [_part(part) for part in block.content]
            shown += [part for part in parts if part["type"] != "text"]
            text = as_content([part for part in parts if part["type"] == "text"])
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": f"Error: {text}" if block.is_error else text,
                }
            )
        else:
            said.append(_part(block))
    said = shown + said
    return results + ([{"role": "user", "content": as_content(said)}] if said else [])


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return text_part(block.text)
    source = block.source
    return image_part(
        source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    )


def _assistant_to_chat(message: AssistantMessage) -> dict[str, Any]:
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": _arguments(block.input)},
        }
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    text = "".join(block.text for block in message.content if isinstance(block, TextBlock))
    thinking = "".join(block.thinking for block in message.content if isinstance(block, ThinkingBlock))
    return normalize_message(
        {"role": "assistant", "content": text, "reasoning_content": thinking, "tool_calls": calls}
    )


def _arguments(given: dict[str, Any]) -> str:
    if list(given) == [INVALID_JSON] and isinstance(given[INVALID_JSON], str):
        return given[INVALID_JSON]
    return json.dumps(given, ensure_ascii=False)
