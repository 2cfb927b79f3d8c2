"""verl's and agent-lightning's configuration, carried out by raylight's actors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import PrivateAttr

from raylight.algorithms.policy import PolicyAlgorithm, RunSettings
from raylight.algorithms.verl_config.combine import combine
from raylight.algorithms.verl_config.resolve import Resolution, resolve
from raylight.errors import ConfigError
from raylight.experience.unused_settings import unused_settings


class VERL(PolicyAlgorithm):
    """An algorithm with its engine and learners from verl's nested configuration, whose defaults fill what is
    not given.

    Its fields are the settings that the configuration means. docs/verl.md has the table of keys.

    Args:
        config: nested dicts, dotted keys, or a DictConfig of OmegaConf.
        strict: False turns a key or a value that raylight does not honour into a warning, and leaves it out.

    Raises:
        ConfigError: a key or a value is not honoured, or does not fit; names the nearest keys that are.
    """

    rejects_unused_settings: ClassVar[bool] = False  # verl ignores them, too

    _found: Resolution = PrivateAttr()
    _strict: bool = PrivateAttr()

    def __init__(self, config: Any, *, strict: bool = True) -> None:
        found = resolve(config, strict=strict)
        try:
            super().__init__(**found.algorithm())
        except ConfigError as error:
            raise ConfigError(found.in_words_of_verl(str(error), type(self).__name__)) from None
        self._found, self._strict = found, strict

    def adjust_run_settings(self, given: RunSettings) -> RunSettings:
        """Engine, learners and the rest of a run, where the Trainer leaves them open.

        Raises:
            ConfigError: the Trainer and the configuration contradict each other.
        """
        settings = combine(self._found, given, self._strict)
        notes = tuple(f"nothing reads {name}" for name in unused_settings(self))
        return replace(settings, notes=(*settings.notes, *notes))

    def with_epochs(self, n_epochs: int) -> Self:
        """The same with another number of passes over the tasks.

        Raises:
            ConfigError: the configuration says otherwise.
        """
        total = self._found.found["algorithm.n_epochs"]
        if total.given and total.value != n_epochs:
            raise ConfigError(
                f"the Trainer says num_epochs={n_epochs}, and trainer.total_epochs is {total.value}; give it once"
            )
        if n_epochs < 1:
            raise ConfigError(f"num_epochs={n_epochs} must be at least 1")
        return self.model_copy(update={"n_epochs": n_epochs})
