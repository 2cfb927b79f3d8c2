"""OpenEnv environments as agents: the model plays an episode on an OpenEnv server."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from raylight.agent.decorators import rollout
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM
from raylight.environments.openenv_episode import Episode, EpisodeDoneError, Rewards
from raylight.environments.openenv_session import open_session
from raylight.environments.openenv_text import action_parser, is_tool_schema, observation_text
from raylight.environments.text_game import play_moves
from raylight.environments.tool_loop import run_tool_loop
from raylight.errors import ConfigError, DatasetError


def openenv_agent(
    url: str,
    *,
    prompt: Callable[[dict[str, Any]], str] | None = None,
    parse: Callable[[str], Mapping[str, Any]] | None = None,
    tools: bool | None = None,
    system: str | None = None,
    reward: Rewards = "sum",
    max_turns: int = 16,
    sampling: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    headers: Mapping[str, str] | None = None,
) -> LitAgent[Any]:
    """Return an agent that plays one episode of an OpenEnv environment for each task.

    A task is a dict of parameters for the environment's reset, such as `{"seed": 3}`. The model reads each
    observation as a user message, and its answer is the action, until the episode is done. In environments
    whose actions are calls of MCP tools, the model calls them as its own, until it answers without a call.

    Args:
        url: address of the server, such as "ws://127.0.0.1:8000".
        prompt: text of an observation (a dict) for the model. None: the value of its only field, or all
            fields as JSON.
        parse: action (a dict) from the model's answer. A ValueError's message is sent to the model, as a
            mistake. None: the value of the schema's only field, or JSON.
        tools: True if actions are calls of MCP tools. None: as the server's schema says.
        system: system prompt.
        reward: reward of the rollout: "sum" of the rewards of all steps, the "last" of them, or a function of
            the state that the server returns at the end.
        max_turns: largest number of model calls. The rewards until then count.
        sampling: parameters of model calls; those of the Trainer take precedence.
        timeout_s: seconds in which the server must answer each message.
        headers: HTTP headers for the connection, such as an authorization.

    Raises:
        ConfigError: an argument is of a wrong type.
    """
    base = re.sub(r"^ws", "http", url.rstrip("/").removesuffix("/ws")) if isinstance(url, str) else ""
    if not re.match(r"https?://[^/]+", base):
        raise ConfigError(f'openenv_agent: {url!r:.80} is no address; give one such as "ws://127.0.0.1:8000"')
    if reward not in ("sum", "last") and not callable(reward):
        raise ConfigError(
            f'openenv_agent: reward={reward!r:.80} is unknown; give "sum", "last" or a function'
        )
    if max_turns < 1 or timeout_s <= 0:
        raise ConfigError("openenv_agent: max_turns and timeout_s must be positive")

    @rollout
    async def openenv(task: dict[str, Any], llm: LLM) -> float:
        if not isinstance(task, Mapping):
            raise DatasetError(
                f"openenv_agent: the task {task!r:.80} is no dict; give the parameters of the environment's "
                'reset, such as {"seed": 3}'
            )
        async with open_session(base, headers, timeout_s) as session:
            schema = await session.action_schema() if parse is None and not tools else {}
            with_tools = (parse is None and is_tool_schema(schema)) if tools is None else tools
            episode = Episode(session, parse or action_parser(schema), prompt or observation_text)
            messages = [] if system is None else [{"role": "system", "content": system}]
            limits: dict[str, Any] = {"max_turns": max_turns, "sampling": sampling}
            with contextlib.suppress(EpisodeDoneError):
                messages.append({"role": "user", "content": await episode.begin(task)})
                if with_tools:
                    await episode.list_tools()
                    await run_tool_loop(llm, messages, episode, **limits)
                else:
                    await play_moves(llm, messages, episode.step, **limits)
            return await episode.total(reward)

    return openenv
