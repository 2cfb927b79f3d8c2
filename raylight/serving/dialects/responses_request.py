"""Requests of OpenAI's responses dialect, translated to chat requests.

A replica remembers a response for `previous_response_id` unless the request has `store=false`. It never
stores one for later retrieval, so that answers have `store: false`. `metadata` and `user` are echoed.
Messages of developers become messages of the system. A request that includes `reasoning.encrypted_content`,
as agent-framework's client always does, gets reasoning as plain text, which may be sent back unchanged.

One turn of the model comes back as several input items (reasoning, a message, tool calls) and is one message
of chat.

Tools become functions of chat. A custom tool, whose input is plain text, becomes a function with one
parameter, `input`. The tools of a namespace become functions named `NAMESPACE__NAME`. Tools that a provider
runs are dropped: no model here can use them. Those that the agent runs in a form that only OpenAI's models
know (local_shell, shell, apply_patch, computer) are refused: give them as functions. A tool with
`defer_loading` is given at once, because nobody searches for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from raylight.http.body import RequestModel
from raylight.http.errors import RequestError
from raylight.serving.dialects.dialect import FieldNames, MessageSource
from raylight.types import JsonObject
from raylight.types.chat_messages import image_part, join_parts, normalize_message, text_part, tool_call
from raylight.types.json_object import parse_json
from raylight.types.request_fields import log_dropped

DEFAULT_NAMESPACE = "functions"
"""Namespace of the tools without one."""
INPUT = "input"
"""Parameter of the function that stands for a custom tool."""


class PlainTool(RequestModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    defer_loading: bool | None = Field(default=None, exclude=True)
    allowed_callers: list[Literal["direct"]] | None = Field(default=None, exclude=True)
    output_schema: JsonObject | None = Field(default=None, exclude=True)
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
        functions: the tools as a chat request has them.
        dropped: types of the tools that are dropped.

    Raises:
        RequestError: 400, two tools have the same name.
    """

    def __init__(self, tools: Sequence[tuple[str, Sequence[object]]]) -> None:
        self.functions: list[JsonObject] = []
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

    def _add(self, tool: object, path: str) -> None:
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
    decoded: Any = parse_json(arguments)
    is_input = isinstance(decoded, dict) and isinstance(decoded.get(INPUT), str)
    return decoded[INPUT] if is_input else arguments


def _flatten(tool: Any, path: str) -> Iterator[tuple[PlainTool | CustomTool, str, str | None]]:
    """Yield the functions and custom tools of a tool, each with its path and namespace."""
    if not isinstance(tool, NamespaceTool):
        yield tool, path, None
        return
    for index, inner in enumerate(tool.tools):
        yield inner, f"{path}.tools[{index}]", tool.name


def _function(tool: PlainTool | CustomTool, name: str) -> JsonObject:
    if isinstance(tool, PlainTool):
        return tool.model_dump(exclude={"type"}, exclude_none=True) | {"name": name}
    description = tool.description or ""
    if isinstance(tool.format, GrammarInput):
        description += f"\nThe input follows this grammar ({tool.format.syntax}):\n{tool.format.definition}"
    properties = {INPUT: {"type": "string", "description": "the tool's input, as plain text"}}
    parameters = {"type": "object", "properties": properties, "required": [INPUT]}
    return {"name": name, "description": description.strip(), "parameters": parameters}


Status = Literal["in_progress", "completed", "incomplete"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class InputText(RequestModel):
    type: Literal["input_text", "text"]
    text: str


class OutputText(RequestModel):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[object], Field(max_length=0)] = Field(default=[])
    logprobs: list[object] | None = None
    """Log-probs of an earlier answer; ignored."""
    parsed: object = None
    """The text as the SDK's `parse` read it, which the SDK sends back; ignored."""


class InputImage(RequestModel):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] = "auto"


Parts = list[Annotated[InputText | OutputText | InputImage, Field(discriminator="type")]]


def _as_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class ConversationItem(RequestModel):
    """An item of the input."""

    id: str | None = None
    internal_chat_message_metadata_passthrough: object = None
    """Codex's notes on an item's origin; ignored."""


class InputMessageItem(ConversationItem):
    type: Literal["message"]
    role: Literal["user", "system", "developer"]
    content: Annotated[Parts, BeforeValidator(_as_parts)]
    status: Status | None = None


