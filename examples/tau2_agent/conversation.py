"""Conversation of user, assistant and tools, until the user is done or the assistant has no steps left."""

from __future__ import annotations

import json
from typing import Any

from openai import BadRequestError
from openai.types.chat import ChatCompletionMessage

import raylight as rl
from examples.tau2_agent.domain import Case, ToolError, Transcript
from examples.tau2_agent.users import User

TOO_LONG = ("context_length_exceeded", "maximum context length", "this model takes at most")
"""Parts of the messages with which OpenAI, vLLM and raylight's engine reject a prompt that is too long."""


class Assistant:
    """A model with a policy and tools.

    Args:
        llm: the model, with the assistant's agent name.
        max_tokens: maximum length of one response, unless the model's sampling parameters set it.
    """

    def __init__(self, llm: rl.LLM, max_tokens: int) -> None:
        self._model = llm.model
        self._client = llm.client()
        self._sampling = {"max_tokens": max_tokens} | llm.sampling_parameters

    async def step(self, messages: list[Any], tools: list[Any]) -> ChatCompletionMessage:
        """Return the model's next message: tool calls, or text for the user."""
        reply = await self._client.chat.completions.create(
            model=self._model, messages=messages, tools=tools, **self._sampling
        )
        return reply.choices[0].message


async def converse(case: Case, assistant: Assistant, user: User, max_steps: int) -> Transcript:
    """Hold the conversation about a case, and execute its tool calls.

    A full context of the assistant ends the conversation, without an error.

    Raises:
        openai.OpenAIError: a model cannot be called.
    """
    transcript = Transcript()
    transcript.messages = [
        {"role": "system", "content": case.policy},
        {"role": "user", "content": await user.open()},
    ]
    while not transcript.ending:
        if transcript.steps == max_steps:
            transcript.ending = "steps"
            break
        try:
            message = await assistant.step(transcript.messages, case.tools)
        except BadRequestError as error:
            if transcript.steps == 0 or not any(words in str(error) for words in TOO_LONG):
                raise
            transcript.ending = "room"
            break
        transcript.steps += 1
        if message.tool_calls:
            use_tools(case, message, transcript)
        else:
            transcript.messages.append({"role": "assistant"} | message.model_dump(exclude_none=True))
            transcript.messages[-1].setdefault("content", "")
            answer = await user.answer(message.content or "")
            if answer is None:
                transcript.ending = "user"
            else:
                transcript.messages.append({"role": "user", "content": answer})
    return transcript


def use_tools(case: Case, message: ChatCompletionMessage, transcript: Transcript) -> None:
    """Execute the tool calls of a message in order; errors are returned to the assistant."""
    turn = message.model_dump(exclude_none=True)
    transcript.messages.append(turn)
    for call in turn["tool_calls"]:
        function = call.get("function") or {"name": call["type"], "arguments": "{}"}
        try:
            result = case.call(function["name"], _arguments(function))
        except ToolError as error:
            transcript.tool_errors += 1
            result = f"Error: {error}"
        transcript.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    """Parse the arguments of a call.

    Malformed ones are replaced by an empty object, because engines reject a history with them.

    Raises:
        ToolError: the arguments are not a JSON object.
    """
    given = function["arguments"] = function["arguments"] or "{}"
    try:
        arguments = json.loads(given)
        problem = None if isinstance(arguments, dict) else f"a JSON {type(arguments).__name__}"
    except (json.JSONDecodeError, RecursionError) as error:
        problem = f"no JSON ({error})"
    if problem is None:
        return arguments
    function["arguments"] = "{}"
    raise ToolError(
        f"the arguments of {function['name']} must be a JSON object; yours are {problem}: {given:.200}"
    )
