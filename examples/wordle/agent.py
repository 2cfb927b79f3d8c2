"""The agent: the model plays a game of TextArena for one player."""

from __future__ import annotations

from typing import Any

import raylight as rl

SMALL_GAME = "Mastermind-v0"
SMALL_RULES = {"code_length": 2, "num_numbers": 5}
"""Game that a tiny model learns: find two different digits of 1 to 5."""
SMALL_GUESSES = 4
"""Guesses in which a player who uses all feedback finds each code."""


def make_player(
    game: str = SMALL_GAME,
    rules: dict[str, Any] = SMALL_RULES,
    guesses: int = SMALL_GUESSES,
    max_tokens: int = 8,
) -> rl.LitAgent:
    """Return an agent that plays a game; the reward is the game's, or 0 if it has not ended in time.

    Args:
        game: id of the game.
        rules: arguments of `textarena.make`.
        guesses: answers of the model at most.
        max_tokens: longest answer, in tokens.
    """
    sampling = {"temperature": 1.0, "max_tokens": max_tokens}
    return rl.environments.textarena_agent(game, max_turns=guesses, sampling=sampling, **rules)
