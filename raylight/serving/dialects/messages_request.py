"""Requests of Anthropic's messages dialect, translated to chat requests.

Cache hints (`cache_control`), `metadata` and signatures of thinking are accepted and ignored. The result of a
failed tool begins with "Error: ", because chat has no field for failures. A conversation cannot end with a
message of the assistant.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from raylight.http.body import RequestModel
from raylight.http.errors import RequestError
from raylight.serving.dialects.chat_messages import (
    image_part,
    join_parts,
    normalize_message,
    text_part,
    tool_call,
)

INVALID_JSON = "INVALID_JSON"
"""Key of a call's input for arguments that are no JSON object; Anthropic's own."""


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class CacheControl(RequestModel):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CacheableBlock(RequestModel):
    cache_control: CacheControl | None = None


class TextBlock(CacheableBlock):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class UrlSource(RequestModel):
    type: Literal["url"]
    url: str


class Base64Source(RequestModel):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageBlock(CacheableBlock):
    type: Literal["image"]
    source: Annotated[UrlSource | Base64Source, Field(discriminator="type")]


class ThinkingBlock(RequestModel):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class DirectCaller(RequestModel):
    type: Literal["direct"]


class ToolUseBlock(CacheableBlock):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None


class ToolResultBlock(CacheableBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]], BeforeValidator(_as_blocks)
    ] = Field(default=[])
    is_error: bool = False


Texts = Annotated[list[TextBlock], BeforeValidator(_as_blocks)]
UserBlocks = list[Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]]
AssistantBlocks = list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]]


class UserMessage(RequestModel):
    role: Literal["user"]
    content: Annotated[UserBlocks, BeforeValidator(_as_blocks), Field(min_length=1)]


class AssistantMessage(RequestModel):
    role: Literal["assistant"]
    content: Annotated[AssistantBlocks, BeforeValidator(_as_blocks)]


class SystemMessage(RequestModel):
    role: Literal["system"]
    content: Texts


class MessagesTool(CacheableBlock):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    strict: bool | None = None
    eager_input_streaming: bool | None = None


class AnyToolChoice(RequestModel):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool = False


class NamedToolChoice(RequestModel):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class NoToolChoice(RequestModel):
    type: Literal["none"]


class EnabledThinking(RequestModel):
    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1)


class UnbudgetedThinking(RequestModel):
    type: Literal["adaptive", "disabled"]


class JsonFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountTokensRequest(RequestModel):
    """A request to `/v1/messages/count_tokens`: the fields that make a prompt."""

    model: str
    messages: Annotated[
        list[Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    system: Texts = Field(default=[])
    tools: list[MessagesTool] = Field(default=[])
    tool_choice: (
        Annotated[AnyToolChoice | NamedToolChoice | NoToolChoice, Field(discriminator="type")] | None
    ) = None
    thinking: Annotated[EnabledThinking | UnbudgetedThinking, Field(discriminator="type")] | None = None
    cache_control: CacheControl | None = None

    def to_chat(self) -> dict[str, Any]:
        """Return the fields of a chat request that make the same prompt."""
        messages = [chat for message in self.messages for chat in _to_chat(message)]
        if self.system:
            messages.insert(0, _system_message(self.system))
        chat: dict[str, Any] = {"model": self.model, "messages": messages}
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
        """Return the chat request.

        Raises:
            RequestError: 400, the last message is the assistant's.
        """
        if self.messages[-1].role == "assistant":
            raise RequestError(
                "messages: the last message is the assistant's, which this endpoint cannot continue; end "
                "with a message of the user"
            )
        chat = super().to_chat() | {"max_completion_tokens": self.max_tokens} | _tool_choice(self.tool_choice)
        settings = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            "reasoning_effort": self.output_config.effort,
        }
        chat |= {name: value for name, value in settings.items() if value is not None}
        if isinstance(self.thinking, EnabledThinking):
            chat["thinking_token_budget"] = self.thinking.budget_tokens
        if json_format := self.output_config.format:
            schema = {"name": "output", "schema": json_format.schema_}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.stream:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        return chat


def _tool(tool: MessagesTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: AnyToolChoice | NamedToolChoice | NoToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    if isinstance(choice, NoToolChoice):
        return {"tool_choice": "none"}
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if isinstance(choice, NamedToolChoice):
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}} | parallel
    return {"tool_choice": "required" if choice.type == "any" else "auto"} | parallel


def _to_chat(message: UserMessage | AssistantMessage | SystemMessage) -> list[dict[str, Any]]:
    if isinstance(message, UserMessage):
        return _user_to_chat(message)
    if isinstance(message, AssistantMessage):
        return [_assistant_to_chat(message)]
    return [_system_message(message.content)]


def _system_message(texts: list[TextBlock]) -> dict[str, Any]:
    return {"role": "system", "content": "\n".join(block.text for block in texts)}


def _user_to_chat(message: UserMessage) -> list[dict[str, Any]]:
    """Translate a user's message. Each tool result becomes a message of its own.

    The images of tool results move into the user's message, because chat allows only text in those of tools.
    """
    results: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            if others:
                raise RequestError(
                    "messages: a tool_result block follows another block; put the tool_result blocks first"
                )
            parts = [_part(part) for part in block.content]
            images += [part for part in parts if part["type"] != "text"]
            text = join_parts([part for part in parts if part["type"] == "text"])
            content = f"Error: {text}" if block.is_error else text
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        else:
            others.append(_part(block))
    parts = images + others
    return results + ([{"role": "user", "content": join_parts(parts)}] if parts else [])


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return text_part(block.text)
    source = block.source
    if isinstance(source, UrlSource):
        return image_part(source.url)
    return image_part(f"data:{source.media_type};base64,{source.data}")


def _assistant_to_chat(message: AssistantMessage) -> dict[str, Any]:
    blocks = message.content
    calls = [
        tool_call(block.id, block.name, _arguments(block.input))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return normalize_message(
        {"role": "assistant", "content": text, "reasoning_content": thinking, "tool_calls": calls}
    )


def _arguments(value: dict[str, Any]) -> str:
    """Return the arguments of a call as the model wrote them."""
    if list(value) == [INVALID_JSON] and isinstance(value[INVALID_JSON], str):
        return value[INVALID_JSON]
    return json.dumps(value, ensure_ascii=False)
