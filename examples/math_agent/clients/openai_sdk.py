"""The agent with the plain OpenAI SDK: a loop over tool calls."""

from __future__ import annotations

import json
from typing import Any

from openai.types.chat import ChatCompletionMessageToolCallUnion

import raylight as rl
from examples.math_agent.calculator import Calculator, calculator
from examples.math_agent.config import MathSettings
from examples.math_agent.prompts import instructions


async def solve(question: str, llm: rl.LLM, settings: MathSettings) -> str:
    """See `examples.math_agent.clients.Solve`."""
    messages: list[Any] = [
        {"role": "system", "content": instructions(settings.extractor)},
        {"role": "user", "content": question},
    ]
    async with calculator(settings.command) as tools:
        client = llm.client()
        schemas: list[Any] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in tools.tools
        ]
        for _ in range(settings.max_turns):
            reply = await client.chat.completions.create(
                model=llm.model, messages=messages, tools=schemas, **llm.sampling_parameters
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            messages.extend([await _tool_message(call, tools) for call in message.tool_calls])
    return ""


async def _tool_message(call: ChatCompletionMessageToolCallUnion, tools: Calculator) -> dict[str, Any]:
    """Return the tool message for a call; malformed arguments are reported to the model."""
    if call.type != "function":
        result = f"error: there is no tool of type {call.type!r}"
    else:
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except ValueError as error:
            result = f"error: the arguments are not JSON: {error}"
        else:
            if isinstance(arguments, dict):
                result = await tools.call(call.function.name, arguments)
            else:
                result = "error: the arguments are not a JSON object"
    return {"role": "tool", "tool_call_id": call.id, "content": result}
