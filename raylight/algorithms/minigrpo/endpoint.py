"""HTTP endpoint of the model: the engine behind capture and gateway, in the algorithm's process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket
from collections.abc import Iterator
from typing import Any, Self

import uvicorn

from raylight.engines.protocol import Engine
from raylight.errors import EngineStartError, PortInUseError
from raylight.serving.capture.recorder import Recorder
from raylight.serving.gateway.gateway import build_gateway
from raylight.store.client import StoreClient
from raylight.types import Span

FLUSH_TIMEOUT_S = 5.0
LOOPBACK = "127.0.0.1"


class _Server(uvicorn.Server):
    """Server without signal handlers, which the caller's process keeps."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Endpoint:
    """Server of an engine for the agents of a run, as an async context manager.

    On exit the server stops and the last records are sent to the store.

    Args:
        secret: secret of the run, from which the API keys of attempts are derived.
        host: address to listen on; None: one that all runners can reach.
        port: port to listen on; 0: any free port.
        training_temperature: temperature of all calls of training rollouts; None leaves the sampling to the
            agents.

    Attributes:
        url: base URL without `/v1`.
    """

    def __init__(
        self,
        engine: Engine,
        store: StoreClient,
        secret: str,
        host: str | None,
        port: int,
        training_temperature: float | None = None,
    ) -> None:
        self._engine = engine
        self._store = store
        self._secret = secret
        self._training_temperature = training_temperature
        self._host, self._port = host or reachable_host(), port
        self._name = f"minigrpo-{secrets.token_hex(4)}"

    async def __aenter__(self) -> Self:
        self._socket = _listen(self._host, self._port)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{host}:{port}"
        self._recorder = Recorder(functools.partial(self._store.capture, recorder=self._name))
        app = build_gateway(
            await self._engine.app(),
            self._engine,
            self._secret,
            self._recorder,
            self._add_spans,
            history=self._store.chat_history,
            is_finished=self._store.is_attempt_finished,
            check_budgets=self._store.check_budgets,
            training_temperature=self._training_temperature,
        )
        self._server = _Server(
            uvicorn.Config(
                app, log_level="warning", lifespan="off", access_log=False, timeout_graceful_shutdown=1
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._server.should_exit = True
        await asyncio.to_thread(self._engine.close)  # aborts requests in flight
        try:
            await self._serving
        finally:
            await self._recorder.aclose(FLUSH_TIMEOUT_S)
            self._socket.close()

    def check(self) -> None:
        """Raise EngineStartError if the server has stopped."""
        if self._serving.done():
            raise EngineStartError(
                f"the HTTP server at {self.url} has stopped unexpectedly"
            ) from self._serving.exception()

    async def _add_spans(self, spans: list[Span]) -> None:
        await self._store.add_many_spans(spans)


def reachable_host() -> str:
    """Return this node's address in the cluster: loopback in a cluster that a run started, which no other
    machine can join."""
    import ray

    return ray.util.get_node_ip_address() if ray.is_initialized() else LOOPBACK


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, in whose backlog requests wait until the server has started.

    Raises:
        PortInUseError: the port is in use, or the address does not belong to this machine.
    """
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise PortInUseError(
            f"MiniGRPO cannot listen on {host}:{port} ({error.strerror}); choose another port, or 0 for a "
            f"free one"
        ) from None
