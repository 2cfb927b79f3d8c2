"""Single-player games of TextArena as agents."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from raylight.agent.decorators import FunctionalLitAgent
from raylight.environments.live_environment import error_text
from raylight.environments.text_game import UnfinishedGameError, game_agent, task_seed
from raylight.errors import ConfigError
from raylight.types import JsonObject

_SEEDING = threading.Lock()
"""Held while a game is set up or moves: TextArena uses the random numbers of the whole process."""


def textarena_agent(
    id: str,
    *,
    max_turns: int = 30,
    sampling: Mapping[str, object] | None = None,
    trained_agents: str | None = None,
    **settings: object,
) -> FunctionalLitAgent:
    """Make an agent that plays a game of TextArena for one player.

    A task has a `seed`, as `seeds` makes them. The model reads the game's messages and answers with a
    move; brackets around it are added if it has none. The reward is the game's. One that has not
    ended after `max_turns` answers has none: `RolloutConfig.truncated` decides, by default for
    `truncated_reward`.

    Args:
        id: id of the game, such as `GuessTheNumber-v0`.
        max_turns: model calls of a rollout at most.
        sampling: sampling parameters of model calls. Default: temperature 1 and 512 tokens at most.
        trained_agents: as in `LitAgent`.
        settings: arguments of `textarena.make`, such as `max_number=50`.

    Raises:
        ConfigError: textarena or data of the game is missing, or the game is unknown or has several players.
    """
    check_game(id, settings)
    make = functools.partial(TextArenaGame, id, settings)
    return game_agent(
        f"textarena_agent({id})", make, max_turns=max_turns, sampling=sampling, trained_agents=trained_agents
    )


def check_game(id: str, settings: Mapping[str, object]) -> None:
    """Begin a game.

    Raises:
        ConfigError: textarena or data of the game is missing, or the game is unknown or has several players.
    """
    try:
        TextArenaGame(id, settings).reset({"seed": 0})
    except ConfigError:
        raise
    except Exception as error:  # games raise all kinds: a missing word list, a wrong number of players
        raise ConfigError(
            f"the game {id!r:.80} of TextArena cannot be played by one player: {error_text(error)}"
        ) from error


class TextArenaGame:
    """A game of TextArena as a `TextGame`."""

    def __init__(self, id: str, settings: Mapping[str, object]) -> None:
        try:
            import textarena
        except ImportError as error:
            raise ConfigError(
                f"games of TextArena need its package ({error}): pip install 'raylight[textarena]'"
            ) from error
        # without the wrappers that repeat the whole conversation in each observation
        raw = id if id.endswith(("-raw", "-train")) else f"{id}-raw"
        self._env: Any = textarena.make(raw, **settings)
        self._random = random.Random()

    def reset(self, task: Mapping[str, object]) -> list[JsonObject]:
        """Begin a game; return its prompt."""
        seed = task_seed(task)
        self._random.seed(seed)
        with self._seeded():
            self._env.reset(num_players=1, seed=seed)
        return [{"role": "user", "content": self._observation()}]

    def step(self, answer: str) -> str | None:
        """Play a move; return the game's messages, or None at the end."""
        is_marked = "[" in answer and "]" in answer
        with self._seeded():
            done, _ = self._env.step(answer if is_marked else f"[{answer.strip()}]")
        return None if done else self._observation()

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """Go on with the game's random numbers, and put those of the process back at the end."""
        with _SEEDING:
            state_of_process = random.getstate()
            random.setstate(self._random.getstate())
            try:
                yield
            finally:
                self._random.setstate(random.getstate())
                random.setstate(state_of_process)

    def _observation(self) -> str:
        """Return the messages since the last move, without the model's own."""
        player, messages = self._env.get_observation()
        if isinstance(messages, str):
            return messages
        return "\n".join(str(text) for sender, text, *_ in messages if sender != player)

    def get_reward(self) -> float:
        """Return the reward of a game that has ended.

        Raises:
            UnfinishedGameError: it has not.
        """
        rewards = self._env.state.rewards
        if not rewards:
            raise UnfinishedGameError("the game had not ended after the last answer; raise max_turns")
        return float(rewards[0])

    def close(self) -> None:
        self._env.close()
