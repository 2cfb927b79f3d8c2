"""Limit of the requests at an engine that does not limit them itself."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from raylight.config import EngineConfig
from raylight.engines.protocol import Engine
from raylight.http.errors import RequestError, error_response


class LimitedEngine:
    """An engine whose application answers requests beyond a limit with status 503.

    Ray Serve cannot enforce the limit: it also counts requests whose bodies still arrive. Everything but the
    application is that of the engine inside.

    Args:
        engine: the engine inside.
        config: its limit is `max_concurrent` + `max_waiting` requests.
    """

    def __init__(self, engine: Engine, config: EngineConfig) -> None:
        self._engine = engine
        self._limit, self._max_waiting = config.max_concurrent + config.max_waiting, config.max_waiting
        self._requests = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def app(self) -> ASGIApp:
        inner = await self._engine.app()

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            if scope.get("method") != "POST":  # lists of models, which cost nothing
                await inner(scope, receive, send)
                return
            if self._requests >= self._limit:
                text = f"{self._max_waiting} requests are waiting already; try again later"
                await error_response(RequestError(text, 503, "overloaded_error"))(scope, receive, send)
                return
            self._requests += 1
            try:
                await inner(scope, receive, send)
            finally:
                self._requests -= 1

        return limited
