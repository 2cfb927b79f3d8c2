"""Puzzles of reasoning-gym as a dataset of tasks."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, SupportsIndex

from raylight.errors import ConfigError

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

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        place = range(len(self))[index]
        return {"question": self._dataset[place]["question"], **self._spec, "index": place}


@functools.lru_cache(KEPT)
def shared_dataset(place: str) -> Any:
    """Return the dataset of a task, which the rollouts of a process share.

    Args:
        place: arguments of `create_dataset` as JSON.
    """
    return create_dataset(**json.loads(place))


def create_dataset(name: str, size: int, seed: int, config: Mapping[str, Any]) -> Any:
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
