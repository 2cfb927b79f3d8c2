"""TextArena's GuessTheNumber, played by halving the range of the numbers that are left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from raylight.environments.textarena import TextArenaGame, check_game
from raylight.errors import ConfigError

GAMES = 512
"""Games of a teacher. There is one for each number, so that more would only repeat them."""


def textarena(id: str, seed: int, **settings: Any) -> Iterator[dict[str, Any]]:
    """Yield games.

    Args:
        id: id of the game, such as `GuessTheNumber-v0`.
        settings: arguments of `textarena.make`, such as `max_number=50`.

    Raises:
        ConfigError: textarena is not installed, or the game is unknown or has no teacher.
    """
    if not id.startswith("GuessTheNumber-"):
        raise ConfigError(
            f"the task textarena:{id} has no teacher; GuessTheNumber-v0 has one, and your own function, "
            "package.module:function, may yield demonstrations of another game"
        )
    check_game(id, settings)
    game = TextArenaGame(id, settings)
    for episode in range(GAMES):
        yield {"messages": _play(game, game.reset({"seed": seed + episode}))}


def _play(game: TextArenaGame, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Play a game to its end; return its messages."""
    prompt = messages[-1]["content"]
    found = re.search(r"between (\d+) and (\d+)", prompt)
    if found is None:
        raise ConfigError(f"the prompt of the game names no range of numbers: {prompt!r:.200}")
    low, high = int(found[1]), int(found[2])
    while True:
        guess = (low + high) // 2
        messages.append({"role": "assistant", "content": str(guess)})
        answer = game.step(str(guess))
        if answer is None:
            return messages
        messages.append({"role": "user", "content": answer})
        low, high = (guess + 1, high) if "higher" in answer else (low, guess - 1)
