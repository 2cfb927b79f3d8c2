"""Games that are played in text: each answer of the model is a move, which the game answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from raylight.agent.decorators import FunctionalLitAgent
from raylight.agent.resources import LLM, check_sampling
from raylight.environments.live_environment import LiveEnvironment, check_positive
from raylight.environments.tool_loop import next_message
from raylight.errors import DatasetError
from raylight.types import JsonObject, Rollout, RolloutConfig

MOVE_S = 300.0
"""Time for a move of a game."""


class UnfinishedGameError(Exception):
    """A game has no reward, because it has not ended."""


class TextGame(Protocol):
    """A game of one rollout, whose methods run in a dedicated thread."""

    def reset(self, task: Mapping[str, object]) -> list[JsonObject]:
        """Begin an episode; return the first messages."""
        ...

    def step(self, answer: str) -> str | None:
        """Play the move that an answer names; return the next observation, or None at the end."""
        ...

    def get_reward(self) -> float:
        """Return the reward of the episode so far.

        Raises:
            UnfinishedGameError: it has none before its end.
        """
        ...

    def close(self) -> None:
        """Release what the game holds."""
        ...


class GameRollouts:
    """Rollout function of an agent that plays a game.

    Args:
        name: name of the agent.
        make: creates a game.
        max_turns: model calls of a rollout at most.
        sampling: sampling parameters of model calls.
    """

    def __init__(
        self, name: str, make: Callable[[], TextGame], max_turns: int, sampling: Mapping[str, object] | None
    ) -> None:
        check_positive("max_turns", max_turns)
        self.__name__ = name
        self._make = make
        self._max_turns = max_turns
        self._sampling = check_sampling(dict(sampling or {}))

    async def __call__(
        self, task: object, llm: LLM, rollout: Rollout | None = None
    ) -> dict[str, float] | float | None:
        """Play one episode; return its reward by name.

        A game that has a reward at its end only, and did not get there, is treated as a rollout that a budget
        truncates: by `RolloutConfig.truncated` it has `truncated_reward`, is left out, or fails.

        Raises:
            UnfinishedGameError: it did not end, and `truncated` is "fail".
        """
        if not isinstance(task, Mapping):
            raise DatasetError(f"{self.__name__} got the task {task!r:.80}; its tasks are dicts")
        live = LiveEnvironment([], MOVE_S)
        try:
            await live.start(self._make)
            messages = await live.call("reset", {"task": task})

            async def step(answer: str) -> str | None:
                return await live.call("step", {"answer": answer})

            await play_moves(llm, messages, step, max_turns=self._max_turns, sampling=self._sampling)
            return await live.read_reward(None, messages)
        except UnfinishedGameError:
            config = RolloutConfig() if rollout is None else rollout.config
            if config.truncated == "fail":
                raise
            return config.truncated_reward if config.truncated == "score" else None
        finally:
            await live.close()


async def play_moves(
    llm: LLM,
    messages: list[JsonObject],
    step: Callable[[str], Awaitable[str | None]],
    *,
    max_turns: int,
    sampling: Mapping[str, object] | None = None,
) -> None:
    """Let the model answer until the game ends, `max_turns` answers were given, or its context is full.

    Args:
        messages: the conversation, to which answers and observations are appended.
        step: plays the move that an answer names; it returns the next observation, or None at the end.
    """
    for _ in range(max_turns):
        message = await next_message(llm, messages, sampling)
        if message is None:
            return
        messages.append(message.model_dump(exclude_none=True))
        observation = await step(message.content or "")
        if observation is None:
            return
        messages.append({"role": "user", "content": observation})


def game_agent(
    name: str,
    make: Callable[[], TextGame],
    *,
    max_turns: int,
    sampling: Mapping[str, object] | None,
    trained_agents: str | None,
) -> FunctionalLitAgent:
    """Make an agent that plays a game; it takes the arguments of `GameRollouts` and `LitAgent`."""
    return FunctionalLitAgent(GameRollouts(name, make, max_turns, sampling), trained_agents=trained_agents)


def seeds(count: int, start: int = 0) -> list[dict[str, int]]:
    """Return tasks for agents that play games: a seed each.

    Args:
        count: number of tasks.
        start: first seed. Give tasks for validation others than those for training.
    """
    check_positive("seeds(count)", count)
    return [{"seed": seed} for seed in range(start, start + count)]


def task_seed(task: Mapping[str, object]) -> int:
    """Return the seed of a game's task.

    Raises:
        DatasetError: it has none.
    """
    seed = task.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise DatasetError(
            f"the column 'seed' of a task is {seed!r:.40}; it is a whole number from 0 on, as "
            "rl.environments.seeds(1000) returns them"
        )
    return seed
