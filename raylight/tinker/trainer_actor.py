"""The trainer of all tenants as a Ray actor around LoraTrainer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayTaskError

from raylight.engines.protocol import LoraAdapter
from raylight.errors import AdapterLostError, EngineStartError, LearnerLostError, summarize_ray_error
from raylight.tinker.datums import Batch
from raylight.tinker.requests import AdamParams, LoraSpec

TRAINER_NAME = "trainer"
"""Name of the actor, in the namespace of the server."""
DEAD = (RayActorError, OutOfMemoryError)
"""Errors of Ray for an actor that is gone; the second is no RayActorError."""
MAX_RESTARTS = 20
"""Deaths of the trainer after which it is started again."""


class TrainerActor:
    """One process with the model and the adapters of all tenants."""

    def __init__(self, model_path: str, dtype: str, max_tokens: int, threads: int) -> None:
        import torch

        from raylight.learner.local_device import select_device
        from raylight.tinker.lora_trainer import LoraTrainer

        torch.set_num_threads(threads)
        self._trainer = LoraTrainer(model_path, dtype, select_device("auto"), max_tokens)

    def ready(self) -> None:
        """Return once the model is loaded."""

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the trainer."""
        return getattr(self._trainer, method)(*args)


class TrainerClient:
    """The actor as the server calls it; `LoraTrainer` documents the methods.

    Ray starts an actor that died again, without the adapters of its tenants. The methods raise
    AdapterLostError then, and LearnerLostError if it has died too often.

    Args:
        timeout_s: longest time until the actor has loaded the model.
    """

    def __init__(
        self,
        namespace: str,
        model_path: str,
        dtype: str,
        max_tokens: int,
        num_cpus: float,
        num_gpus: float,
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        threads = max(1, round(num_cpus))
        self._actor: Any = (
            ray.remote(TrainerActor)
            .options(
                name=TRAINER_NAME,
                namespace=namespace,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                max_restarts=MAX_RESTARTS,
            )
            .remote(model_path, dtype, max_tokens, threads)
        )

    async def wait_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            EngineStartError: it cannot be loaded, or not in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._actor.ready.remote()
        except TimeoutError:
            raise EngineStartError(
                f"the trainer did not start within {self._timeout_s:g} s; check that the cluster has the "
                "CPUs and GPUs that it asks for beside the engine, or raise --start-timeout"
            ) from None
        except DEAD as error:
            raise EngineStartError(f"the trainer did not start: {summarize_ray_error(error)}") from None

    async def create(self, model_id: str, spec: LoraSpec) -> None:
        await self._wait_restarted()
        await self._call("create", model_id, spec)

    async def remove(self, model_id: str) -> None:
        await self._call("remove", model_id)

    async def forward_backward(
        self, model_id: str, batch: Batch, backward: bool
    ) -> tuple[float, list[np.ndarray]]:
        return await self._call("forward_backward", model_id, batch, backward)

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        return await self._call("optim_step", model_id, params)

    async def export(self, model_id: str) -> LoraAdapter:
        return await self._call("export", model_id)

    async def export_optimizer(self, model_id: str) -> dict[str, np.ndarray]:
        return await self._call("export_optimizer", model_id)

    async def load(
        self, model_id: str, adapter: LoraAdapter, optimizer: dict[str, np.ndarray] | None
    ) -> None:
        await self._call("load", model_id, adapter, optimizer)

    def stop(self) -> None:
        """End the actor."""
        ray.kill(self._actor)

    async def _wait_restarted(self) -> None:
        """Wait until an actor that died has loaded the model again."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._actor.ready.options(max_task_retries=-1).remote()
        except TimeoutError:
            raise _lost(f"it did not start again within {self._timeout_s:g} s") from None
        except DEAD as error:
            raise _lost(summarize_ray_error(error)) from None

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self._actor.call.remote(method, *args)
        except RayTaskError as error:
            raise error.cause from None
        except ActorUnavailableError:
            raise AdapterLostError("the trainer has died and is started again") from None
        except DEAD as error:
            raise _lost(summarize_ray_error(error)) from None


def _lost(reason: str) -> LearnerLostError:
    return LearnerLostError(
        f"the trainer is gone, and with it the adapters in training: {reason}; start the server again, and "
        "continue from the saved states"
    )
