"""The agent in four client libraries, each with a function `solve(question, llm, settings)`; only the chosen
one is imported."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable

import raylight as rl
from examples.math_agent.config import MathSettings

Solve = Callable[[str, rl.LLM, MathSettings], Awaitable[str]]
"""Let the model solve a question with the calculator; returns its last text.

Returns "" if the model still calls tools after `settings.max_turns` calls. Errors are raised.
"""

CLIENTS = {
    "openai": "examples.math_agent.clients.openai_sdk",
    "agent_framework": "examples.math_agent.clients.agent_framework_sdk",
    "langgraph": "examples.math_agent.clients.langgraph_sdk",
    "agents": "examples.math_agent.clients.agents_sdk",
}
PACKAGES = {
    "openai": "openai mcp",
    "agent_framework": "agent-framework-core agent-framework-openai mcp",
    "langgraph": "langgraph langchain-openai mcp",
    "agents": "openai-agents mcp",
}


def find_client(name: str) -> Solve:
    """Return the `solve` function of a client library.

    Raises:
        rl.errors.ConfigError: the client is unknown, or its library is not installed.
    """
    if name not in CLIENTS:
        raise rl.errors.ConfigError(f"unknown client {name!r}; choose one of {', '.join(CLIENTS)}")
    try:
        return importlib.import_module(CLIENTS[name]).solve
    except ModuleNotFoundError as error:
        raise rl.errors.ConfigError(
            f"the client {name!r} needs {error.name}: pip install {PACKAGES[name]}"
        ) from error
