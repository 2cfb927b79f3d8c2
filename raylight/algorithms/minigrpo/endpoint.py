"""The address that agents call: the engine behind capture and gateway, over HTTP in the algorithm's own process."""

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
    """Signals belong to whoever runs the algorithm."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Endpoint:
    """Serves an engine to the agents of a run. Use `async with`; leaving it ends serving, and hands the last records to the store.

    Args:
        secret: the run's, from which the keys of attempts derive.
        host: None chooses one that all runners can reach.
        port: 0 for any free one.

    Attributes:
        url: base URL without `/v1`.
    """

    def __init__(self, engine: Engine, store: StoreClient, secret: str, host: str | None, port: int) -> None:
        self._engine = engine
        self._store = store
        self._secret = secret
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
        await asyncio.to_thread(self._engine.close)  # so that what is in flight ends at once
        try:
            await self._serving
        finally:
            await self._recorder.aclose(FLUSH_TIMEOUT_S)
            self._socket.close()

    def check(self) -> None:
        """Raise EngineStartError if serving has ended."""
        if self._serving.done():
            raise EngineStartError(f"the server at {self.url} ended by itself") from self._serving.exception()

    async def _add_spans(self, spans: list[Span]) -> None:
        await self._store.add_many_spans(spans)


def reachable_host() -> str:
    """Loopback, or this machine's address where runners may be on other machines."""
    import ray

    if ray.is_initialized() and sum(node["Alive"] for node in ray.nodes()) > 1:
        return ray.util.get_node_ip_address()
    return LOOPBACK


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that requests wait from now on even if the server is not up yet.

    Raises:
        PortInUseError: the port is taken, or the address is not this machine's.
    """
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise PortInUseError(
            f"MiniGRPO cannot listen on {host}:{port} ({error.strerror}); choose another port, or 0"
        ) from None
