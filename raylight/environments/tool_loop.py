"""The tool loop: the model is called until it answers without tools, and reads the results of its calls."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from raylight._utils.aio import task_group
from raylight._utils.printable import encodable
from raylight.agent.operations import operation
from raylight.agent.resources import LLM
from raylight.types import JsonObject

MAX_RESULT = 32_768
"""Characters of a tool's result that the model receives; the rest is cut off."""
SAMPLING = {"temperature": 1.0, "max_tokens": 512}
"""Sampling parameters of a model call, unless the caller or the Trainer gives others."""
CONTEXT_LENGTH = "context_length_exceeded"
"""Code of the error of a conversation that is longer than the model's context."""


class Tools(Protocol):
    """Tools that a model may call in one rollout."""

    @property
    def schemas(self) -> list[JsonObject]:
        """The tools in OpenAI's form; empty for none."""
        ...

    async def answer(self, message: object) -> list[JsonObject]:
        """Execute the tool calls of an assistant message; return a tool message for each, in order."""
        ...


@dataclass(frozen=True)
class ToolLoopEnd:
    """End of a tool loop."""

    messages: list[JsonObject]
    """The whole conversation, in OpenAI's form."""
    turns: int
    """Model calls that were answered."""
    reason: Literal["answer", "max_turns", "context"]
    """`answer`: the model answered without a tool call. `max_turns`: the last turn called tools too.
    `context`: the conversation became longer than the model's context."""


async def run_tool_loop(
    llm: LLM,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools,
    *,
    max_turns: int = 10,
    sampling: Mapping[str, object] | None = None,
) -> ToolLoopEnd:
    """Call the model until it answers without a tool call; execute the calls of each answer.

    The calls of the last turn are executed too, because they change the environment whose reward counts.

    Args:
        messages: the conversation so far, in OpenAI's form.
        max_turns: model calls at most.
        sampling: sampling parameters that replace `SAMPLING`. The model resource's parameters precede.

    Raises:
        openai.APIError: the model's endpoint rejected or failed a request.
    """
    conversation: list[JsonObject] = [dict(message) for message in messages]
    for turn in range(max_turns):
        message = await next_message(llm, conversation, sampling, tools.schemas)
        if message is None:
            return ToolLoopEnd(conversation, turn, "context")
        conversation.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return ToolLoopEnd(conversation, turn + 1, "answer")
        conversation += await tools.answer(message)
    return ToolLoopEnd(conversation, max_turns, "max_turns")


async def next_message(
    llm: LLM,
    conversation: list[JsonObject],
    sampling: Mapping[str, object] | None = None,
    schemas: list[JsonObject] | None = None,
) -> Any:
    """Return the model's next message; None if the conversation has become longer than the model's context.

    Args:
        sampling: sampling parameters that replace `SAMPLING`. The model resource's parameters precede.
        schemas: tools in OpenAI's form.

    Raises:
        openai.APIError: the model's endpoint rejected or failed a request, or the first one was too long.
    """
    from openai import BadRequestError

    parameters: JsonObject = {**SAMPLING, **(sampling or {}), **llm.sampling_parameters}
    if schemas:
        parameters["tools"] = schemas
    said: Any = conversation
    try:
        reply = await llm.client().chat.completions.create(model=llm.model, messages=said, **parameters)
    except BadRequestError as error:
        if error.code == CONTEXT_LENGTH and any(part["role"] == "assistant" for part in conversation):
            return None
        raise
    return reply.choices[0].message


async def answer_calls(
    message: Any,
    call: Callable[[str, str], Awaitable[str | list[Any]]],
    is_second: Callable[[str], bool] = lambda name: False,
) -> list[JsonObject]:
    """Execute the tool calls of an assistant message, all at once; return the tool messages in order.

    Args:
        message: the message of OpenAI's client.
        call: receives the name of a tool and the arguments as the model wrote them; it returns the content
            of the tool message.
        is_second: True for the names of tools that run after all others have ended.
    """

    async def answer(requested: Any) -> JsonObject:
        if requested.type != "function":
            kind = f"{requested.type!r:.40}"
            content: object = f"error: a tool call of type {kind} is not supported; call a function"
        else:
            content = await call(requested.function.name, requested.function.arguments)
        return {"role": "tool", "tool_call_id": requested.id, "content": content}

    calls = list(message.tool_calls or ())
    answers: dict[int, Any] = {}
    for second in (False, True):
        async with task_group() as group:
            for index, requested in enumerate(calls):
                if second == (requested.type == "function" and is_second(requested.function.name)):
                    answers[index] = group.create_task(answer(requested))
    return [answers[index].result() for index in range(len(calls))]


async def call_tool(
    tools: Collection[str],
    name: str,
    arguments: str | Mapping[str, object],
    execute: Callable[[JsonObject], Awaitable[str | list[object]]],
    max_result: int = MAX_RESULT,
) -> str | list[object]:
    """Execute a tool call as a span; return its result, or the model's mistake as text for the model.

    Args:
        tools: names of all tools.
        name: name that the model called.
        arguments: the arguments, or their JSON, as the model wrote it.
        execute: receives the arguments and returns the result as text or content parts.
        max_result: characters of a text that the model receives.
    """
    if name not in tools:
        known = ", ".join(sorted(tools)) or "none"
        return cut_result(f"error: there is no tool {name!r}; the tools are: {known}", max_result)
    try:
        given = parse_arguments(arguments)
    except ValueError as error:
        return cut_result(f"error: {error}", max_result)
    with operation(name=name) as op:
        op.set_input(arguments=given)
        result = await execute(given)
        content = cut_result(result, max_result) if isinstance(result, str) else encodable(result)
        op.set_output(content)
    return content


def parse_arguments(arguments: str | Mapping[str, object]) -> JsonObject:
    """Return the arguments of a tool call as a dict.

    Args:
        arguments: the arguments, or their JSON, as a model wrote it; nothing for none.

    Raises:
        ValueError: they are not a JSON object; the message is meant for the model.
    """
    try:
        given = encodable(json.loads(arguments or "{}") if isinstance(arguments, str) else arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("the arguments are not a JSON object")
    return given


def cut_result(text: str, limit: int = MAX_RESULT) -> str:
    """Return a tool's result, of which the model receives at most `limit` characters."""
    text = encodable(text)
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[cut: {len(text)} characters, {limit} shown]"
