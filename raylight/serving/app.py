"""The HTTP face of a replica: routes of the dialects, and the middleware that gives each request its attempt's scope."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable
from typing import Any
from urllib.parse import quote, unquote

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight.agent.keys import key_opens
from raylight.serving.capture import SCOPE, CapturingEngine, Scope
from raylight.serving.chat import complete_chat
from raylight.serving.engine import RequestError
from raylight.traces.otlp import Sink, traces_route

ATTEMPT = re.compile(r"(/rollout/([^/]+)/attempt/([^/]+)(?:/agent/([^/]+))?)(/v1/.*)$")
"""The end of a path as it was sent: ids are percent-encoded, so that each is one segment, whatever characters it has."""


def find_attempt(scope: AsgiScope) -> tuple[Scope, str] | None:
    """The attempt that a request's path names, and the path without it; None if it names none."""
    sent = scope.get("raw_path") or quote(scope["path"]).encode()
    found = ATTEMPT.search(sent.partition(b"?")[0].decode("latin-1"))
    if found is None:
        return None
    rollout, attempt, agent, rest = (part and unquote(part) for part in found.groups()[1:])
    return Scope(rollout, attempt, agent), scope["path"].removesuffix(unquote(found[0])) + rest


class AttemptScope:
    """Turns `/rollout/{rid}/attempt/{aid}/v1/...` into `/v1/...` within that attempt's scope, if the key opens it.

    Other paths need the run's secret as key, except `/health`.
    """

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app = app
        self._secret = secret

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key = _bearer(scope)
        inside = None
        if found := find_attempt(scope):
            inside, path = found
            allowed = key_opens(key, self._secret, inside.rollout_id, inside.attempt_id)
            scope = {**scope, "path": path}
        else:
            allowed = hmac.compare_digest(key.encode(), self._secret.encode()) or scope["path"].endswith("/health")
        if not allowed:
            refusal = RequestError("this API key does not open this address", 401, "authentication_error")
            await _error(refusal)(scope, receive, send)
            return
        token = SCOPE.set(inside)
        try:
            await self._app(scope, receive, send)
        finally:
            SCOPE.reset(token)


def build_app(engine: CapturingEngine, secret: str, spans: Sink) -> Starlette:
    """The ASGI application of one replica.

    Args:
        spans: stores spans that other processes send to `/v1/traces`.
    """

    async def chat(request: Request) -> Response:
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            return _error(RequestError(f"the body is not JSON: {error}"))
        try:
            return JSONResponse(await _unless_disconnected(request, complete_chat(engine, body)))
        except RequestError as error:
            return _error(error)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": engine.model, "object": "model", "owned_by": "raylight"}]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": engine.model})

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        traces_route(spans, _attempt_of_scope),
        Route("/health", health),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(AttemptScope, secret=secret)])
    app.router.redirect_slashes = False  # it would lead out of the attempt's scope, where the attempt's key opens nothing
    return app


def _attempt_of_scope() -> tuple[str, str] | None:
    """The attempt whose address was called; spans sent there belong to it."""
    scope = SCOPE.get()
    return (scope.rollout_id, scope.attempt_id) if scope else None


async def _unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """Await `work`, but cancel it when the client goes away, so that nobody samples for a caller that is gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            raise RequestError("the client closed the connection", 499, "client_disconnected")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()  # no effect on one that is done


def _bearer(scope: AsgiScope) -> str:
    headers = dict(scope["headers"])
    value = headers.get(b"authorization", b"").decode("latin-1")
    return value.removeprefix("Bearer ").strip()


def _error(error: RequestError) -> JSONResponse:
    return JSONResponse({"error": {"message": str(error), "type": error.kind, "param": None, "code": None}}, error.status)
