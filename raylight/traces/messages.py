"""Messages of model calls in OpenAI's fine-tuning format, read from spans of any supported convention."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from raylight.semconv import CALL_ID, DIALECT, INPUT_MESSAGES, OUTPUT_MESSAGES, TOOL_DEFINITIONS
from raylight.traces.attributes import (
    WEAVE_INPUT,
    WEAVE_OUTPUT,
    call_key_of,
    parse_literal,
    raw_field,
    unflatten,
    unflatten_list,
)
from raylight.traces.trace_adapter import TraceAdapter
from raylight.types import JsonObject, Message, Span

SYSTEM_INSTRUCTIONS = "gen_ai.system_instructions"
OPERATION = "gen_ai.operation.name"
NON_CALL_OPERATIONS = frozenset(
    {"create_agent", "invoke_agent", "invoke_workflow", "execute_tool", "embeddings", "retrieval"}
)
"""Operations whose spans may carry messages, but which are not calls of a model."""
TOOL_LISTS = ("gen_ai.request.functions", "gen_ai.request.tools", "llm.request.functions")

CONTENTS = frozenset({"text", "image_url", "input_text", "input_image", "input_audio", "file", "image"})
TOOL_CALLS = frozenset({"tool_call", "tool_use", "function_call"})
TOOL_RESULTS = frozenset({"tool_call_response", "tool_result", "function_call_output"})
THOUGHTS = frozenset({"reasoning", "thinking", "redacted_thinking"})
"""Types of parts in messages of OpenAI, OpenTelemetry and Anthropic. Thoughts are dropped: OpenAI's
fine-tuning format has no field for them."""


class OpenAIMessages(TypedDict):
    """A conversation in OpenAI's fine-tuning format."""

    messages: list[Message]
    """The prompt's messages, and the answer last."""
    tools: list[JsonObject] | None


@dataclass(frozen=True, slots=True)
class CallMessages:
    """Request and response of a call, as far as a span records them. Missing ones are empty."""

    prompt: list[Message]
    answers: list[Message]
    """One message per choice."""
    tools: list[JsonObject] | None
    is_captured: bool

    @property
    def completeness(self) -> tuple[bool, bool, bool]:
        """Sort key for spans of a call: has prompt and answer, is raylight's, has tools."""
        return bool(self.prompt and self.answers), self.is_captured, self.tools is not None


class TraceToMessages(TraceAdapter[list[OpenAIMessages]]):
    """Adapter to one conversation per model call: the prompt and its (first) answer, in order of the spans.

    Several spans may record one call (`call_key_of`). The first one with both prompt and answer is used,
    preferably raylight's, which has what the model got, or one with tools. Spans without messages are
    ignored.
    """

    def adapt(self, source: Sequence[Span], /) -> list[OpenAIMessages]:
        return [messages for _, messages in self.adapt_calls(source)]

    def adapt_calls(self, source: Sequence[Span]) -> list[tuple[str | None, OpenAIMessages]]:
        """Return the conversation of each call with the id of the captured call; None if no span has one."""
        children: dict[str, list[Span]] = defaultdict(list)
        for span in source:
            if span.parent_id:
                children[span.parent_id].append(span)
        calls: dict[str, CallMessages] = {}
        ids: dict[str, str] = {}
        for span in source:
            if span.attributes.get(OPERATION) in NON_CALL_OPERATIONS:
                continue
            call = read_call(span.attributes, children.get(span.span_id, ()))
            key = call_key_of(span.attributes) or span.span_id
            if isinstance(call_id := span.attributes.get(CALL_ID), str):
                ids[key] = call_id
            if (call.prompt or call.answers) and (
                key not in calls or call.completeness > calls[key].completeness
            ):
                calls[key] = call
        return [
            (ids.get(key), OpenAIMessages(messages=call.prompt + call.answers[:1], tools=call.tools))
            for key, call in calls.items()
        ]


def read_call(attributes: Mapping[str, object], children: Sequence[Span] = ()) -> CallMessages:
    """Read the messages of a call's span.

    Args:
        attributes: attributes of the span.
        children: child spans. AgentOps records the tool calls of an answer there.
    """
    prompts, answer_lists, choices = _recorded(attributes, unflatten_list)
    tools = _first(
        attributes.get(TOOL_DEFINITIONS),
        *(unflatten_list(attributes, prefix) for prefix in TOOL_LISTS),
        raw_field(attributes, "tools"),
        unflatten_list(attributes, f"{WEAVE_INPUT}.tools") if choices else None,
    )
    asked = openai_messages(_first(*prompts), "user")
    answered = openai_messages(_first(*answer_lists), "assistant")
    system = _contents(_list(attributes.get(SYSTEM_INSTRUCTIONS)))
    if system and not any(message["role"] == "system" for message in asked):
        asked.insert(0, {"role": "system", "content": system})
    if (
        answered
        and "tool_calls" not in answered[0]
        and (calls := _tool_calls([_tool_span(span) for span in children]))
    ):
        answered[0] = answered[0] | {"tool_calls": calls}
    converted = [_tool(tool) for tool in tools if isinstance(tool, dict)]
    return CallMessages(asked, answered, converted or None, DIALECT in attributes)


