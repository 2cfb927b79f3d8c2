"""MiniGRPO: GRPO on an adapter in one process, without verl and without learner actors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raylight.algorithms.base import Algorithm
from raylight.algorithms.minigrpo.settings import MiniSettings
from raylight.errors import DatasetError


class MiniGRPO(Algorithm):
    """Group relative policy optimisation (https://arxiv.org/abs/2402.03300) of a LoRA adapter, for a GPU of 4 GB or a CPU.

    The process that calls `Trainer.fit` holds the model, once: agents run in the runners as ever and call it over HTTP, and between
    two decoding steps it is trained where it is. The adapter is saved in peft's format in `checkpoint` of the run directory.

    With `backend="trl"` TRL's GRPOTrainer does both in this process; it knows single-turn prompts only, so that `prompt_of` and
    `reward_of` take the place of the agent, which is not called.

    Args:
        settings: the fields of `MiniSettings`; `model` is needed.

    Raises:
        ConfigError: a setting is unknown, does not fit, or would not be read.
    """

    serves_model = True

    def __init__(self, **settings: Any) -> None:
        self.settings = MiniSettings(**settings)

    @property
    def n_epochs(self) -> int:
        """Passes over the training tasks."""
        return self.settings.n_epochs

    @n_epochs.setter
    def n_epochs(self, n_epochs: int) -> None:
        self.settings = MiniSettings(**dict(self.settings) | {"n_epochs": n_epochs})

    def total_steps(self, n_train: int) -> int:
        return self.settings.steps(n_train)

    def resolved(self) -> dict[str, Any]:
        settings = self.settings.model_dump(mode="json")
        settings["rollout"]["retry_condition"] = sorted(settings["rollout"]["retry_condition"])
        return settings

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Train for the planned number of steps.

        Raises:
            DatasetError: there are no training tasks.
            DeviceMemoryError: the device has less memory than the run would need.
            ConfigError: TRL is asked for and not installed.
        """
        tasks, val_tasks = _listed(train_dataset), _listed(val_dataset)
        if not tasks:
            raise DatasetError("train_dataset is missing; pass a list of tasks")
        if self.settings.backend == "trl":
            from raylight.algorithms.minigrpo.trl_backend import train
        else:
            from raylight.algorithms.minigrpo.loop import train
        await train(self.settings, self.get_store(), self.get_run_context(), tasks, val_tasks)


def _listed(dataset: Any) -> list[Any]:
    if dataset is None:
        return []
    return list(dataset) if isinstance(dataset, Iterable) else [dataset[i] for i in range(len(dataset))]
