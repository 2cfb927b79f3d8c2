"""An engine replica: the deployment class that Ray Serve runs. A thin shell around an engine, its capture and its HTTP routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError

from raylight.config import EngineConfig
from raylight.serving.app import build_app
from raylight.serving.capture import CapturingEngine, Recorder
from raylight.serving.choose import choose_engine
from raylight.serving.weights import POLL_TIMEOUT_S
from raylight.store.client import StoreClient
from raylight.types import Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaSpec:
    """What a replica needs to know; travels to it once."""

    app_name: str
    model_path: str
    model: str
    config: EngineConfig
    secret: str
    seed: int
    store: StoreClient
    weights: Any


@serve.ingress()
class EngineReplica:
    """One engine behind HTTP. It follows the weight board, and removes its own application when the run's actors are gone."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._name = serve.get_replica_context().replica_id.unique_id
        self._following: asyncio.Task[None] | None = None
        try:
            self._engine = build_engine(spec)
        except Exception as error:  # Serve would try again and again; the run wants to know at once
            ray.get(spec.weights.cannot_start.remote(f"{type(error).__name__}: {error}"))
            raise

    async def __serve_build_asgi_app__(self) -> Any:
        try:
            version, box = await self._spec.weights.subscribe.remote(self._name, ray.get_runtime_context().current_actor)
        except RayActorError:
            await self._remove_application()  # else Serve would try to start it for ever
            raise
        if box is not None:
            await self._engine.load_weights(version, await box[0])
        self._following = asyncio.create_task(self._follow(version))
        capturing = CapturingEngine(self._engine, Recorder(self._spec.store.capture))
        return build_app(capturing, self._spec.secret, self._add_spans)

    async def _add_spans(self, spans: list[Span]) -> None:
        await self._spec.store.add_many_spans(spans)

    async def _follow(self, version: int) -> None:
        """Load each new version and say so."""
        board = self._spec.weights
        try:
            while True:
                news = await board.next.remote(self._name, version, POLL_TIMEOUT_S)
                if news is None:
                    continue
                version, box = news
                failure = None
                try:
                    await self._engine.load_weights(version, await box[0])
                except Exception as error:  # whatever it is, the publisher must hear it instead of waiting
                    failure = f"{type(error).__name__}: {error}"
                await board.acknowledge.remote(self._name, version, failure)
        except RayActorError:
            await self._remove_application()
        except Exception:  # nobody awaits this task; the publisher will miss the acknowledgement
            logger.exception("%s no longer follows new weights", self._name)
            raise

    async def _remove_application(self) -> None:
        logger.warning("the run that started %s is gone; removing the application", self._spec.app_name)
        await asyncio.to_thread(serve.delete, self._spec.app_name, _blocking=False)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # construction failed half-way
            self._engine.close()


def build_engine(spec: ReplicaSpec) -> Any:
    """The engine that the configuration asks for."""
    import torch

    from raylight.serving.transformers_engine import TransformersEngine

    torch.set_num_threads(max(1, int(spec.config.num_cpus)))
    assert choose_engine(spec.config.kind) == "transformers", "the only engine so far"
    gpu = spec.config.num_gpus > 0 and bool(ray.get_gpu_ids())
    config = spec.config
    return TransformersEngine(
        spec.model_path, spec.model, dtype=config.dtype, slots=config.max_concurrent, max_waiting=config.max_waiting,
        max_model_len=config.max_model_len, seed=spec.seed, device="cuda" if gpu else "cpu",
    )  # fmt: skip
