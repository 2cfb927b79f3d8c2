"""Episode of an OpenEnv environment, for a model that answers in text or calls tools."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from raylight.environments.openenv_session import InvalidActionError, OpenEnvSession
from raylight.environments.openenv_text import tool_text
from raylight.environments.tool_loop import answer_calls, call_tool, cut_result
from raylight.errors import DatasetError, EnvironmentServerError

Rewards = Literal["sum", "last"] | Callable[[dict[str, Any]], float]


class EpisodeDoneError(Exception):
    """The environment has ended the episode, so the model is not called any more."""


class Episode:
    """An episode of an environment: text moves by `step`, or tools for `run_tool_loop`.

    Args:
        parse: action from an answer of the model.
        prompt: text of an observation.
    """

    def __init__(
        self,
        session: OpenEnvSession,
        parse: Callable[[str], Mapping[str, Any]],
        prompt: Callable[[dict[str, Any]], str],
    ) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._session = session
        self._parse = parse
        self._prompt = prompt
        self._rewards: list[float] = []
        self._done = False
        self._one_action = asyncio.Lock()

    async def begin(self, task: Mapping[str, Any]) -> str:
        """Reset the environment; return its first observation.

        Raises:
            DatasetError: the environment rejects the task.
            EpisodeDoneError: the episode has ended with its reset.
        """
        try:
            first = await self._session.reset(task)
        except InvalidActionError as error:
            raise DatasetError(
                f"openenv_agent: the environment rejects the task {task!r:.200}: {error}"
            ) from None
        self._done = first.done
        self._check_done()
        return cut_result(self._prompt(first.observation))

    async def step(self, answer: str) -> str:
        """Execute the action that an answer names; return the observation, or the model's mistake.

        Raises:
            EpisodeDoneError: the episode has ended.
        """
        try:
            text = self._prompt(await self._act(self._parse(answer)))
        except (ValueError, InvalidActionError) as error:
            text = f"error: {error}"
        self._check_done()
        return cut_result(text)

    async def list_tools(self) -> None:
        """Ask the environment for its tools."""
        listed = (await self._session.step({"type": "list_tools"})).observation.get("tools") or []
        for tool in listed:
            function = {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            }
            self.schemas.append({"type": "function", "function": function})

    async def answer(self, message: Any) -> list[dict[str, Any]]:
        """Execute the tool calls of a message in their order; return the tool messages.

        Raises:
            EpisodeDoneError: the episode has ended.
        """
        names = [schema["function"]["name"] for schema in self.schemas]

        async def call(name: str, arguments: str) -> str | list[Any]:
            async with self._one_action:
                return await call_tool(names, name, arguments, functools.partial(self._call, name))

        answers = await answer_calls(message, call)
        self._check_done()
        return answers

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

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Execute a tool call as an action; return its result, or the error that the model reads."""
        if self._done:
            return "error: the episode is over"
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            observation = await self._act(action)
        except InvalidActionError as error:
            return f"error: {error}"
        if failure := observation.get("error"):
            return f"error: {failure.get('message', failure) if isinstance(failure, dict) else failure}"
        return tool_text(observation.get("result"))

    async def _act(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Execute an action; return its observation."""
        step = await self._session.step(action)
        self._done = step.done
        if step.reward is not None:
            self._rewards.append(step.reward)
        return step.observation

    def _check_done(self) -> None:
        if self._done:
            raise EpisodeDoneError
