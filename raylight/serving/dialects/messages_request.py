"""Requests of Anthropic's messages dialect, translated to chat requests.

Cache hints (`cache_control`) and labels (`metadata`, `service_tier`) are accepted and ignored. So is
`context_management`, by which a provider shortens a conversation: here one that is too long is
an error. Tools that a provider runs are dropped: no model here can use them. The result of a failed tool
begins with "Error: ", because chat has no field for failures. A conversation cannot end with a message of the
assistant.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from collections.abc import Container, Sequence
from hashlib import blake2b
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from raylight.http.body import RequestModel
from raylight.http.errors import RequestError
from raylight.serving.dialects.dialect import FieldNames, MessageSource
from raylight.types import JsonObject
from raylight.types.chat_messages import (
    INVALID_JSON,
    image_part,
    join_parts,
    normalize_message,
    text_part,
    tool_call,
)

CHAT_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "chat_template_kwargs": "thinking",
    "chat_template_kwargs.enable_thinking": "thinking",
    "chat_template_kwargs.reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function": "tool_choice",
}
"""Fields of a messages request by the fields of its chat request."""
SIGNATURE = "raylight_"
"""Start of the signatures of thinking."""


class CacheableBlock(RequestModel):
    cache_control: object = None


class MessagesTool(CacheableBlock):
    name: str
    description: str | None = None
    input_schema: JsonObject
    type: Literal["custom"] = "custom"
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool = False
    """True for a tool that the model gets once a search has found it."""
    allowed_callers: list[Literal["direct"]] | None = None


# Tools that a provider runs are dropped, because no model here can use them. Those that the agent runs in a
# form that only Anthropic's models know (bash, text_editor, memory, computer) are refused: give a schema.
PROVIDER_TOOL = r"(?:web_search|web_fetch|code_execution|tool_search_tool_(?:regex|bm25))_[0-9]{8}"
"""Types of tools that Anthropic runs."""
TOOL_SEARCH = "tool_search_tool_"


class ProviderTool(RequestModel):
    """A tool that is dropped, whatever its settings are."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(pattern=f"^{PROVIDER_TOOL}$")]
    name: str


def _tool_tag(tool: object) -> str:
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


def as_function(tool: MessagesTool) -> JsonObject:
    function: JsonObject = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(CacheableBlock):
    type: Literal["text"]
    text: str
    citations: Annotated[list[object], Field(max_length=0)] | None = None


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


class TextSource(RequestModel):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(RequestModel):
    type: Literal["content"]
    content: Annotated[list[TextBlock], BeforeValidator(_as_blocks)]


class DocumentBlock(CacheableBlock):
    """A document of text. Files and PDFs are an error, because no model here can read them."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
    citations: object = None
    """Answers cite nothing."""

    @property
    def text(self) -> str:
        """The document with its title and context."""
        source = self.source
        texts = [source.data] if isinstance(source, TextSource) else [block.text for block in source.content]
        return "\n".join(filter(None, [self.title, self.context, *texts]))


def sign(thinking: str) -> str:
    """Return the signature of an answer's thinking, by which a changed one is recognised.

    It depends on the text alone, so that all replicas and a resumed run accept it, and not on white space
    around it, which some clients trim. Some SDKs send back only thinking that has one.
    """
    digest = blake2b(thinking.strip().encode("utf-8", "surrogatepass"), digest_size=24).digest()
    return SIGNATURE + urlsafe_b64encode(digest).decode()


class ThinkingBlock(CacheableBlock):
    """Thinking of an earlier answer. Signatures of other providers, and none, are accepted."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""

    @model_validator(mode="after")
    def _check_signature(self) -> ThinkingBlock:
        if self.signature.startswith(SIGNATURE) and self.signature != sign(self.thinking):
            raise ValueError("the thinking does not match its signature; send the block back unchanged")
        return self


class RedactedThinkingBlock(CacheableBlock):
    """Thinking of another provider's answer, which only that provider can read; the model does not get it."""

    type: Literal["redacted_thinking"]
    data: str = ""


class DirectCaller(RequestModel):
    type: Literal["direct"]


class ToolUseBlock(CacheableBlock):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject
    caller: DirectCaller | None = None


