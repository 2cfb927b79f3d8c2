"""OpenEnv environments as agents: the model plays an episode on an OpenEnv server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from raylight.agent.decorators import rollout
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM
from raylight.environments.openenv_session import (
    EpisodeStep,
    InvalidActionError,
    OpenEnvSession,
    open_session,
)
from raylight.environments.tool_loop import SAMPLING, cut_result, parse_arguments
from raylight.errors import ConfigError, DatasetError, EnvironmentServerError

TOOL_ACTIONS = ("tool_name", "list_tools")
"""Words in the schema of actions of environments whose actions are calls of MCP tools."""
Rewards = Literal["sum", "last"] | Callable[[dict[str, Any]], float]


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
            episode = Episode(session, llm, {**SAMPLING, **(sampling or {})}, prompt or observation_text)
            if system is not None:
                episode.messages.append({"role": "system", "content": system})
            await episode.begin(task)
            play = episode.play_tools if with_tools else episode.play_text
            await play(max_turns, parse or action_parser(schema))
            return await episode.total(reward)

    return openenv


class Episode:
    """Conversation of the model with an environment."""

    def __init__(
        self,
        session: OpenEnvSession,
        llm: LLM,
        sampling: dict[str, Any],
        prompt: Callable[[dict[str, Any]], str],
    ) -> None:
        self.messages: list[Any] = []
        self._session = session
        self._llm = llm
        self._sampling = {**sampling, **llm.sampling_parameters}
        self._prompt = prompt
        self._rewards: list[float] = []
        self._done = False

    async def begin(self, task: Mapping[str, Any]) -> None:
        """Reset the environment; its observation is the first message of the user."""
        try:
            step = await self._session.reset(task)
        except InvalidActionError as error:
            raise DatasetError(
                f"openenv_agent: the environment rejects the task {task!r:.200}: {error}"
            ) from None
        self._done = step.done
        self._say(self._prompt(step.observation))

    async def play_text(self, max_turns: int, parse: Callable[[str], Mapping[str, Any]]) -> None:
        """Let the model answer observations until the episode is done."""
        for _ in range(max_turns):
            if self._done:
                return
            text = (await self._ask({})).content or ""
            self.messages.append({"role": "assistant", "content": text})
            try:
                step = await self._session.step(parse(text))
            except (ValueError, InvalidActionError) as error:
                self._say(f"error: {error}")
            else:
                self._count(step)
                self._say(self._prompt(step.observation))

    async def play_tools(self, max_turns: int, _: Any) -> None:
        """Let the model call the environment's tools until it calls none or the episode is done."""
        listed = (await self._session.step({"type": "list_tools"})).observation.get("tools") or []
        schemas = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
                },
            }
            for tool in listed
        ]
        for _ in range(max_turns):
            if self._done or not (message := await self._ask({"tools": schemas})).tool_calls:
                return
            self.messages.append(message)
            for call in message.tool_calls:
                content = "error: the episode is over" if self._done else await self._call(call.function)
                self.messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    async def total(self, reward: Rewards) -> float:
        """Return the reward of the episode.

        Raises:
            EnvironmentServerError: no step had a reward.
        """
        if callable(reward):
            return reward(await self._session.state())
        if not self._rewards:
            raise EnvironmentServerError(
                "the OpenEnv environment gave no reward in this episode; give openenv_agent(reward=...), a "
                "function of its state, or a larger max_turns"
            )
        return sum(self._rewards) if reward == "sum" else self._rewards[-1]

    async def _ask(self, options: dict[str, Any]) -> Any:
        reply = await self._llm.client().chat.completions.create(
            model=self._llm.model, messages=self.messages, **options, **self._sampling
        )
        return reply.choices[0].message

    async def _call(self, function: Any) -> str:
        """Execute a tool call as an action; return its result, or the error that the model reads."""
        try:
            arguments = parse_arguments(function.arguments)
            step = await self._session.step(
                {"type": "call_tool", "tool_name": function.name, "arguments": arguments}
            )
        except (ValueError, InvalidActionError) as error:
            return f"error: {error}"
        self._count(step)
        if failure := step.observation.get("error"):
            return cut_result(
                f"error: {failure.get('message', failure) if isinstance(failure, dict) else failure}"
            )
        return cut_result(tool_text(step.observation.get("result")))

    def _count(self, step: EpisodeStep) -> None:
        self._done = step.done
        if step.reward is not None:
            self._rewards.append(step.reward)

    def _say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": cut_result(text)})


def is_tool_schema(schema: Mapping[str, Any]) -> bool:
    """Return True if actions of this JSON schema are calls of MCP tools."""
    return any(word in json.dumps(schema) for word in TOOL_ACTIONS) or set(fields_of(schema)) == set()


def fields_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of an action's JSON schema, without its metadata."""
    return {name: kind for name, kind in schema.get("properties", {}).items() if name != "metadata"}


def action_parser(schema: Mapping[str, Any]) -> Callable[[str], dict[str, Any]]:
    """Return a function that makes an action of a JSON schema from the model's answer."""
    fields = fields_of(schema)
    required = [name for name in schema.get("required", fields) if name in fields] or list(fields)

    def parse(text: str) -> dict[str, Any]:
        if len(required) == 1:
            (name,) = required
            kind = fields[name].get("type")
            return {name: text if kind in ("string", None) else read_json(text, kind)}
        return read_json(text, f"object with {', '.join(required)}", dict)

    return parse


def read_json(text: str, what: str, expected: type = object) -> Any:
    """Return the value of a JSON text; a ValueError with a message for the model if it has none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if value is None or not isinstance(value, expected):
        raise ValueError(f"answer with JSON: {what}")
    return value


def observation_text(observation: dict[str, Any]) -> str:
    """Return an observation as text: the value of its only field, or all as JSON, without the metadata."""
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    values = list(fields.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields)


def tool_text(result: Any) -> str:
    """Return the result of a tool as text."""
    if isinstance(result, dict) and "data" in result:  # the result of fastmcp
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result)
