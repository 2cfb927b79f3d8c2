"""Environments of gymnasium as agents: observations as text, and actions by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from raylight.agent.decorators import FunctionalLitAgent
from raylight.environments.gymnasium_text import action_names, instructions, observation_text, parse_action
from raylight.environments.text_game import game_agent, task_seed
from raylight.errors import ConfigError


def gymnasium_agent(
    id: str,
    *,
    max_turns: int = 30,
    sampling: Mapping[str, Any] | None = None,
    trained_agents: str | None = None,
    **settings: Any,
) -> FunctionalLitAgent:
    """Make an agent that plays an environment of gymnasium, with a `Discrete` action space.

    A task has a `seed`, as `seeds` makes them, and may have `options`, both for the environment's `reset`.
    The model reads each observation as a message and answers with an action, by its name or its number. An
    answer that names none costs a turn. The reward is the sum of the environment's rewards.

    Args:
        id: id of the environment, such as `FrozenLake-v1`.
        max_turns: model calls of a rollout at most.
        sampling: sampling parameters of model calls. Default: temperature 1 and 512 tokens at most.
        trained_agents: as in `LitAgent`.
        settings: arguments of `gymnasium.make`, such as `is_slippery=False`.

    Raises:
        ConfigError: gymnasium is not installed, or the environment cannot be made or has other actions.
    """
    make_environment(id, settings).close()
    make = functools.partial(GymnasiumGame, id, settings)
    return game_agent(
        f"gymnasium_agent({id})", make, max_turns=max_turns, sampling=sampling, trained_agents=trained_agents
    )


class GymnasiumGame:
    """An environment of gymnasium as a `TextGame`."""

    def __init__(self, id: str, settings: Mapping[str, Any]) -> None:
        self._env = make_environment(id, settings)
        self._reward = 0.0

    def reset(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Begin an episode; return the instructions and the first observation."""
        observation, _ = self._env.reset(seed=task_seed(task), options=task.get("options"))
        self._reward = 0.0
        return [
            {"role": "system", "content": instructions(self._env)},
            {"role": "user", "content": observation_text(self._env, observation)},
        ]

    def step(self, answer: str) -> str | None:
        """Play an action; return the next observation, or None at the end."""
        action = parse_action(self._env, answer)
        if action is None:
            names = ", ".join(action_names(self._env))
            return f"{answer.strip()!r:.80} is no action. Answer with one action: {names}."
        observation, reward, ended, cut, _ = self._env.step(action)
        self._reward += float(reward)
        return None if ended or cut else observation_text(self._env, observation)

    def get_reward(self) -> float:
        """Return the sum of the rewards."""
        return self._reward

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def make_environment(id: str, settings: Mapping[str, Any]) -> Any:
    """Return an environment of gymnasium with numbered actions, which draws itself as text if it can.

    Raises:
        ConfigError: gymnasium is not installed, or the environment cannot be made or has other actions.
    """
    try:
        import gymnasium
        from gymnasium.envs.registration import load_env_creator
    except ImportError as error:
        raise ConfigError(
            f"environments of gymnasium need its package ({error}): pip install 'raylight[gymnasium]'"
        ) from error
    try:
        entry: Any = gymnasium.spec(id).entry_point
        creator: Any = load_env_creator(entry) if isinstance(entry, str) else entry
        modes = getattr(creator, "metadata", {}).get("render_modes", ())
        env: Any = gymnasium.make(id, **({"render_mode": "ansi"} if "ansi" in modes else {}) | dict(settings))
    except (gymnasium.error.Error, ImportError, AttributeError, TypeError, ValueError) as error:
        given = f" with {dict(settings)}" if settings else ""
        raise ConfigError(f"the environment {id!r:.80}{given} cannot be made: {error}") from error
    if not isinstance(env.action_space, gymnasium.spaces.Discrete) or env.action_space.start != 0:
        env.close()
        raise ConfigError(
            f"the actions of {id} are {env.action_space}, and a model answers with one of several: give an "
            "environment whose action space is Discrete, or wrap it"
        )
    return env
