"""The learner `simulated`: it takes the time of an update and trains nothing, to test rollouts under load."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

from raylight._utils.aio import pause
from raylight.config import LearnerConfig
from raylight.errors import ConfigError, TransferBrokenError, WeightSyncError
from raylight.experience.batches.batch import TrainBatch
from raylight.learner.protocol import Learner
from raylight.learner.state.checkpoints import TrainingStates
from raylight.types import JsonObject
from raylight.weights.client import call_coordinator, call_until_answered
from raylight.weights.orders import Phase
from raylight.weights.sender import PublicationSettings

MAX_ATTEMPTS = 3
"""Number of transfers in a row that may break before a publication fails."""


class SimulatedLearner(Learner):
    """A learner without a model.

    An update takes `step_s` seconds and a publication `sync_s`. The engines keep their weights; they are told
    each version, so that tokens carry it. Training states contain the position of the run and no weights.

    Args:
        wait: waits for a number of seconds.
    """

    def __init__(self, config: LearnerConfig, wait: Callable[[float], Awaitable[None]] = pause) -> None:
        self._config, self._wait = config, wait
        self.version = 0

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """Take the time of an update, and return metrics."""
        start = time.perf_counter()
        await self._wait(self._config.step_s)
        self.version += 1
        return {"learner/rows": float(len(batch.rows)), "learner/update_s": time.perf_counter() - start}

    async def publish_weights(self, version: int, token: str, settings: PublicationSettings) -> None:
        """Have the replicas that lack a version sample under its number, after `sync_s` seconds.

        Raises:
            WeightSyncError: several transfers in a row broke, or the coordinator is gone.
        """
        coordinator, limit, broken = settings.coordinator, settings.limit_s, 0
        while await call_until_answered(coordinator, "begin_transfer", version, token, within=limit):
            try:
                await self._run_phase("start", settings)
                await self._wait(self._config.sync_s)
                await self._run_phase("finish", settings)
                broken = 0
            except TransferBrokenError as error:
                broken += 1
                if broken == MAX_ATTEMPTS:
                    raise WeightSyncError(
                        f"version {version} could not be announced to the engines: {error}"
                    ) from None

    async def _run_phase(self, kind: Phase, settings: PublicationSettings) -> None:
        """Have all replicas of the transfer execute a phase of vLLM's protocol."""
        await call_coordinator(
            settings.coordinator, "run_phase", kind, {}, settings.timeout_s, within=settings.limit_s
        )

    async def export_adapter(self, model: str = "") -> NoReturn:
        """Raise ConfigError: the learner has no adapter."""
        raise ConfigError("a simulated learner has no adapter; leave learner.lora out")

    async def save(self, folder: str, adapters: Mapping[str, object] | None = None) -> None:
        """Make the folder, which stays empty."""
        await asyncio.to_thread(os.makedirs, folder, exist_ok=True)

    async def save_state(
        self, url: str, step: int, metadata: JsonObject, keep: int, timeout_s: float
    ) -> None:
        """Save the position of the run, from which it resumes."""

        def save() -> None:
            states = TrainingStates(url)
            states.complete(step, metadata)
            states.prune(keep)

        await asyncio.to_thread(save)

    async def load_state(self, url: str, step: int, version: int) -> None:
        self.version = version
