"""Messages of model calls, as OpenAI's fine-tuning format has them, whatever convention the span was written
in."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from raylight.semconv import INPUT_MESSAGES, OUTPUT_MESSAGES, TOOL_DEFINITIONS
from raylight.traces.adapters import TraceAdapter
from raylight.traces.attributes import (
    WEAVE_INPUT,
    WEAVE_OUTPUT,
    call_key_of,
    parse_literal,
    raw_field,
    unflatten_list,
)
from raylight.types import Span

Message: TypeAlias = dict[str, Any]
"""A chat message in OpenAI's shape: `role` and `content`, with `tool_calls`, `tool_call_id`, `name` where it
has them."""

SYSTEM_INSTRUCTIONS = "gen_ai.system_instructions"
OPERATION = "gen_ai.operation.name"
NON_CALL_OPERATIONS = frozenset(
    {"create_agent", "invoke_agent", "invoke_workflow", "execute_tool", "embeddings", "retrieval"}
)
"""Operations whose spans may carry messages without being a call to a model."""
TOOL_LISTS = ("gen_ai.request.functions", "gen_ai.request.tools", "llm.request.functions")

CONTENTS = frozenset({"text", "image_url", "input_text", "input_image", "input_audio", "file"})
TOOL_CALLS = frozenset({"tool_call", "tool_use", "function_call"})
TOOL_RESULTS = frozenset({"tool_call_response", "tool_result", "function_call_output"})
THOUGHTS = frozenset({"reasoning", "thinking", "redacted_thinking"})
"""Types of parts in OpenAI's, OpenTelemetry's and Anthropic's messages. OpenAI's fine-tuning format has no
place for thoughts."""


class OpenAIMessages(TypedDict):
    """One conversation to fine-tune on."""

    messages: list[Message]
    """What the model was given, and its answer last."""
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class CallMessages:
    """What a span tells of a call's request and response. Empty where it tells nothing."""

    prompt: list[Message]
    answers: list[Message]
    """One per choice."""
    tools: list[dict[str, Any]] | None

    @property
    def told(self) -> tuple[bool, bool]:
        """How much the span tells, for comparing: whether both prompt and answer, then whether the tools."""
        return bool(self.prompt and self.answers), self.tools is not None


class TraceToMessages(TraceAdapter[list[OpenAIMessages]]):
    """One conversation per call to a model, in the order of the spans: the prompt, and the (first) answer to
    it.

    Several spans may tell of one call (`call_key_of`); the first one that has both prompt and answer is
    taken, rather one with tools. Spans without messages are left out.
    """

    def adapt(self, source: Sequence[Span], /) -> list[OpenAIMessages]:
        below: dict[str, list[Span]] = defaultdict(list)
        for span in source:
            if span.parent_id:
                below[span.parent_id].append(span)
        calls: dict[str, CallMessages] = {}
        for span in source:
            if span.attributes.get(OPERATION) in NON_CALL_OPERATIONS:
                continue
            call = read_call(span.attributes, below.get(span.span_id, ()))
            key = call_key_of(span.attributes) or span.span_id
            if (call.prompt or call.answers) and (key not in calls or call.told > calls[key].told):
                calls[key] = call
        return [
            OpenAIMessages(messages=call.prompt + call.answers[:1], tools=call.tools)
            for call in calls.values()
        ]


def read_call(attributes: Mapping[str, Any], below: Sequence[Span] = ()) -> CallMessages:
    """Messages of a call's span.

    Args:
        attributes: the span's.
        below: spans whose parent it is; AgentOps puts the tool calls of an answer there.
    """
    choices = unflatten_list(attributes, f"{WEAVE_OUTPUT}.choices")
    prompt = _first(
        attributes.get(INPUT_MESSAGES),
        unflatten_list(attributes, "gen_ai.prompt"),
        raw_field(attributes, "messages"),
        unflatten_list(attributes, f"{WEAVE_INPUT}.messages") if choices else None,
    )
    answers = _first(
        attributes.get(OUTPUT_MESSAGES),
        unflatten_list(attributes, "gen_ai.completion"),
        raw_field(attributes, "choices"),
        choices,
    )
    tools = _first(
        attributes.get(TOOL_DEFINITIONS),
        *(unflatten_list(attributes, prefix) for prefix in TOOL_LISTS),
        raw_field(attributes, "tools"),
        unflatten_list(attributes, f"{WEAVE_INPUT}.tools") if choices else None,
    )
    asked, answered = openai_messages(prompt, "user"), openai_messages(answers, "assistant")
    system = _contents(_list(attributes.get(SYSTEM_INSTRUCTIONS)))
    if system and not any(message["role"] == "system" for message in asked):
        asked.insert(0, {"role": "system", "content": system})
    if (
        answered
        and "tool_calls" not in answered[0]
        and (calls := _tool_calls([_tool_span(span) for span in below]))
    ):
        answered[0] = answered[0] | {"tool_calls": calls}
    return CallMessages(asked, answered, [_tool(tool) for tool in tools if isinstance(tool, dict)] or None)


