"""MiniGRPO's backend "trl": an algorithm with TRL's loop, without an agent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raylight.algorithms.base import Algorithm
from raylight.algorithms.minigrpo.settings import TrlSettings, rename_passes
from raylight.errors import ConfigError, DatasetError


class TrlGRPO(Algorithm):
    """GRPO of an adapter by TRL's GRPOTrainer, in this process.

    Args:
        settings: fields of `TrlSettings`, or `passes` for `ppo_epochs`.

    Raises:
        ConfigError: a setting is unknown, out of range, or in conflict with another, or would not be read.
    """

    serves_model = True

    def __init__(self, **settings: Any) -> None:
        missing = [name for name in ("prompt_of", "reward_of") if settings.get(name) is None]
        if missing:
            raise ConfigError(
                f"backend='trl' calls no agent and needs {' and '.join(missing)}; set them: prompt_of(task) "
                "-> prompt, reward_of(task, text) -> float"
            )
        try:
            settings = rename_passes(settings)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.settings = TrlSettings(**settings)

    @property
    def n_epochs(self) -> int:
        """Passes over the training tasks."""
        return self.settings.n_epochs

    @n_epochs.setter
    def n_epochs(self, n_epochs: int) -> None:
        self.settings = TrlSettings(**dict(self.settings) | {"n_epochs": n_epochs})

    def total_steps(self, n_train: int) -> int:
        return self.settings.steps(n_train)

    def resolved(self) -> dict[str, Any]:
        return self.settings.model_dump(mode="json") | {"backend": "trl"}

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Train for the planned number of steps.

        Raises:
            DatasetError: there are no training tasks.
            ConfigError: TRL is not installed.
        """
        from raylight.algorithms.minigrpo.trl_backend import train

        tasks, val_tasks = _as_list(train_dataset), _as_list(val_dataset)
        if not tasks:
            raise DatasetError("train_dataset is missing; pass a list of tasks")
        await train(self.settings, self.get_run_context(), tasks, val_tasks)


def _as_list(dataset: Any) -> list[Any]:
    if dataset is None:
        return []
    return list(dataset) if isinstance(dataset, Iterable) else [dataset[i] for i in range(len(dataset))]
