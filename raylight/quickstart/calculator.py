"""The quickstart's agent with a tool: the model calls `add`, reads the result, and answers with it."""

from __future__ import annotations

import json
from typing import Any

import raylight as rl
from raylight.quickstart.additions import is_right

MAX_CALLS = 3
"""Model calls of one rollout."""
SAMPLING = {"temperature": 1.0, "max_tokens": 64}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@rl.rollout
async def calculator(task: dict, llm: rl.LLM) -> float:
    """Ask for a + b with the tool `add`; return reward 1 for the right answer and 0 otherwise."""
    client = llm.client()
    messages: list[Any] = [{"role": "user", "content": f"What is {task['a']} + {task['b']}?"}]
    for _ in range(MAX_CALLS):
        reply = await client.chat.completions.create(
            model=llm.model, messages=messages, tools=[ADD], **SAMPLING | llm.sampling_parameters
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return 1.0 if is_right(task, message.content or "") else 0.0
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run_tool(call)})
    return 0.0


def run_tool(call: Any) -> str:
    """Execute a tool call of the model; return its result, or the error that the model reads."""
    try:
        arguments = json.loads(call.function.arguments)
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!r}"
