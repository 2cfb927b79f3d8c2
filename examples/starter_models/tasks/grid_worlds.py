"""Environments of gymnasium with a transition table, played by the best policy.

The teacher knows the table and finds the best action of every state by value iteration. Some moves of a
demonstration are random, and not learned, so that the model also sees states that the teacher would avoid.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from raylight.environments.gymnasium import (
    action_names,
    instructions,
    make_environment,
    observation_text,
)
from raylight.errors import ConfigError

DISCOUNT = 0.99
CONVERGED = 1e-9
RANDOM_MOVES = 0.15
"""Part of the moves that are random."""
MAX_MOVES = 30
"""Moves of a demonstration at most."""


def gymnasium(id: str, seed: int, **settings: Any) -> Iterator[dict[str, Any]]:
    """Yield episodes of an environment.

    Args:
        id: id of the environment, such as `FrozenLake-v1`.
        settings: arguments of `gymnasium.make`, such as `is_slippery=False`.

    Raises:
        ConfigError: gymnasium is not installed, or the environment is unknown or has no transition table.
    """
    env = _make(id, settings)
    best = best_actions(env.unwrapped.P)
    names, prompt = action_names(env), instructions(env)
    generator = random.Random(seed)
    for episode in itertools.count():
        observation, _ = env.reset(seed=seed + episode)
        messages: list[dict[str, Any]] = [{"role": "system", "content": prompt}]
        for _ in range(MAX_MOVES):
            messages.append({"role": "user", "content": observation_text(env, observation)})
            learned = generator.random() >= RANDOM_MOVES
            action = best[int(observation)] if learned else generator.randrange(len(names))
            messages.append({"role": "assistant", "content": names[action], "weight": int(learned)})
            observation, _, ended, cut, _ = env.step(action)
            if ended or cut:
                break
        if any(message.get("weight") for message in messages):
            yield {"messages": messages}


def best_actions(table: dict[int, dict[int, list[tuple[float, int, float, bool]]]]) -> dict[int, int]:
    """Return the best action of each state by value iteration; of equal ones the first.

    Args:
        table: for each state and action the outcomes: probability, next state, reward, and True if the
            episode ends.
    """
    values = dict.fromkeys(table, 0.0)

    def value(state: int, action: int) -> float:
        return sum(
            p * (reward + DISCOUNT * values[following] * (not ended))
            for p, following, reward, ended in table[state][action]
        )

    change = 1.0
    while change > CONVERGED:
        change = 0.0
        for state, actions in table.items():
            better = max(value(state, action) for action in actions)
            change = max(change, abs(better - values[state]))
            values[state] = better
    return {
        state: max(actions, key=lambda action: round(value(state, action), 6))
        for state, actions in table.items()
    }


def _make(id: str, settings: dict[str, Any]) -> Any:
    env = make_environment(id, settings)
    if not hasattr(env.unwrapped, "P"):
        raise ConfigError(
            f"the task gymnasium:{id} has no teacher: the environment has no transition table P; "
            "FrozenLake-v1, CliffWalking-v1 and Taxi-v4 have one"
        )
    return env
