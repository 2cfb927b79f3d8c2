"""Input items of a responses request, translated to chat messages.

One turn of the model comes back as several items (reasoning, a message, tool calls) and is one message of
chat.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from raylight.http.body import RequestModel
from raylight.serving.dialects.chat_messages import (
    image_part,
    join_parts,
    normalize_message,
    text_part,
    tool_call,
)
from raylight.serving.dialects.field_names import MessageSource
from raylight.serving.dialects.responses_tools import ResponsesTool, chat_name, custom_arguments

Status = Literal["in_progress", "completed", "incomplete"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class InputText(RequestModel):
    type: Literal["input_text", "text"]
    text: str


class OutputText(RequestModel):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] = Field(default=[])
    logprobs: list[Any] | None = None
    """Log-probs of an earlier answer; ignored."""
    parsed: Any = None
    """The text as the SDK's `parse` read it, which the SDK sends back; ignored."""


class InputImage(RequestModel):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] = "auto"


Parts = list[Annotated[InputText | OutputText | InputImage, Field(discriminator="type")]]


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class ConversationItem(RequestModel):
    """An item of the input."""

    id: str | None = None
    internal_chat_message_metadata_passthrough: Any = None
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
    parsed_arguments: Any = None
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
    """Tools besides those of the request."""

    type: Literal["additional_tools"]
    role: Literal["developer", "system"] = "developer"
    tools: list[ResponsesTool]


class UpdatedReasoning(RequestModel):
    effort: Effort | None = None


class ConfigurationUpdateItem(ConversationItem):
    """Settings that replace those of the request."""

    type: Literal["configuration_update"]
    reasoning: UpdatedReasoning | None = None


CallItem = FunctionCallItem | CustomToolCallItem
AssistantItem = AssistantMessageItem | CallItem | ReasoningItem
SettingItem = AdditionalToolsItem | ConfigurationUpdateItem
"""Items without a message."""


def _item_tag(item: Any) -> str:
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


def as_items(value: Any) -> Any:
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
    calls: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    """Paths of its calls in the request, by those in its message."""

    def accepts(self, item: AssistantItem) -> bool:
        """Return True if an item belongs to the turn: by its id, or else by the order of a model's output."""
        answer_id = answer_id_of(item.id)
        if answer_id is not None and self.answer_id is not None:
            return answer_id == self.answer_id
        if isinstance(item, ReasoningItem):
            return not (self.texts or self.calls)
        return isinstance(item, CallItem) or not (self.texts or self.calls)

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

    def message(self) -> tuple[dict[str, Any], MessageSource]:
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


def to_messages(items: list[Any]) -> list[tuple[dict[str, Any], MessageSource]]:
    """Return the chat messages of input items, each with its source in the request."""
    messages: list[tuple[dict[str, Any], MessageSource]] = []
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
        messages += _input_messages(item, path)
    return messages + ([turn.message()] if turn else [])


def _input_messages(
    item: InputMessageItem | ToolOutputItem, path: str
) -> list[tuple[dict[str, Any], MessageSource]]:
    """Return the messages of an item. The images of a tool's output become a message of the user, because
    chat allows only text in those of tools."""
    if isinstance(item, InputMessageItem):
        role = "user" if item.role == "user" else "system"
        return [({"role": role, "content": join_parts([_part(part) for part in item.content])}, {"": path})]
    texts = [text_part(part.text) for part in item.output if isinstance(part, InputText)]
    images = [(i, part) for i, part in enumerate(item.output) if isinstance(part, InputImage)]
    output = {"role": "tool", "tool_call_id": item.call_id, "content": join_parts(texts)}
    messages: list[tuple[dict[str, Any], MessageSource]] = [(output, {"": path, "content": f"{path}.output"})]
    if images:
        user = {"role": "user", "content": [_part(image) for _, image in images]}
        places = {f"content[{k}]": f"{path}.output[{i}]" for k, (i, _) in enumerate(images)}
        messages.append((user, {"": f"{path}.output"} | places))
    return messages


def _part(part: InputText | OutputText | InputImage) -> dict[str, Any]:
    return image_part(part.image_url, part.detail) if isinstance(part, InputImage) else text_part(part.text)
