"""Puzzles of reasoning-gym: a dataset of tasks, and the agent that answers them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, SupportsIndex

from raylight.agent.decorators import FunctionalLitAgent
from raylight.agent.emit import emit_exception
from raylight.environments.text_game import game_agent
from raylight.errors import ConfigError, DatasetError
from raylight.types import JsonObject

KEPT = 32
"""Datasets that a process keeps for scoring."""


class ReasoningGym:
    """Puzzles of one dataset of reasoning-gym, as tasks for `reasoning_gym_agent`.

    A task has the question and the place of the puzzle, from which its answer is generated again for the
    score. The answer itself is not in the task.

    Args:
        name: name of the dataset, such as `chain_sum`.
        size: number of puzzles.
        seed: seed of the first puzzle; give other seeds for validation, at least `size` apart.
        config: settings of the dataset, such as `max_terms=2`.

    Raises:
        ConfigError: reasoning-gym is not installed, or has no such dataset or setting.
    """

    def __init__(self, name: str, size: int = 1000, seed: int = 0, **config: Any) -> None:
        try:
            self._spec = json.loads(json.dumps({"name": name, "size": size, "seed": seed, "config": config}))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"ReasoningGym: the settings {config!r:.200} are not JSON: {error}") from error
        self._dataset = create_dataset(**self._spec)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: SupportsIndex) -> JsonObject:
        place = range(len(self))[index]
        return {"question": self._dataset[place]["question"], **self._spec, "index": place}


def reasoning_gym_agent(
    *,
    system: str | None = None,
    sampling: Mapping[str, object] | None = None,
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

    def reset(self, task: Mapping[str, object]) -> list[JsonObject]:
        """Return the question."""
        self._task = task
        if missing := {"question", "name", "size", "seed", "config", "index"} - task.keys():
            raise DatasetError(
                f"a task of reasoning_gym_agent lacks {', '.join(sorted(missing))}; take its tasks from "
                "rl.environments.ReasoningGym"
            )
        question = {"role": "user", "content": task["question"]}
        return [question] if self._system is None else [{"role": "system", "content": self._system}, question]

    def step(self, answer: str) -> None:
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


@functools.lru_cache(KEPT)
def shared_dataset(place: str) -> Any:
    """Return the dataset of a task, which the rollouts of a process share.

    Args:
        place: arguments of `create_dataset` as JSON.
    """
    return create_dataset(**json.loads(place))


def create_dataset(name: str, size: int, seed: int, config: Mapping[str, object]) -> Any:
    """Return a dataset of reasoning-gym.

    Raises:
        ConfigError: reasoning-gym is not installed, or has no such dataset or setting.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"puzzles of reasoning-gym need its package ({error}): pip install 'raylight[reasoning_gym]'"
        ) from error
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **config)
    except (TypeError, ValueError, AssertionError) as error:
        given = f" with {dict(config)}" if config else ""
        raise ConfigError(
            f"the dataset {name!r:.80} of reasoning-gym{given} cannot be made: {error}"
        ) from error
