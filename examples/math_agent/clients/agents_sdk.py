"""The agent with the OpenAI Agents SDK, which includes an MCP client."""

from __future__ import annotations

from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from agents.mcp import MCPServerStdio

import raylight as rl
from examples.math_agent.calculator import CALL_S, is_lost, shared
from examples.math_agent.config import MathSettings
from examples.math_agent.prompts import instructions

QUIET = RunConfig(tracing_disabled=True)
"""Run config that keeps the SDK from sending its traces to OpenAI."""


async def solve(question: str, llm: rl.LLM, settings: MathSettings) -> str:
    """See `examples.math_agent.clients.Solve`."""
    async with shared("agents", settings.command, lambda: _server(settings.command)) as server:
        agent = Agent(
            name="calculator",
            instructions=instructions(settings.extractor),
            model=OpenAIChatCompletionsModel(model=llm.model, openai_client=llm.client()),
            model_settings=ModelSettings(**llm.sampling_parameters),
            mcp_servers=[server],
        )
        try:
            done = await Runner.run(agent, question, max_turns=settings.max_turns, run_config=QUIET)
        except (MaxTurnsExceeded, ModelBehaviorError):  # the latter: the model called an unknown tool
            return ""
    return str(done.final_output)


def _server(command: tuple[str, ...]) -> MCPServerStdio:
    return MCPServerStdio(
        params={"command": command[0], "args": list(command[1:])},
        cache_tools_list=True,
        client_session_timeout_seconds=CALL_S,
        failure_error_function=_tell_model,
    )


def _tell_model(context: Any, error: Exception) -> str:
    """Return the error of a failed call as text for the model; raise it if the server is lost."""
    if is_lost(error):
        raise error
    return f"error: {error}"