class ToolReferenceBlock(CacheableBlock):
    """Name of a tool that a search has found."""

    type: Literal["tool_reference"]
    tool_name: str


ResultBlocks = list[
    Annotated[TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock, Field(discriminator="type")]
]


class ToolResultBlock(CacheableBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[ResultBlocks, BeforeValidator(_as_blocks)] = Field(default=[])
    is_error: bool = False


Texts = Annotated[list[TextBlock], BeforeValidator(_as_blocks)]
UserBlocks = list[
    Annotated[TextBlock | ImageBlock | DocumentBlock | ToolResultBlock, Field(discriminator="type")]
]
AssistantBlocks = list[
    Annotated[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")]
]


class UserMessage(RequestModel):
    role: Literal["user"]
    content: Annotated[UserBlocks, BeforeValidator(_as_blocks), Field(min_length=1)]


class AssistantMessage(RequestModel):
    role: Literal["assistant"]
    content: Annotated[AssistantBlocks, BeforeValidator(_as_blocks)]


class SystemMessage(RequestModel):
    role: Literal["system"]
    content: Texts


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
    display: Literal["summarized", "omitted"] | None = None
    """Thinking is always answered in full."""


class OtherThinking(RequestModel):
    type: Literal["adaptive", "between_tools", "disabled"]
    budget_tokens: int = Field(default=0, ge=0)
    """Claude Code sends 0 with adaptive thinking, which sets no budget."""
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


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
    tools: list[AnyTool] = Field(default=[])
    tool_choice: (
        Annotated[AnyToolChoice | NamedToolChoice | NoToolChoice, Field(discriminator="type")] | None
    ) = None
    thinking: Annotated[EnabledThinking | OtherThinking, Field(discriminator="type")] | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: JsonFormat | None = None
    """`output_config.format` under the name that it had before."""
    cache_control: object = None
    context_management: object = None

    def to_chat(self) -> JsonObject:
        """Return the fields of a chat request that make the same prompt."""
        chat: JsonObject = {"model": self.model, "messages": [chat for chat, _ in self._messages()]}
        if tools := self._given_tools():
            chat["tools"] = [as_function(tool) for tool in tools.values()]
        if self.thinking:
            chat["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        if self.output_config.effort:
            chat["reasoning_effort"] = self.output_config.effort
        return chat

    def field_names(self) -> FieldNames:
        """Return the names of this request's fields by its chat request's."""
        return FieldNames(CHAT_FIELDS | self._tool_paths(), self._sources)

    def _given_tools(self) -> dict[int, MessagesTool]:
        """Return the tools that the model gets, by their index in the request."""
        found = {
            part.tool_name
            for message in self.messages
            if isinstance(message, UserMessage)
            for block in message.content
            if isinstance(block, ToolResultBlock)
            for part in block.content
            if isinstance(part, ToolReferenceBlock)
        }
        return given_tools(self.tools, found)

    def _tool_paths(self) -> dict[str, str]:
        paths: dict[str, str] = {}
        for place, index in enumerate(self._given_tools()):
            paths[f"tools[{place}].function"] = f"tools[{index}]"
            paths[f"tools[{place}].function.parameters"] = f"tools[{index}].input_schema"
        return paths

    def _sources(self) -> list[MessageSource]:
        return [source for _, source in self._messages()]

    def _messages(self) -> list[tuple[JsonObject, MessageSource]]:
        """Return the messages of the chat request, each with its source in this request."""
        system = [(_system_message(self.system), {"": "system"})] if self.system else []
        numbered = enumerate(self.messages)
        return system + [pair for index, one in numbered for pair in _to_chat(one, f"messages[{index}]")]


class MessagesRequest(CountTokensRequest):
    """A request to `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] = Field(default=[])
    stream: bool = False

    def field_names(self) -> FieldNames:
        if self.output_config.format or not self.output_format:
            return super().field_names()
        names = {
            chat: name.replace("output_config.format", "output_format") for chat, name in CHAT_FIELDS.items()
        }
        return FieldNames(names | self._tool_paths(), self._sources)

    def to_chat(self) -> JsonObject:
        """Return the chat request.

        Raises:
            RequestError: 400, the last message is the assistant's.
        """
        if self.messages[-1].role == "assistant":
            raise RequestError(
                f"messages[{len(self.messages) - 1}]: the last message is the assistant's, which this "
                "endpoint cannot continue; end with a message of the user"
            )
        chat = super().to_chat() | {"max_completion_tokens": self.max_tokens} | _tool_choice(self.tool_choice)
        settings = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
        }
        chat |= {name: value for name, value in settings.items() if value is not None}
        if self.thinking and self.thinking.type != "disabled" and self.thinking.budget_tokens:
            chat["thinking_token_budget"] = self.thinking.budget_tokens
        if json_format := self.output_config.format or self.output_format:
            schema = {"name": "output", "schema": json_format.schema_}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.stream:
            # the first event of a message has the prompt's size, and so must the first chunk
            options = {"include_usage": True, "continuous_usage_stats": True}
            chat |= {"stream": True, "stream_options": options}
        return chat


def _tool_choice(choice: AnyToolChoice | NamedToolChoice | NoToolChoice | None) -> JsonObject:
    if choice is None:
        return {}
    if isinstance(choice, NoToolChoice):
        return {"tool_choice": "none"}
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if isinstance(choice, NamedToolChoice):
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}} | parallel
    return {"tool_choice": "required" if choice.type == "any" else "auto"} | parallel


def _to_chat(
    message: UserMessage | AssistantMessage | SystemMessage, path: str
) -> list[tuple[JsonObject, MessageSource]]:
    if isinstance(message, UserMessage):
        return _user_to_chat(message, path)
    if isinstance(message, AssistantMessage):
        return [_assistant_to_chat(message, path)]
    return [(_system_message(message.content), {"": path})]


def _system_message(texts: list[TextBlock]) -> JsonObject:
    return {"role": "system", "content": "\n".join(block.text for block in texts)}


def _user_to_chat(message: UserMessage, path: str) -> list[tuple[JsonObject, MessageSource]]:
    """Translate a user's message. Each tool result becomes a message, before all other blocks."""
    results: list[tuple[JsonObject, MessageSource]] = []
    others: list[tuple[JsonObject, str]] = []
    for index, block in enumerate(message.content):
        place = f"{path}.content[{index}]"
        if isinstance(block, ToolResultBlock):
            results.append(_result_to_chat(block, place))
        else:
            others.append((_part(block), place))
    if not others:
        return results
    places = {f"content[{index}]": place for index, (_, place) in enumerate(others)}
    user = {"role": "user", "content": join_parts([part for part, _ in others])}
    return [*results, (user, {"": path} | places)]


def _result_to_chat(block: ToolResultBlock, place: str) -> tuple[JsonObject, MessageSource]:
    content = join_parts([_part(part) for part in block.content])
    if block.is_error:
        content = f"Error: {content}" if isinstance(content, str) else [*content, text_part("(an error)")]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}, {"": place}


def _part(block: TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock) -> JsonObject:
    if isinstance(block, TextBlock | DocumentBlock):
        return text_part(block.text)
    if isinstance(block, ToolReferenceBlock):
        return text_part(block.tool_name)
    source = block.source
    if isinstance(source, UrlSource):
        return image_part(source.url)
    return image_part(f"data:{source.media_type};base64,{source.data}")


def _assistant_to_chat(message: AssistantMessage, path: str) -> tuple[JsonObject, MessageSource]:
    blocks = message.content
    numbered = [(i, block) for i, block in enumerate(blocks) if isinstance(block, ToolUseBlock)]
    calls = [tool_call(block.id, block.name, _arguments(block.input)) for _, block in numbered]
    places = {f"tool_calls[{k}]": f"{path}.content[{i}]" for k, (i, _) in enumerate(numbered)}
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    chat = {"role": "assistant", "content": text, "reasoning_content": thinking, "tool_calls": calls}
    return normalize_message(chat), {"": path} | places


def _arguments(value: JsonObject) -> str:
    """Return the arguments of a call as the model wrote them."""
    if list(value) == [INVALID_JSON] and isinstance(value[INVALID_JSON], str):
        return value[INVALID_JSON]
    return json.dumps(value, ensure_ascii=False)
