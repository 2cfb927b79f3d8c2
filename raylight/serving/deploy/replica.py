"""An engine replica: the deployment class that Ray Serve runs. A thin shell around an engine and the gateway in front of it."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylight.config import EngineConfig, cpu_threads
from raylight.engines.protocol import Engine
from raylight.serving.capture.recorder import Recorder
from raylight.serving.gateway.gateway import build_gateway
from raylight.serving.gateway.metrics import Metrics
from raylight.store.client import StoreClient
from raylight.types import Span
from raylight.weight_sync.follower import Follower

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ReplicaSpec:
    """What a replica needs to know; travels to it once."""

    app_name: str
    model_path: str
    model: str
    """The name under which it is served."""
    config: EngineConfig
    secret: str | None
    """The key of the run, from which those of the attempts derive; None lets everybody in."""
    seed: int
    store: StoreClient | None
    """Where calls are recorded; None records nothing."""
    board: Any
    """The actor from which the replica takes its orders."""
    route: str | None = None
    """Where Serve mounts the application; None: at its name."""

    @property
    def prefix(self) -> str:
        return self.route or f"/{self.app_name}"


class ReplicaRuntime:
    """What surrounds an engine in its replica: it follows the board's orders, records calls, and answers HTTP.

    It removes its own application when the run's actors are gone.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._name = serve.get_replica_context().replica_id.unique_id
        self._engine: Engine | None = None
        self._follower: Follower | None = None
        self._recorder: Recorder | None = None
        self._following: asyncio.Task[None] | None = None

    async def cannot_start(self, error: Exception) -> None:
        """Serve would try again and again; the run wants to know at once."""
        await self._spec.board.cannot_start.remote(f"{type(error).__name__}: {error}")

    async def wrap(self, engine: Engine, extra: Callable[[], bytes] | None = None) -> ASGIApp:
        """Bring the engine up to date, and build the application that agents call.

        Args:
            extra: the engine's own metrics, as Prometheus reads them.
        """
        self._engine = engine
        spec, config = self._spec, self._spec.config
        self._follower = follower = Follower(self._name, engine, spec.board, self._remove_application)
        await follower.catch_up([spec.board.stay.remote()])
        self._following = asyncio.create_task(follower.follow())
        store = spec.store
        self._recorder = (
            Recorder(functools.partial(store.capture, recorder=self._name)) if store is not None else None
        )
        gateway = build_gateway(
            await engine.app(),
            engine,
            spec.secret,
            self._recorder,
            self._add_spans if store is not None else None,
            max_body=config.max_body_bytes,
            token_in=config.token_in,
            history=store.chat_history if store is not None else None,
            metrics=Metrics(extra),
            is_over=store.is_attempt_finished if store is not None else None,
        )
        return naming(gateway, self._name)

    async def check_health(self) -> None:
        if self._engine is not None and self._follower is not None:
            await self._engine.check_health()
            self._follower.check_health()

    async def close(self) -> None:
        """Stop computing, hand the last records to the store, and leave the fleet; the store then waits for no other."""
        if self._engine is not None:
            self._engine.close()
        if self._recorder is not None:
            await self._recorder.aclose(FLUSH_TIMEOUT_S)
        if self._follower is not None:
            await self._follower.close()

    async def _add_spans(self, spans: list[Span]) -> None:
        assert self._spec.store is not None
        await self._spec.store.add_many_spans(spans)

    async def _remove_application(self) -> None:
        logger.warning("the run that started %s is gone; removing the application", self._spec.app_name)
        await asyncio.to_thread(serve.delete, self._spec.app_name, _blocking=False)


def naming(app: ASGIApp, replica: str) -> ASGIApp:
    """The application, whose answers tell in `x-raylight-replica` who gave them."""
    header = (b"x-raylight-replica", replica.encode())

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await app(scope, receive, send_named)

    return named


@serve.ingress()
class EngineReplica:
    """The transformers engine, or one upstream, behind HTTP."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._shell = ReplicaRuntime(spec)
        self._spec = spec

    async def __serve_build_asgi_app__(self) -> Any:
        try:
            engine = build_engine(self._spec)
        except Exception as error:
            await self._shell.cannot_start(error)
            raise
        return await self._shell.wrap(engine)

    async def check_health(self) -> None:
        await self._shell.check_health()

    async def __del__(self) -> None:  # Serve awaits it at the end
        await self._shell.close()


def build_engine(spec: ReplicaSpec) -> Engine:
    """The engine that the settings ask for; vLLM has a deployment of its own."""
    return {"transformers": _transformers, "upstream": _upstream}[spec.config.kind](spec)


def _transformers(spec: ReplicaSpec) -> Engine:
    import torch

    from raylight.engines.transformers.engine import TransformersEngine

    config = spec.config
    torch.set_num_threads(cpu_threads(config))
    gpu = config.num_gpus > 0 and bool(ray.get_gpu_ids())
    return TransformersEngine(
        spec.model_path,
        spec.model,
        dtype=config.dtype,
        slots=config.max_concurrent,
        max_waiting=config.max_waiting,
        max_model_len=config.max_model_len,
        seed=spec.seed,
        device="cuda" if gpu else "cpu",
        **config.args,
    )


def _upstream(spec: ReplicaSpec) -> Engine:
    from raylight.engines.upstream import UpstreamEngine

    config = spec.config
    assert config.url is not None
    key = config.api_key.get_secret_value() if config.api_key else None
    return UpstreamEngine(config.url, key, spec.model, config.upstream_model)
