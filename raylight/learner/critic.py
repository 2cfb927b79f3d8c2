"""The critic on verl's FSDP2 engine: values, and one update. One object per rank."""

from __future__ import annotations

from raylight.config import LearnerConfig
from raylight.learner.engines import build_critic
from raylight.learner.rows import Row
from raylight.learner.settings import CriticSettings


class Critic:
    """The value model of one rank; every method is a collective that all ranks call alike."""

    def __init__(self, model_path: str, config: LearnerConfig, settings: CriticSettings, total_steps: int) -> None:
        self._config, self._settings = config, settings
        self.engine = build_critic(settings.model or model_path, config, settings, total_steps)

    def add_values(self, rows: list[Row]) -> None:
        """Set each row's `values`: one for each token of its response, of what was there before it."""
        raise NotImplementedError

    def update(self, rows: list[Row]) -> dict[str, float]:
        """Fit the values to the rows' `returns`; `rows` are all of the batch, the same on all ranks. Returns metrics."""
        raise NotImplementedError
