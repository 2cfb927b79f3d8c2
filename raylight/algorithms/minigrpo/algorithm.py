"""MiniGRPO: GRPO of an adapter in one process, without verl and without learner actors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raylight.algorithms.base import Algorithm
from raylight.algorithms.minigrpo.settings import MiniGRPOSettings
from raylight.errors import DatasetError


class MiniGRPO(Algorithm):
    """Group relative policy optimisation (https://arxiv.org/abs/2402.03300) of a LoRA adapter, for a GPU of 4
    GB or a CPU.

    The process that calls `Trainer.fit` holds a single copy of the model. Agents run in the runners and call
    it over HTTP; it is trained in place between two decoding steps. The adapter is saved in peft's format in
    `checkpoint` of the run directory.

    With `backend="trl"`, TRL's GRPOTrainer samples and updates in this process. It supports single-turn
    prompts only, so `prompt_of` and `reward_of` replace the agent, which is not called.

    Args:
        settings: fields of `MiniGRPOSettings`; `model` is required.

    Raises:
        ConfigError: a setting is unknown, out of range, in conflict with another, or would have no effect.
    """

    serves_model = True

    def __init__(self, **settings: Any) -> None:
        self.settings = MiniGRPOSettings(**settings)

    @property
    def n_epochs(self) -> int:
        """Passes over the training tasks."""
        return self.settings.n_epochs

    @n_epochs.setter
    def n_epochs(self, n_epochs: int) -> None:
        self.settings = MiniGRPOSettings(**dict(self.settings) | {"n_epochs": n_epochs})

    def total_steps(self, n_train: int) -> int:
        return self.settings.steps(n_train)

    def resolved(self) -> dict[str, Any]:
        return self.settings.model_dump(mode="json")

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Train for the planned number of steps.

        Raises:
            DatasetError: there are no training tasks.
            DeviceMemoryError: the run needs more memory than the device has.
            ConfigError: the backend is TRL, which is not installed.
        """
        tasks, val_tasks = _as_list(train_dataset), _as_list(val_dataset)
        if not tasks:
            raise DatasetError("train_dataset is missing; pass a list of tasks")
        if self.settings.backend == "trl":
            from raylight.algorithms.minigrpo.trl_backend import train
        else:
            from raylight.algorithms.minigrpo.loop import train
        await train(self.settings, self.get_store(), self.get_run_context(), tasks, val_tasks)


def _as_list(dataset: Any) -> list[Any]:
    if dataset is None:
        return []
    return list(dataset) if isinstance(dataset, Iterable) else [dataset[i] for i in range(len(dataset))]
