"""HTTP endpoint of an engine in this process, behind capture and gateway."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn, Self

import uvicorn

from raylight.config import EngineConfig
from raylight.engines.protocol import Engine, EngineLoad
from raylight.errors import EngineStartError, PortInUseError
from raylight.http.slow_clients import ImpatientProtocol
from raylight.ray_metrics.reporter import MetricReporter
from raylight.serving.capture.recorder import Recorder
from raylight.serving.gateway.gateway import build_gateway
from raylight.serving.gateway.metrics import Metrics
from raylight.store.client import StoreClient

FLUSH_TIMEOUT_S = 5.0
LOOPBACK = "127.0.0.1"


class ThreadServer(uvicorn.Server):
    """Server without signal handlers, which the caller's process keeps."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Endpoint:
    """Server of an engine for the agents of a run, as an async context manager.

    On exit the server stops and the last records are sent to the store.

    Args:
        secret: secret of the run, from which the API keys of attempts are derived.
        config: settings of the engine. Without a `host`, the server listens on an address that all runners
            can reach; without a `port`, on any free one.
        training_temperature: temperature of all calls of training rollouts; None leaves the sampling to the
            agents.
        run: name of the run in Ray's metrics; None reports none.

    Attributes:
        url: base URL without `/v1`.
    """

    def __init__(
        self,
        engine: Engine,
        store: StoreClient,
        secret: str,
        config: EngineConfig,
        training_temperature: float | None = None,
        run: str | None = None,
    ) -> None:
        self._engine, self._store, self._secret, self._config = engine, store, secret, config
        self._training_temperature = training_temperature
        self._metrics = Metrics()
        self._name = f"local-{secrets.token_hex(4)}"
        self._reporter = None if run is None else MetricReporter(self._metrics.collect, run, replica="local")

    async def __aenter__(self) -> Self:
        config = self._config
        self._socket = listen(
            config.host or reachable_host(),
            config.port or 0,
            "the model",
            "choose another port, or none for a free one",
        )
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{host}:{port}"
        self._recorder = Recorder(
            functools.partial(self._store.capture, recorder=self._name), write_images=self._store.write_images
        )
        app = build_gateway(
            await self._engine.app(),
            self._engine,
            self._secret,
            self._recorder,
            self._store,
            config,
            training_temperature=self._training_temperature,
            metrics=self._metrics,
        )
        self._server = ThreadServer(
            uvicorn.Config(
                app,
                log_level="warning",
                lifespan="off",
                access_log=False,
                timeout_graceful_shutdown=1,
                http=ImpatientProtocol,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        if self._reporter is not None:
            self._reporter.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._reporter is not None:
            self._reporter.stop()
        self._server.should_exit = True
        await asyncio.to_thread(self._engine.close)  # aborts requests in flight
        try:
            await self._serving
        finally:
            await self._recorder.aclose(FLUSH_TIMEOUT_S)
            self._socket.close()

    def load(self) -> EngineLoad:
        """Return the engine's load, with the time for which it had no request."""
        return replace(self._engine.load(), idle_s=self._metrics.idle_s)

    async def watch(self) -> NoReturn:
        """Wait until the server has stopped.

        Raises:
            EngineStartError: it has stopped.
        """
        await asyncio.wait([self._serving])
        raise EngineStartError(
            f"the HTTP server at {self.url} has stopped unexpectedly"
        ) from self._serving.exception()


def reachable_host() -> str:
    """Return this node's address in the cluster: loopback in a cluster that a run started, which no other
    machine can join."""
    import ray

    return ray.util.get_node_ip_address() if ray.is_initialized() else LOOPBACK


def listen(host: str, port: int, what: str, remedy: str) -> socket.socket:
    """Return a listening socket, in whose backlog requests wait until the server has started.

    Args:
        what: what is served, for the error.
        remedy: what the user may do about it.

    Raises:
        PortInUseError: the port is in use, or the address does not belong to this machine.
    """
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise PortInUseError(
            f"{what} cannot be served on {host}:{port} ({error.strerror}); {remedy}"
        ) from None
