"""Games of a teacher, from which the tiny model learns to play half right."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from agent import SMALL_GAME, SMALL_RULES

from raylight.environments.textarena import TextArenaGame

GAMES = 256


def demonstrate(seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield games of the teacher."""
    game = TextArenaGame(SMALL_GAME, SMALL_RULES)
    for number in range(GAMES):
        messages, answer = game.reset({"seed": seed + number}), ""
        while answer is not None:
            messages.append({"role": "assistant", "content": best_guess(messages)})
            if (answer := game.step(messages[-1]["content"])) is not None:
                messages.append({"role": "user", "content": answer})
        yield messages


def best_guess(messages: list[dict[str, Any]]) -> str:
    """Return the first code that fits all feedback of a game."""
    numbers = [map(int, re.findall(r"\d+", message["content"])) for message in messages[2::2]]
    told = [((first, second), (black, white)) for first, second, black, white in numbers]
    codes = itertools.permutations(range(1, SMALL_RULES["num_numbers"] + 1), SMALL_RULES["code_length"])
    fitting = (code for code in codes if all(feedback(guess, code) == pegs for guess, pegs in told))
    return " ".join(map(str, next(fitting)))


def feedback(guess: tuple[int, ...], code: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of digits in the right place, and of those in another."""
    black = sum(a == b for a, b in zip(guess, code, strict=True))
    return black, len({*guess} & {*code}) - black
