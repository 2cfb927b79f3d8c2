"""Agent that answers puzzles of reasoning-gym."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from raylight.agent.decorators import FunctionalLitAgent
from raylight.agent.emit import emit_exception
from raylight.environments.reasoning_gym import shared_dataset
from raylight.environments.text_game import game_agent
from raylight.errors import DatasetError


def reasoning_gym_agent(
    *,
    system: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    trained_agents: str | None = None,
) -> FunctionalLitAgent:
    """Make an agent that answers puzzles of `ReasoningGym`, scored by the dataset's own `score_answer`.

    The answer is the text between the last `<answer>` and `</answer>`, or else the whole text. An answer on
    which `score_answer` fails has the score 0, and the error is recorded in the trace.

    Args:
        system: system prompt, such as one of `reasoning_gym.utils.SYSTEM_PROMPTS`.
        sampling: sampling parameters of the model call. Default: temperature 1 and 512 tokens at most.
        trained_agents: as in `LitAgent`.

    Raises:
        ConfigError: a sampling parameter is out of range.
    """
    make = functools.partial(Puzzle, system)
    return game_agent(
        "reasoning_gym_agent", make, max_turns=1, sampling=sampling, trained_agents=trained_agents
    )


class Puzzle:
    """A puzzle as a `TextGame` of one move."""

    def __init__(self, system: str | None) -> None:
        self._system = system
        self._score = 0.0

    def reset(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the question."""
        self._task = task
        if missing := {"question", "name", "size", "seed", "config", "index"} - task.keys():
            raise DatasetError(
                f"a task of reasoning_gym_agent lacks {', '.join(sorted(missing))}; its tasks are those of "
                "rl.ReasoningGym"
            )
        question = {"role": "user", "content": task["question"]}
        return [question] if self._system is None else [{"role": "system", "content": self._system}, question]

    def step(self, answer: str) -> None:
        """Score the answer."""
        from reasoning_gym.utils import extract_answer

        place = {key: self._task[key] for key in ("name", "size", "seed", "config")}
        dataset = shared_dataset(json.dumps(place, sort_keys=True))
        entry = dataset[self._task["index"]]
        marked = extract_answer(answer)
        try:
            self._score = float(
                dataset.score_answer(answer.strip() if marked is None else marked, entry=entry)
            )
        except Exception as error:  # some datasets cannot read every text
            emit_exception(error)

    def get_reward(self) -> float:
        """Return the score."""
        return self._score

    def close(self) -> None:
        """Release nothing."""
