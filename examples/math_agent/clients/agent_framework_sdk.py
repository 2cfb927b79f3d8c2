"""The agent with Microsoft's agent-framework, which includes an MCP client.

Its `chat` spans have the ids of the responses that raylight captured, which connects both records of a call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from agent_framework import (
    Agent,
    ChatOptions,
    FunctionInvocationContext,
    MCPStdioTool,
    MiddlewareFailure,
    function_middleware,
)
from agent_framework.exceptions import ToolExecutionException
from agent_framework_openai import OpenAIChatCompletionClient

import raylight as rl
from examples.math_agent.calculator import CALL_S, is_lost, shared
from examples.math_agent.config import MathSettings
from examples.math_agent.prompts import instructions


async def solve(question: str, llm: rl.LLM, settings: MathSettings) -> str:
    """See `examples.math_agent.clients.Solve`."""
    async with shared("agent_framework", settings.command, lambda: _tool(settings.command)) as tool:
        client = OpenAIChatCompletionClient(model=llm.model, async_client=llm.client())
        before_last = max(settings.max_turns - 1, 1)  # the last call is made without tools
        client.function_invocation_configuration |= {
            "max_iterations": before_last,
            "include_detailed_errors": True,
        }
        agent = Agent(
            client=client,
            name="calculator",
            instructions=instructions(settings.extractor),
            tools=[tool],
            default_options=cast(ChatOptions, dict(llm.sampling_parameters)),
            middleware=[_give_up_without_server],
        )
        return (await agent.run(question)).text


def _tool(command: tuple[str, ...]) -> MCPStdioTool:
    return MCPStdioTool(
        "calculator",
        command[0],
        args=list(command[1:]),
        load_prompts=False,
        request_timeout=int(CALL_S),
        approval_mode="never_require",
    )


@function_middleware
async def _give_up_without_server(
    context: FunctionInvocationContext, call_next: Callable[[], Awaitable[None]]
) -> None:
    """End the run when the server is lost; agent-framework would report a failed call to the model and
    continue."""
    try:
        await call_next()
    except ToolExecutionException as error:
        if is_lost(error):
            raise MiddlewareFailure("the MCP server was lost") from error
        raise
