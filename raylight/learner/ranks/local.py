"""The learner `local`: it trains, in this process, the module that an engine samples from."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from raylight.config import LearnerConfig
from raylight.engines.protocol import LoraAdapter
from raylight.errors import ConfigError, DeviceMemoryError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.batches.token_records import RowRecord
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.protocol import Learner, LearnerSettings
from raylight.learner.state.checkpoints import TrainingStates
from raylight.types import JsonObject

if TYPE_CHECKING:
    from raylight.engines.transformers.engine import TrainableEngine
    from raylight.learner.updates.policy import Policy


class LocalLearner(Learner):
    """A learner of one rank in the driver's process.

    The engine and the learner share one copy of the weights, so nothing is published: a token that the engine
    samples after an update has the new version. A failure is the driver's, so nothing restarts; a run
    continues from its training state.

    Args:
        load: returns the engine, once it has loaded the model.
    """

    _engine: TrainableEngine

    def __init__(self, load: Callable[[], Awaitable[TrainableEngine]], config: LearnerConfig) -> None:
        self._load, self._config = load, config
        self._policy: Policy
        self._rank: Any = None
        self._owns_group = False

    async def setup(self, model_path: str, settings: LearnerSettings, total_steps: int, seed: int) -> None:
        """Add the adapter and the optimizer to the engine's module, before its first request.

        Raises:
            ConfigError: the settings do not fit the model, or this process trains something else.
        """
        self._engine = await self._load()
        assert isinstance(settings, PolicySettings), "a local learner trains a policy"
        await asyncio.to_thread(self._setup, model_path, settings, total_steps, seed)

    def _setup(self, model_path: str, settings: PolicySettings, total_steps: int, seed: int) -> None:
        import torch

        from raylight.learner.ranks.model_rank import ModelRank
        from raylight.learner.updates.policy import Policy

        self._join_group()
        # transformers calls a function that torch has renamed, in every pass
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        torch.manual_seed(seed)
        self._policy = Policy(model_path, self._config, settings, total_steps, self._engine.module)
        self._rank = ModelRank(self._policy)

    def _join_group(self) -> None:
        """Make this process the only rank of a group, which the learners' code expects."""
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            self._owns_group = True
        elif dist.get_world_size() > 1:
            raise ConfigError(
                f"this process is one of {dist.get_world_size()} of a torch.distributed group, where a local "
                "learner cannot train; start the run in a separate process, or use learner.kind='ranks'"
            )

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """Update the policy with a batch between two decoding steps, and return metrics.

        Raises:
            DeviceMemoryError: the device ran out of memory.
        """

        def update() -> tuple[int, dict[str, float]]:
            import torch

            start = time.perf_counter()
            try:
                metrics = self._policy.update(batch)
            except torch.OutOfMemoryError as error:
                raise DeviceMemoryError(
                    f"the update of {len(batch.rows)} rows ran out of memory ({error}); lower "
                    "max_tokens_per_micro_batch, max_model_len or max_concurrent (the key-value cache), or "
                    "set gradient_checkpointing=True"
                ) from None
            finally:
                self._policy.engine.optimizer_zero_grad()
                self._engine.module.eval()
            return self._policy.version, metrics | {"learner/update_s": time.perf_counter() - start}

        return await self._engine.change_weights(update)

    async def row_records(self) -> list[RowRecord]:
        return self._policy.row_records

    async def logprobs(self, ids: list[int], model: str = "") -> list[float]:
        return await self._engine.run_between_steps(lambda: self._rank.logprobs(ids))

    async def export_adapter(self, model: str = "") -> tuple[int, LoraAdapter]:
        """Return the current version and the adapter."""
        return await self._engine.run_between_steps(self._rank.export_adapter)

    async def save(self, folder: str, adapters: Mapping[str, object] | None = None) -> None:
        """Write the model in Hugging Face format, and the adapter to its subfolder `adapter`."""
        await self._engine.run_between_steps(lambda: self._rank.save(folder))

    async def save_state(
        self, url: str, step: int, metadata: JsonObject, keep: int, timeout_s: float
    ) -> None:
        """Copy the training state of a step, and write it in the background, after the last one."""
        await self.finish_saving(timeout_s)
        content = TrainingStates(url).new_content(step)
        await self._engine.run_between_steps(
            lambda: self._rank.save_state(url, step, content, metadata, keep, timeout_s)
        )

    async def finish_saving(self, timeout_s: float) -> None:
        """Wait until the last training state is written."""
        await asyncio.to_thread(self._rank.finish_saving, timeout_s)

    async def load_state(self, url: str, step: int, version: int) -> None:

        def load() -> tuple[int, None]:
            self._rank.load_state(url, step, version)
            return version, None

        await self._engine.change_weights(load)

    def stop(self) -> None:
        """Leave the process group."""
        import torch.distributed as dist

        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False