def recorded_messages(attributes: Mapping[str, object]) -> tuple[object, object]:
    """Return the prompt and the answers of a call as its span records them, unflattened or parsed from JSON.

    Missing ones are None.
    """
    prompts, answers, _ = _recorded(attributes, unflatten)
    return next(filter(None, prompts), None), next(filter(None, answers), None)


def _recorded(
    attributes: Mapping[str, object], flat: Callable[[Mapping[str, Any], str], object]
) -> tuple[tuple[object, ...], tuple[object, ...], object]:
    """Return the prompt and the answers of a call in each convention, and Weave's choices.

    Args:
        flat: reads the attributes below a prefix.
    """
    choices = flat(attributes, f"{WEAVE_OUTPUT}.choices")
    prompts = (
        parse_literal(attributes.get(INPUT_MESSAGES)),
        flat(attributes, "gen_ai.prompt"),
        raw_field(attributes, "messages"),
        flat(attributes, f"{WEAVE_INPUT}.messages") if choices else None,
    )
    answers = (
        parse_literal(attributes.get(OUTPUT_MESSAGES)),
        flat(attributes, "gen_ai.completion"),
        raw_field(attributes, "choices"),
        choices,
    )
    return prompts, answers, choices


def image_urls(messages: Sequence[Message]) -> list[str]:
    """Return the URLs of the images in messages, in order of appearance."""
    parts = [
        part for message in messages if isinstance(message["content"], list) for part in message["content"]
    ]
    images = [
        part.get("image_url") for part in parts if isinstance(part, dict) and part.get("type") == "image_url"
    ]
    urls = [image.get("url") if isinstance(image, dict) else image for image in images]
    return [url for url in urls if isinstance(url, str)]


def openai_messages(recorded: Sequence[object], role: str) -> list[Message]:
    """Convert messages of OpenAI, OpenTelemetry or Anthropic to the shape of OpenAI's chat messages.

    Args:
        recorded: the messages, as objects or as JSON text.
        role: role of a message that has none, and from whose fields none follows.
    """
    messages: list[Message] = []
    for entry in map(parse_literal, recorded):
        if isinstance(entry, dict) and isinstance(entry.get("message"), dict):
            entry = entry["message"]  # a choice
        if isinstance(entry, str):
            messages.append({"role": role, "content": entry})
        elif isinstance(entry, dict):
            converted = _message(entry, role)
            if entry.get("type") == "function_call" and messages and messages[-1]["role"] == "assistant":
                # the responses API lists calls as separate items after the message that they belong to
                calls = [call for message in converted for call in message.get("tool_calls", [])]
                messages[-1]["tool_calls"] = messages[-1].get("tool_calls", []) + calls
            else:
                messages += converted
    return messages


def _message(entry: JsonObject, role: str) -> list[Message]:
    """Convert one entry to messages. Each tool result becomes a separate message."""
    kind = entry.get("type")
    if kind in ("function_call", "function_call_output"):  # items of the responses API
        entry = {"role": "assistant" if kind == "function_call" else "tool", "content": [entry]}
    elif kind == "reasoning":
        return []
    content = entry["parts"] if "parts" in entry else entry.get("content", entry.get("text"))
    parts = _parts(content, entry.get("role") or role)
    if parts is not None:
        content = _contents(parts)
    calls = _tool_calls(
        _list(entry.get("tool_calls")) + [part for part in parts or () if part["type"] in TOOL_CALLS]
    )
    messages = [_tool_message(part) for part in parts or () if part["type"] in TOOL_RESULTS]
    if content is not None or calls or not messages:
        messages.append(_build_message(entry, role, content, calls))
    return messages


def _parts(content: object, role: str) -> list[JsonObject] | None:
    """Return the parts of a message's content; None if it is plain text.

    Flattened attributes hold parts as JSON. The answer of an assistant or a tool may itself be a JSON list,
    so it stays text.
    """
    if isinstance(content, str) and role not in ("user", "system", "developer"):
        return None
    parts = parse_literal(content)
    if not isinstance(parts, list) or not all(isinstance(part, dict) and "type" in part for part in parts):
        return None
    return parts if not isinstance(content, str) or all(part["type"] in CONTENTS for part in parts) else None


