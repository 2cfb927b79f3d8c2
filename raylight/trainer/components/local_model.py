"""The model of a run with a local learner, which its own process serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, cast

from raylight.config import LearnerConfig
from raylight.runner.scaling import Resizable
from raylight.serving.local_endpoint import Endpoint
from raylight.store.client import StoreClient
from raylight.trainer.components.served_model import ServedModel
from raylight.trainer.spec.settings import ServingSettings
from raylight.weights.local_replica import LocalReplica


class LocalModel(ServedModel):
    """An engine in this process whose module the learner trains, behind an HTTP server."""

    is_probed = False  # the server ends only with this process, see `watches`
    _store: StoreClient
    _learner: LearnerConfig
    _endpoint: Endpoint

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._loaded: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Take the place of the coordinator: there is one replica."""
        self._stack = stack
        self.coordinator = cast("Any", LocalReplica(self._logprobs, lambda: self._endpoint.load()))

    async def _logprobs(self, ids: list[int]) -> list[float]:
        return await (await self.engine()).logprobs(ids)

    async def engine(self) -> Any:
        """Return the engine, once it has loaded the model."""
        return await asyncio.shield(self._loaded)

    def prepare(self, seed: int, rollouts: int = 0) -> None:
        self._seed = seed

    async def start(self) -> str:
        """Load the model, and listen for requests; return the model's base URL. Agents learn it only when the
        learner is set up.

        Raises:
            DeviceMemoryError: the run needs more memory than the device has.
            PortInUseError: the requested port is taken.
        """
        model, show = self.settings, self._context.show_stage
        engine = await asyncio.to_thread(load_engine, model, self._learner, self._seed, show)
        self._stack.push_async_callback(asyncio.to_thread, engine.close)
        self._endpoint = Endpoint(
            engine,
            self._store,
            self._context.secret or "",
            model.engine,
            model.training_temperature,
            self._context.name,
        )
        await self._stack.enter_async_context(self._endpoint)
        self._loaded.set_result(engine)
        self._set_llm(self._endpoint.url, model.name)
        return self._endpoint.url

    @property
    def resizable(self) -> dict[str, Resizable]:
        return {}

    def watches(self) -> list[Coroutine[object, object, object]]:
        return [self._endpoint.watch()]


def load_engine(
    model: ServingSettings, learner: LearnerConfig, seed: int, report: Callable[[str], None]
) -> Any:
    """Load a model into a `TrainableEngine` on this machine's device, after a check of its memory.

    Args:
        report: receives the estimate of the memory.

    Raises:
        DeviceMemoryError: the run needs more memory than the device has.
        ConfigError: torch has no such device.
    """
    import torch

    from raylight.engines.transformers.engine import TrainableEngine
    from raylight.learner.model.local_device import select_device
    from raylight.trainer.cluster_fit.local_memory import check_memory

    engine, device = model.engine, select_device(learner.device)
    limit = None if learner.memory_limit_gb is None else int(learner.memory_limit_gb * 1e9)
    report(f"the run needs {check_memory(model.model_path, engine, learner, device, limit)}")
    if learner.num_threads is not None:
        torch.set_num_threads(learner.num_threads)
    return TrainableEngine(
        model.model_path,
        model.name,
        dtype=engine.dtype,
        slots=engine.max_concurrent,
        max_waiting=engine.max_waiting,
        max_model_len=engine.max_model_len,
        seed=seed,
        device=str(device),
        **engine.args,
    )