def image_urls(messages: Sequence[Message]) -> list[str]:
    """Addresses of the images in messages, in order of appearance."""
    parts = [
        part for message in messages if isinstance(message["content"], list) for part in message["content"]
    ]
    images = [
        part.get("image_url") for part in parts if isinstance(part, dict) and part.get("type") == "image_url"
    ]
    urls = [image.get("url") if isinstance(image, dict) else image for image in images]
    return [url for url in urls if isinstance(url, str)]


def openai_messages(recorded: Sequence[Any], role: str) -> list[Message]:
    """Messages in OpenAI's shape from those of OpenAI (chat, choices, responses), OpenTelemetry (parts) or
    Anthropic (blocks).

    Args:
        role: of a message that has none and shows none.
    """
    messages: list[Message] = []
    for entry in map(parse_literal, recorded):
        if isinstance(entry, dict) and isinstance(entry.get("message"), dict):
            entry = entry["message"]  # a choice
        if isinstance(entry, str):
            messages.append({"role": role, "content": entry})
        elif isinstance(entry, dict):
            made = _message(entry, role)
            if entry.get("type") == "function_call" and messages and messages[-1]["role"] == "assistant":
                # the responses API has calls as items beside the message that they are part of
                calls = [call for message in made for call in message.get("tool_calls", [])]
                messages[-1]["tool_calls"] = messages[-1].get("tool_calls", []) + calls
            else:
                messages += made
    return messages


def _message(entry: dict[str, Any], role: str) -> list[Message]:
    """The messages that an entry stands for: results of tools are messages of their own."""
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
        messages.append(_plain(entry, role, content, calls))
    return messages


def _parts(content: Any, role: str) -> list[dict[str, Any]] | None:
    """The parts that a content consists of; None if it is plain text.

    Flattened attributes hold parts as JSON. What an assistant or a tool said may well be a list in JSON, so
    it stays text.
    """
    if isinstance(content, str) and role not in ("user", "system", "developer"):
        return None
    parts = parse_literal(content)
    if not isinstance(parts, list) or not all(isinstance(part, dict) and "type" in part for part in parts):
        return None
    return parts if not isinstance(content, str) or all(part["type"] in CONTENTS for part in parts) else None


def _plain(entry: dict[str, Any], role: str, content: Any, calls: list[dict[str, Any]]) -> Message:
    shown = "assistant" if calls else "tool" if entry.get("tool_call_id") else role
    message: Message = {"role": entry.get("role") or shown, "content": content}
    if content is None and message["role"] != "assistant":
        message["content"] = ""
    if calls:
        message["tool_calls"] = calls
    return message | {key: entry[key] for key in ("name", "tool_call_id") if isinstance(entry.get(key), str)}


def _contents(parts: list[Any]) -> Any:
    """Content in OpenAI's shape: text, or a list of parts if there is more than text; None if there is
    nothing."""
    others = TOOL_CALLS | TOOL_RESULTS | THOUGHTS
    contents = [
        _content(part) for part in parts if not (isinstance(part, dict) and part.get("type") in others)
    ]
    if len(contents) == 1 and contents[0].get("type") == "text":
        return contents[0]["text"]
    return contents or None


def _content(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        return {"type": "text", "text": str(part)}
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text"):
        return {"type": "text", "text": part.get("content", part.get("text", ""))}
    if part.get("modality") == "image" and kind == "uri":
        return {"type": "image_url", "image_url": {"url": part.get("uri")}}
    if part.get("modality") == "image" and kind == "blob":
        return {
            "type": "image_url",
            "image_url": {"url": f"data:{part.get('mime_type')};base64,{part.get('content')}"},
        }
    return part


def _tool_calls(recorded: list[Any]) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's shape, from that or with name and arguments beside the id."""
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


def _tool_message(part: dict[str, Any]) -> Message:
    """The result of a tool: its text, its contents if it consists of such, or else its JSON."""
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


def _tool_span(span: Span) -> dict[str, Any]:
    """A tool call from AgentOps' span of it: `tool.name`, `tool.parameters`, `tool.call.id`."""
    attributes = span.attributes
    arguments = attributes.get("tool.parameters", "{}")
    return {"id": attributes.get("tool.call.id"), "name": attributes.get("tool.name"), "arguments": arguments}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's shape; tools that are no functions stay as they are."""
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not function.get("name"):
        return tool
    given = function.get("parameters", function.get("input_schema", {}))
    extra = {"strict": function["strict"]} if "strict" in function else {}
    described = {
        "name": function["name"],
        "description": function.get("description", ""),
        "parameters": parse_literal(given),
    }
    return {"type": "function", "function": described | extra}


def _first(*candidates: Any) -> list[Any]:
    return next((found for candidate in candidates if (found := _list(candidate))), [])


def _list(value: Any) -> list[Any]:
    """A list from a list, its text, or its only entry."""
    found = parse_literal(value)
    if isinstance(found, list):
        return found
    return [found] if isinstance(found, dict) or (isinstance(found, str) and found) else []
