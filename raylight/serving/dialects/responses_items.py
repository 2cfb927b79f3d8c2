"""The input items of a responses request, as chat messages.

What the model said in one go comes back as several items (reasoning, a message, calls of tools) and is one
message of chat.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from raylight.http.body import Asked, as_content, image_part, text_part
from raylight.serving.dialects.answers import normalize_message

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Asked):
    type: Literal["input_text", "text"]
    text: str


class OutputText(Asked):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] = Field(default=[])
    logprobs: list[Any] | None = None
    """Of an earlier answer; they mean nothing to the model."""
    parsed: Any = None
    """What the SDK's `parse` read from the text, where it is sent back with it."""


class InputImage(Asked):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto"] = "auto"


Parts = list[Annotated[InputText | OutputText | InputImage, Field(discriminator="type")]]


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class GivenMessage(Asked):
    type: Literal["message"]
    role: Literal["user", "system", "developer"]
    content: Annotated[Parts, BeforeValidator(_as_parts)]
    id: str | None = None
    status: Status | None = None


class SaidMessage(Asked):
    """The assistant's."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: Annotated[
        list[Annotated[InputText | OutputText, Field(discriminator="type")]], BeforeValidator(_as_parts)
    ]
    id: str | None = None
    status: Status | None = None


class FunctionCall(Asked):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    parsed_arguments: Any = None
    """What the SDK's `parse` read from the arguments, where it is sent back with them."""


class FunctionCallOutput(Asked):
    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[list[InputText], BeforeValidator(_as_parts)]
    id: str | None = None
    status: Status | None = None


class ReasoningText(Asked):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Asked):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] = Field(default=[])
    content: list[ReasoningText] = Field(default=[])
    status: Status | None = None


def _kind(item: Any) -> str:
    """Which model an item is of; a message needs no type."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    role = item.get("role") if isinstance(item, dict) else getattr(item, "role", None)
    return "said" if kind == "message" and role == "assistant" else str(kind)


InputItem = Annotated[
    Annotated[GivenMessage, Tag("message")]
    | Annotated[SaidMessage, Tag("said")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="this item is not supported; supported: message, function_call, function_call_output, reasoning",
    ),
]


def as_items(value: Any) -> Any:
    """A list of items, each with its type. A plain string is a user's message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [
        {"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in value
    ]


@dataclass
class _Said:
    """What the assistant said in one go, as it is put together."""

    generation: str | None = None
    """The common part of its items' ids, where these are ours."""
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def takes(self, item: SaidMessage | FunctionCall | ReasoningItem) -> bool:
        """Whether an item belongs to it: by its id or else by the order in which a model speaks."""
        generation = generation_of(item.id)
        if generation is not None and self.generation is not None:
            return generation == self.generation
        if isinstance(item, ReasoningItem):
            return not (self.texts or self.calls)
        return isinstance(item, FunctionCall) or not (self.texts or self.calls)

    def take(self, item: SaidMessage | FunctionCall | ReasoningItem) -> None:
        self.generation = self.generation or generation_of(item.id)
        if isinstance(item, SaidMessage):
            self.texts += [part.text for part in item.content]
        elif isinstance(item, FunctionCall):
            self.calls.append(
                {
                    "id": item.call_id,
                    "type": "function",
                    "function": {"name": item.name, "arguments": item.arguments},
                }
            )
        else:
            self.reasoning += [part.text for part in item.content or item.summary]

    def message(self) -> dict[str, Any]:
        reasoning = "".join(self.reasoning)
        return normalize_message(
            {
                "role": "assistant",
                "content": "".join(self.texts),
                "reasoning_content": reasoning,
                "tool_calls": self.calls,
            }
        )


def item_id(prefix: str, generation: str, index: int) -> str:
    """The id of an item of an answer: `msg_...`, `fc_...` or `rs_...`, with the answer's own id and its place
    there.
    """
    return f"{prefix}_{generation}.{index}"


def generation_of(found: str | None) -> str | None:
    """The id of the answer in an item's id; None if it is not one of ours."""
    prefix, _, rest = (found or "").partition("_")
    generation, dot, index = rest.rpartition(".")
    return generation if dot and prefix in ("msg", "fc", "rs") and index.isdigit() else None


def to_messages(items: list[Any]) -> list[dict[str, Any]]:
    """The chat messages of input items."""
    messages: list[dict[str, Any]] = []
    said: _Said | None = None
    for item in items:
        if isinstance(item, SaidMessage | FunctionCall | ReasoningItem):
            if said is None or not said.takes(item):
                messages += [said.message()] if said else []
                said = _Said()
            said.take(item)
            continue
        messages += [said.message()] if said else []
        said = None
        messages += _given(item)
    return messages + ([said.message()] if said else [])


def _given(item: GivenMessage | FunctionCallOutput) -> list[dict[str, Any]]:
    if isinstance(item, GivenMessage):
        role = "user" if item.role == "user" else "system"
        return [{"role": role, "content": as_content([_part(part) for part in item.content])}]
    parts = [_part(part) for part in item.output]
    return [{"role": "tool", "tool_call_id": item.call_id, "content": as_content(parts)}]


def _part(part: InputText | OutputText | InputImage) -> dict[str, Any]:
    return image_part(part.image_url) if isinstance(part, InputImage) else text_part(part.text)
