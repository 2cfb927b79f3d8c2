"""VERL: verl's and agent-lightning's configuration as an algorithm of raylight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import ClassVar, Self

import numpy as np
from omegaconf import OmegaConf
from pydantic import PrivateAttr

from raylight.algorithms.policy import PolicyAlgorithm, RunSettings
from raylight.algorithms.verl_config.resolution import Resolution, resolve
from raylight.algorithms.verl_config.run_settings import combine_settings
from raylight.errors import ConfigError
from raylight.experience.settings.policy_settings import unused_settings
from raylight.types import JsonObject


class VERL(PolicyAlgorithm):
    """Algorithm, engine and learner settings from verl's nested configuration, with verl's defaults.

    Its fields are the settings that the configuration resolves to. docs/verl.md has the table of keys.

    Args:
        config: nested dicts, dotted keys, or OmegaConf's DictConfig.
        strict: False turns a key or a value that raylight does not support into a warning, and ignores it.

    Raises:
        ConfigError: a key or a value is not supported, or out of range; the message has the nearest supported
            keys.
    """

    rejects_unused_settings: ClassVar[bool] = False  # verl ignores them, too

    _resolution: Resolution = PrivateAttr()
    _strict: bool = PrivateAttr()
    _config: object = PrivateAttr()

    def __init__(self, config: object, *, strict: bool = True) -> None:
        resolution = resolve(config, strict=strict)
        try:
            super().__init__(**resolution.algorithm_settings())
        except ConfigError as error:
            raise ConfigError(resolution.with_verl_keys(str(error), type(self).__name__)) from None
        self._resolution, self._strict, self._config = resolution, strict, config

    def arguments(self) -> JsonObject:
        """Return the arguments that construct an equal algorithm, as JSON values."""
        return {"config": _to_plain(self._config), "strict": self._strict}

    def adjust_run_settings(self, settings: RunSettings) -> RunSettings:
        """Return the settings of a run: the Trainer's, and the configuration's where the Trainer has none.

        Raises:
            ConfigError: the Trainer and the configuration contradict each other.
        """
        unread = self.unread_flat_keys(self._resolution.algorithm_settings()) + unused_settings(self)
        combined = combine_settings(self._resolution, settings, self._strict)
        notes = tuple(f"nothing reads {name}" for name in unread)
        return replace(combined, notes=(*combined.notes, *notes))

    def with_epochs(self, n_epochs: int) -> Self:
        """Return a copy with another number of passes over the training tasks.

        Raises:
            ConfigError: the configuration has another number.
        """
        total = self._resolution.settings["algorithm.n_epochs"]
        if total.from_user and total.value != n_epochs:
            raise ConfigError(
                f"the Trainer has num_epochs={n_epochs}, and the configuration has "
                f"trainer.total_epochs={total.value}; remove one"
            )
        if n_epochs < 1:
            raise ConfigError(f"num_epochs={n_epochs} must be at least 1")
        copy = self.model_copy(update={"n_epochs": n_epochs})
        copy._config = {**self.arguments()["config"], "trainer.total_epochs": n_epochs}
        return copy

    def steps(self, n_train: int) -> int:
        """Return the number of steps, as verl: `total_training_steps`, or fewer if `total_epochs` passes end
        before. With `n_train` 0 their number is unknown, and only `total_training_steps` counts."""
        if self.n_steps is None or not n_train:
            return super().steps(n_train)
        return min(self.n_steps, -(-n_train * self.n_epochs // self.tasks_per_step))

    def repeated_tasks(self, n_train: int) -> int:
        return max(self.steps(n_train) * self.tasks_per_step - n_train * self.n_epochs, 0) if n_train else 0


def _to_plain(value: object) -> object:
    """Return a configuration as YAML values: Python's own types, with paths as text."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, PurePath) else value
