"""The agent: a model that designs flowsheets with the simulator's tools."""

from __future__ import annotations

import os
from typing import Any

import httpx2
from openai import AsyncOpenAI

import raylight as rl
from examples.process_agent.design_reward import ANSWER, grade
from examples.process_agent.flowsheet_tools import TIMEOUT_S, TOOLS, Toolbox
from examples.process_agent.flowsheets.local import URL_VARIABLE

MAX_CALLS = 20
"""Maximum number of tool calls in a rollout; after them the model has to answer."""
NONE_LEFT = '{"error": {"code": "no_calls_left", "message": "there are no tool calls left; answer now"}}'
SAMPLING: dict[str, Any] = {"max_tokens": 2048}
PROMPT = """You are a process engineer. You design flowsheets with a simulator and report numbers from it.

Use the names of units and streams that the task gives, and keep its feeds and property package as they \
are. You may make at most
{max_calls} tool calls.

When the design fulfils the task, end with a message that holds one JSON object and no tool call:
{{"run_id": "the simulation of the final design", "values": {{"each name that the task asks for": its \
number}}}}
"""
"""System prompt.

It leaves room for improvement: no order of the tools, no advice on how to search for a setting.
"""


@rl.rollout(
    system_prompt=rl.PromptTemplate(template=PROMPT),
    simulator=os.environ.get(URL_VARIABLE) or "http://127.0.0.1:8700",
)
async def design(
    task: dict, llm: rl.LLM, system_prompt: rl.PromptTemplate, simulator: str
) -> dict[str, float]:
    """Design a flowsheet; return the rewards of `design_reward.Grade.named`.

    Raises:
        SimulatorUnavailableError: the simulator did not respond. The rollout fails without a reward.
    """
    messages: list[Any] = [
        {"role": "system", "content": system_prompt.format(max_calls=MAX_CALLS)},
        {"role": "user", "content": task["text"]},
    ]
    async with httpx2.AsyncClient(base_url=simulator, timeout=TIMEOUT_S) as http:
        toolbox = Toolbox(http)
        text = await converse(llm.client(), llm, messages, toolbox)
    with rl.operation(name=ANSWER, kind=ANSWER) as op:
        op.set_output(text)
    return grade(task, [*toolbox.spans, op.span()]).named()


async def converse(client: AsyncOpenAI, llm: rl.LLM, messages: list[Any], toolbox: Toolbox) -> str:
    """Let the model call tools until it answers; returns its last text, or "" if it never stopped calling."""
    while True:
        choice: Any = "auto" if len(toolbox.spans) < MAX_CALLS else "none"
        reply = await client.chat.completions.create(
            model=llm.model,
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            **SAMPLING | llm.sampling_parameters,
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        if not message.tool_calls or choice == "none":
            return message.content or ""
        for call in message.tool_calls:  # possibly several
            left = len(toolbox.spans) < MAX_CALLS
            result = await toolbox.call(call.function.name, call.function.arguments) if left else NONE_LEFT
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