def _build_message(entry: JsonObject, role: str, content: object, calls: list[JsonObject]) -> Message:
    inferred = "assistant" if calls else "tool" if entry.get("tool_call_id") else role
    message: Message = {"role": entry.get("role") or inferred, "content": content}
    if content is None and message["role"] != "assistant":
        message["content"] = ""
    if calls:
        message["tool_calls"] = calls
    return message | {key: entry[key] for key in ("name", "tool_call_id") if isinstance(entry.get(key), str)}


def _contents(parts: list[Any]) -> object:
    """Return content in OpenAI's shape: text, or a list of parts if there are others; None if empty."""
    others = TOOL_CALLS | TOOL_RESULTS | THOUGHTS
    contents = [
        _content(part) for part in parts if not (isinstance(part, dict) and part.get("type") in others)
    ]
    if len(contents) == 1 and contents[0].get("type") == "text":
        return contents[0]["text"]
    return contents or None


def _content(part: object) -> JsonObject:
    if not isinstance(part, dict):
        return {"type": "text", "text": str(part)}
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text"):
        return {"type": "text", "text": part.get("content", part.get("text", ""))}
    if (url := _image_url(part)) is not None:
        return {"type": "image_url", "image_url": {"url": url}}
    return part


def _image_url(part: JsonObject) -> object:
    """Return the URL of an image in the shape of OpenAI's responses, Anthropic or OpenTelemetry; None for
    another part, and for an image that the span names without its content."""
    kind, source = part.get("type"), part.get("source")
    if kind == "input_image":
        return part.get("image_url")
    if kind == "image" and isinstance(source, dict):
        return source.get("url") or _data_url(source.get("media_type"), source.get("data"))
    if part.get("modality") == "image":
        return part.get("uri") or _data_url(part.get("mime_type"), part.get("content"))
    return None


def _data_url(media_type: object, data: object) -> str | None:
    return f"data:{media_type};base64,{data}" if data else None


def _tool_calls(recorded: list[Any]) -> list[JsonObject]:
    """Convert tool calls to OpenAI's shape, also those with name and arguments on the top level."""
    calls = []
    for call in recorded:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not function.get("name"):
            continue
        arguments = function.get("arguments", function.get("input", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        called = {"name": function["name"], "arguments": text}
        calls.append(
            {"id": call.get("call_id") or call.get("id") or "", "type": "function", "function": called}
        )
    return calls


def _tool_message(part: JsonObject) -> Message:
    """Convert a tool result to a message with its text, its content parts, or its JSON."""
    result = next(
        (part[key] for key in ("response", "result", "content", "output") if part.get(key) is not None), ""
    )
    if isinstance(result, list) and all(
        isinstance(block, dict) and block.get("type") in CONTENTS for block in result
    ):
        result = _contents(result) or ""
    elif not isinstance(result, str):
        result = json.dumps(result, ensure_ascii=False)
    call_id = next((part[key] for key in ("tool_use_id", "call_id", "id") if part.get(key)), "")
    return {"role": "tool", "content": result, "tool_call_id": call_id}


def _tool_span(span: Span) -> JsonObject:
    """Read a tool call from AgentOps' span: `tool.name`, `tool.parameters`, `tool.call.id`."""
    attributes = span.attributes
    arguments = attributes.get("tool.parameters", "{}")
    return {"id": attributes.get("tool.call.id"), "name": attributes.get("tool.name"), "arguments": arguments}


def _tool(tool: JsonObject) -> JsonObject:
    """Convert a tool to OpenAI's shape. Tools that are not functions stay unchanged."""
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not function.get("name"):
        return tool
    parameters = function.get("parameters", function.get("input_schema", {}))
    extra = {"strict": function["strict"]} if "strict" in function else {}
    definition = {
        "name": function["name"],
        "description": function.get("description", ""),
        "parameters": parse_literal(parameters),
    }
    return {"type": "function", "function": definition | extra}


def _first(*candidates: object) -> list[object]:
    return next((entries for candidate in candidates if (entries := _list(candidate))), [])


def _list(value: object) -> list[object]:
    """Return a list from a list, from its JSON text, or from its only entry."""
    entries = parse_literal(value)
    if isinstance(entries, list):
        return entries
    return [entries] if isinstance(entries, dict) or (isinstance(entries, str) and entries) else []