class AssistantMessageItem(ConversationItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: Annotated[
        list[Annotated[InputText | OutputText, Field(discriminator="type")]], BeforeValidator(_as_parts)
    ]
    status: Status | None = None


class FunctionCallItem(ConversationItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    status: Status | None = None
    parsed_arguments: object = None
    """The arguments as the SDK's `parse` read them, which the SDK sends back; ignored."""


class CustomToolCallItem(ConversationItem):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    status: Status | None = None


class ToolOutputItem(ConversationItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    name: str | None = None
    output: Annotated[
        list[Annotated[InputText | InputImage, Field(discriminator="type")]], BeforeValidator(_as_parts)
    ]
    status: Status | None = None


class ReasoningText(RequestModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(ConversationItem):
    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default=[])
    content: list[ReasoningText] = Field(default=[])
    status: Status | None = None


class AdditionalToolsItem(ConversationItem):
    """Tools in addition to the request's."""

    type: Literal["additional_tools"]
    role: Literal["developer", "system"] = "developer"
    tools: list[ResponsesTool]


class UpdatedReasoning(RequestModel):
    effort: Effort | None = None


class ConfigurationUpdateItem(ConversationItem):
    """Settings that replace the request's."""

    type: Literal["configuration_update"]
    reasoning: UpdatedReasoning | None = None


CallItem = FunctionCallItem | CustomToolCallItem
AssistantItem = AssistantMessageItem | CallItem | ReasoningItem
SettingItem = AdditionalToolsItem | ConfigurationUpdateItem
"""Items without a message."""


def _item_tag(item: object) -> str:
    """Return the tag of an item's model; a message needs no type."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    role = item.get("role") if isinstance(item, dict) else getattr(item, "role", None)
    return "assistant" if kind == "message" and role == "assistant" else str(kind)


InputItem = Annotated[
    Annotated[InputMessageItem, Tag("message")]
    | Annotated[AssistantMessageItem, Tag("assistant")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[ToolOutputItem, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[ToolOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")]
    | Annotated[ConfigurationUpdateItem, Tag("configuration_update")],
    Discriminator(
        _item_tag,
        custom_error_type="unknown_item",
        custom_error_message="this item is not supported; supported: message, function_call, "
        "function_call_output, custom_tool_call, custom_tool_call_output, reasoning, additional_tools, "
        "configuration_update",
    ),
]


def as_items(value: object) -> object:
    """Return the input as a list of items, each with its type. A string is a user's message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [
        {"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in value
    ]


@dataclass
class _AssistantTurn:
    """One turn of the assistant, assembled from its items."""

    path: str
    """Path of its first item in the request."""
    answer_id: str | None = None
    """The id of the answer in its items' ids; None if they are not ours."""
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[JsonObject] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    """Paths of its calls in the request, by those in its message."""

    def accepts(self, item: AssistantItem) -> bool:
        """Return True if an item belongs to the turn: by its id, or else by the order of a model's output.

        After a call only its output ends the turn, because some agents send text after the calls.
        """
        answer_id = answer_id_of(item.id)
        if answer_id is not None and self.answer_id is not None:
            return answer_id == self.answer_id
        if isinstance(item, ReasoningItem):
            return not (self.texts or self.calls)
        return isinstance(item, CallItem) or bool(self.calls) or not self.texts

    def add(self, item: AssistantItem, path: str) -> None:
        self.answer_id = self.answer_id or answer_id_of(item.id)
        if isinstance(item, AssistantMessageItem):
            self.texts += [part.text for part in item.content]
        elif isinstance(item, CallItem):
            index = len(self.calls)
            self.places |= {f"tool_calls[{index}]": path, f"tool_calls[{index}].function": path}
            name = chat_name(item.name, item.namespace)
            text = item.arguments if isinstance(item, FunctionCallItem) else custom_arguments(item.input)
            self.calls.append(tool_call(item.call_id, name, text))
        else:
            self.reasoning += [part.text for part in item.content or item.summary]

    def message(self) -> tuple[JsonObject, MessageSource]:
        """Return the turn as a chat message, with its source."""
        texts = {"content": "".join(self.texts), "reasoning_content": "".join(self.reasoning)}
        message = normalize_message({"role": "assistant", **texts, "tool_calls": self.calls})
        return message, {"": self.path} | self.places


ID_PREFIXES = {"text": "msg", "reasoning": "rs", "function": "fc", "custom": "ctc"}
"""Prefixes of the ids of output items, by the kind of a block or of a called tool."""


def item_id(prefix: str, answer_id: str, index: int) -> str:
    """Return the id of an output item: a prefix of `ID_PREFIXES`, the answer's id, the item's index."""
    return f"{prefix}_{answer_id}.{index}"


def answer_id_of(item_id: str | None) -> str | None:
    """Return the answer's id in an item's id; None if the id is not one of ours."""
    prefix, _, rest = (item_id or "").partition("_")
    answer_id, dot, index = rest.rpartition(".")
    return answer_id if dot and prefix in ID_PREFIXES.values() and index.isdigit() else None


def to_messages(items: list[Any]) -> list[tuple[JsonObject, MessageSource]]:
    """Return the chat messages of input items, each with its source in the request."""
    messages: list[tuple[JsonObject, MessageSource]] = []
    turn: _AssistantTurn | None = None
    for index, item in enumerate(items):
        path = f"input[{index}]"
        if isinstance(item, SettingItem):
            continue
        if isinstance(item, AssistantItem):
            if turn is None or not turn.accepts(item):
                messages += [turn.message()] if turn else []
                turn = _AssistantTurn(path)
            turn.add(item, path)
            continue
        messages += [turn.message()] if turn else []
        turn = None
        messages.append(_input_message(item, path))
    return messages + ([turn.message()] if turn else [])


def _input_message(item: InputMessageItem | ToolOutputItem, path: str) -> tuple[JsonObject, MessageSource]:
    if isinstance(item, InputMessageItem):
        role = "user" if item.role == "user" else "system"
        return {"role": role, "content": join_parts([_part(part) for part in item.content])}, {"": path}
    content = join_parts([_part(part) for part in item.output])
    places = {"": path, "content": f"{path}.output"}
    return {"role": "tool", "tool_call_id": item.call_id, "content": content}, places


def _part(part: InputText | OutputText | InputImage) -> JsonObject:
    return image_part(part.image_url, part.detail) if isinstance(part, InputImage) else text_part(part.text)


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
"""Fields of a responses request by the fields of its chat request."""
INCLUDED = Literal[
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Additions to an answer; tools that providers run add nothing here."""


class OneToolChoice(RequestModel):
    type: Literal["function", "custom"]
    name: str


class AllowedToolsChoice(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[OneToolChoice]


class TextFormat(RequestModel):
    type: Literal["text", "json_object"]


class SchemaFormat(RequestModel):
    type: Literal["json_schema"]
    name: str
    schema_: JsonObject = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(RequestModel):
    format: Annotated[TextFormat | SchemaFormat, Field(discriminator="type")] = TextFormat(type="text")
    verbosity: str | None = None


class Reasoning(RequestModel):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Reasoning is answered in full, without a summary."""
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesStreamOptions(RequestModel):
    include_obfuscation: bool = False
    """Padding against an observer of the network; an answer has none."""


def _as_object(choice: object) -> object:
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
    store: object = True
    metadata: object = None
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

    def to_chat(self, messages: list[JsonObject], tools: GivenTools) -> JsonObject:
        """Return the chat request.

        Args:
            messages: the conversation, this request's input included.
        """
        if self.truncation != "disabled":
            log_dropped("truncation", "no engine here does: a conversation that is too long is an error")
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        settings: JsonObject = {
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
        chat: JsonObject = {"model": self.model, "messages": system + messages}
        chat |= {name: value for name, value in settings.items() if value is not None}
        return chat | ({"stream": True, "stream_options": {"include_usage": True}} if self.stream else {})

    def messages(self) -> list[JsonObject]:
        """Return the input as chat messages."""
        return [message for message, _ in to_messages(self.input)]

    def _effort(self) -> str | None:
        """Return the effort of reasoning, which the input may change."""
        updates = [item for item in self.input if isinstance(item, ConfigurationUpdateItem)]
        efforts = [update.reasoning.effort for update in updates if update.reasoning]
        return next((effort for effort in reversed(efforts) if effort), self.reasoning.effort)

    def field_names(self, previous: int, tools: GivenTools) -> FieldNames:
        """Return the names of this request's fields by its chat request's.

        Args:
            previous: messages of the conversation before this request's input.
        """
        before = [{"": "instructions"}] if self.instructions else []
        before += [{"": "previous_response_id"}] * previous
        names = CHAT_FIELDS | tools.paths()
        return FieldNames(names, lambda: [*before, *(source for _, source in to_messages(self.input))])

    def echo(self) -> JsonObject:
        """Return the fields of a response that repeat its request."""
        choice = self.tool_choice
        echoed_choice: object = choice.type if choice else "auto"
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

    def _chat_tool_choice(self) -> str | JsonObject | None:
        if isinstance(self.tool_choice, OneToolChoice):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        if isinstance(self.tool_choice, AllowedToolsChoice):
            tools = [{"type": "function", "function": {"name": t.name}} for t in self.tool_choice.tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": self.tool_choice.mode, "tools": tools}}
        return self.tool_choice.type if self.tool_choice else None


def _response_format(text_format: TextFormat | SchemaFormat) -> JsonObject | None:
    if isinstance(text_format, SchemaFormat):
        return {
            "type": "json_schema",
            "json_schema": text_format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True),
        }
    return None if text_format.type == "text" else {"type": text_format.type}
