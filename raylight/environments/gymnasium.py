"""Environments of gymnasium as agents: observations as text, and actions by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from raylight.agent.decorators import FunctionalLitAgent
from raylight.environments.text_game import game_agent, task_seed
from raylight.errors import ConfigError
from raylight.types import JsonObject

ACTION_NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""Words for the actions of environments that number them, by name without version."""
CELL = "Row {0}, column {1}."
OBSERVATIONS = {
    "Blackjack": "Your sum: {0}. The dealer shows: {1}. Usable ace: {2}.",
    "CliffWalking": CELL,
    "FrozenLake": CELL,
    "Taxi": "Taxi: row {0}, column {1}. Passenger: {2}. Destination: {3}.",
}
"""Words for the values of environments without a picture, by name without version."""
STANDS = ("red", "green", "yellow", "blue", "in the taxi")
"""Places of a passenger of Taxi, as the environment numbers them."""
COLOUR = re.compile(r"\x1b\[([\d;]*)m")
MARKS = {"41": ("[", "]"), "42": ("{", "}"), "43": ("[", "]"), "34;1": ("(", ")"), "35": ("<", ">")}
"""Brackets in place of a colour: [] for the agent, {} for a taxi with its passenger, () for the passenger who
waits, and <> for the destination."""
LAST_ACTION = re.compile(r"^ +\(\w+\)\n?", re.MULTILINE)


def gymnasium_agent(
    id: str,
    *,
    max_turns: int = 30,
    sampling: Mapping[str, object] | None = None,
    trained_agents: str | None = None,
    **settings: object,
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

    def __init__(self, id: str, settings: Mapping[str, object]) -> None:
        self._env = make_environment(id, settings)
        self._reward = 0.0

    def reset(self, task: Mapping[str, object]) -> list[JsonObject]:
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
            return f"{answer.strip()!r:.80} is not an action. Answer with one action: {names}."
        observation, reward, ended, cut, _ = self._env.step(action)
        self._reward += float(reward)
        return None if ended or cut else observation_text(self._env, observation)

    def get_reward(self) -> float:
        return self._reward

    def close(self) -> None:
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
        entry: object = gymnasium.spec(id).entry_point
        creator: object = load_env_creator(entry) if isinstance(entry, str) else entry
        modes = getattr(creator, "metadata", {}).get("render_modes", ())
        env = gymnasium.make(id, **({"render_mode": "ansi"} if "ansi" in modes else {}) | dict(settings))
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


def environment_name(env: Any) -> str:
    """Return the name of an environment without its namespace and its version."""
    return env.spec.id.rpartition("/")[2].rpartition("-v")[0] if env.spec else ""


def action_names(env: Any) -> tuple[str, ...]:
    """Return the words for the actions of an environment: numbers if it names none.

    Args:
        env: an environment whose actions are a `Discrete` space from 0 on.
    """
    return ACTION_NAMES.get(environment_name(env)) or tuple(map(str, range(int(env.action_space.n))))


def instructions(env: Any) -> str:
    """Return the system prompt of an environment."""
    name = env.spec.id if env.spec else type(env.unwrapped).__name__
    return f"Play {name}. Answer each observation with one action: {', '.join(action_names(env))}."


def observation_text(env: Any, observation: object) -> str:
    """Return an observation as text: the picture if `render_mode` is "ansi", else the value in words."""
    if env.render_mode != "ansi":
        words = OBSERVATIONS.get(environment_name(env))
        return words.format(*observed_values(env, observation)) if words else str(observation)
    picture = LAST_ACTION.sub("", env.render())
    shown, closing = "", list[str]()
    position = 0
    for code in COLOUR.finditer(picture):
        shown += picture[position : code.start()]
        position = code.end()
        if code[1] in ("", "0"):
            shown += closing.pop() if closing else ""
        else:
            left, right = MARKS.get(code[1], ("", ""))
            shown += left
            closing.append(right)
    return (shown + picture[position:]).strip("\n")


def observed_values(env: Any, observation: Any) -> tuple[object, ...]:
    """Return the values for the words of `OBSERVATIONS`; some environments pack them into one number."""
    name, inner = environment_name(env), env.unwrapped
    if name == "Taxi":
        row, column, passenger, destination = inner.decode(observation)
        return row, column, STANDS[passenger], STANDS[destination]
    if name in ("CliffWalking", "FrozenLake"):
        columns = (inner.shape if name == "CliffWalking" else inner.desc.shape)[1]
        return divmod(int(observation), columns)
    return tuple(observation)


def parse_action(env: object, text: str) -> int | None:
    """Return the number of the action that an answer names; None if it names none.

    An answer is an action's name or number. In a longer answer the last name counts.
    """
    names = action_names(env)
    word = text.strip().lower()
    if word in names:
        return names.index(word)
    if word.isascii() and word.isdigit():
        return int(word[:9]) if int(word[:9]) < len(names) else None
    found = [part for part in re.findall(r"[a-z]+", word) if part in names]
    return names.index(found[-1]) if found else None
