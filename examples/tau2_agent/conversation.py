"""The conversation: user, assistant, and the tools between them, until the user is done or the assistant has no steps left."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletionMessage

import raylight as rl
from examples.tau2_agent.domain import Case, ToolError, Transcript
from examples.tau2_agent.users import User

TOO_LONG = ("context_length_exceeded", "maximum context length", "this model takes at most")
"""How OpenAI, vLLM and raylight's own engine say that a prompt does not fit."""


class Assistant:
    """A model with a policy and tools.

    Args:
        llm: the model, under the name of the assistant as an agent.
        max_tokens: of one answer, unless the model's sampling parameters say otherwise.
    """

    def __init__(self, llm: rl.LLM, client: AsyncOpenAI, max_tokens: int) -> None:
        self._model = llm.model
        self._client = client.with_options(base_url=llm.endpoint, api_key=llm.api_key or "unused")
        self._sampling = {"max_tokens": max_tokens} | llm.sampling_parameters

    async def step(self, messages: list[Any], tools: list[Any]) -> ChatCompletionMessage:
        """The model's next message: tool calls, or words for the user."""
        reply = await self._client.chat.completions.create(
            model=self._model, messages=messages, tools=tools, **self._sampling
        )
        return reply.choices[0].message


async def converse(case: Case, assistant: Assistant, user: User, max_steps: int) -> Transcript:
    """Have the two talk about a case, in which the tool calls are carried out.

    Raises:
        openai.OpenAIError: a model cannot be called. That the assistant's context is full is no error, but ends the conversation.
    """
    so_far = Transcript()
    so_far.messages = [
        {"role": "system", "content": case.policy},
        {"role": "user", "content": await user.open()},
    ]
    while not so_far.ending:
        if so_far.steps == max_steps:
            so_far.ending = "steps"
            break
        try:
            message = await assistant.step(so_far.messages, case.tools)
        except BadRequestError as error:
            if so_far.steps == 0 or not any(words in str(error) for words in TOO_LONG):
                raise
            so_far.ending = "room"
            break
        so_far.steps += 1
        if message.tool_calls:
            use_tools(case, message, so_far)
        else:
            so_far.messages.append({"role": "assistant"} | message.model_dump(exclude_none=True))
            so_far.messages[-1].setdefault("content", "")
            answer = await user.answer(message.content or "")
            if answer is None:
                so_far.ending = "user"
            else:
                so_far.messages.append({"role": "user", "content": answer})
    return so_far


def use_tools(case: Case, message: ChatCompletionMessage, so_far: Transcript) -> None:
    """Carry the tool calls of a message out, one after the other; what goes wrong with one is told to the assistant."""
    turn = message.model_dump(exclude_none=True)
    so_far.messages.append(turn)
    for call in turn["tool_calls"]:
        function = call.get("function") or {"name": call["type"], "arguments": "{}"}
        try:
            told = case.call(function["name"], _arguments(function))
        except ToolError as error:
            so_far.tool_errors += 1
            told = f"Error: {error}"
        so_far.messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call. Others than a JSON object are replaced by an empty one: engines refuse a history that has them.

    Raises:
        ToolError: they are no JSON object.
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
