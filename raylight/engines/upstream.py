"""The engine `upstream`: a model at any OpenAI-compatible URL.

Its calls are traced but not trained on, because its tokens and weights are not available.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

import httpx2
import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylight._utils.no_proxy import is_loopback
from raylight.engines.protocol import EngineLoad, EngineSettings, InferenceOnlyEngine
from raylight.errors import ConfigError
from raylight.http.errors import RequestError, UnknownModelError, error_body, error_response, read_error
from raylight.http.request import json_request, until_disconnect
from raylight.http.sse import sse_bytes
from raylight.types import JsonObject

logger = logging.getLogger(__name__)

FORWARDED_PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
FORWARDED_HEADERS = ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "x-request-id")
"""Response headers of the upstream that are passed to the client."""
FORWARDED_HEADER_PREFIXES = ("x-ratelimit-", "openai-")
CONNECT_TIMEOUT_S = 10.0
NO_QUOTA = "insufficient_quota"
"""Code of a status 429 that no retry changes."""


def build_engine(settings: EngineSettings) -> UpstreamEngine:
    """Make the engine that forwards to `settings.config.url`."""
    config = settings.config
    if config.url is None:
        raise ConfigError("EngineConfig.url is missing: an upstream engine needs the base URL of its model")
    key = config.api_key.get_secret_value() if config.api_key else None
    return UpstreamEngine(config.url, key, settings.model, config.upstream_model)


class UpstreamEngine(InferenceOnlyEngine):
    """Forwards each request to the upstream, and its response to the client as it arrives.

    Args:
        url: base URL of the upstream as OpenAI's client takes it, usually ending in `/v1`.
        api_key: the upstream's key; None sends none. The key that an agent sends is never forwarded.
        model: name under which the model is served here.
        upstream_model: the upstream's name of the model; None: the same name.
        timeout_s: longest silence of the upstream, before a response or within it.
        max_connections: concurrent connections to the upstream; further requests wait for one, up to
            `timeout_s`.
        transport: replaces the network, in tests.

    Raises:
        ConfigError: the URL is invalid.
    """

    not_trainable = "an upstream model cannot be trained: its weights and tokens are not available here"

    def __init__(
        self,
        url: str,
        api_key: str | None,
        model: str,
        upstream_model: str | None = None,
        *,
        timeout_s: float = 600.0,
        max_connections: int = 1000,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.model = model
        self._upstream_model = upstream_model or model
        self._base_url = _parse_base_url(url)
        self._headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": "raylight",
        }
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s)),
            limits=httpx2.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            transport=transport,
            trust_env=not is_loopback(url),  # no proxy leads to this machine
        )
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_flight: set[asyncio.Future[None]] = set()

    async def app(self) -> ASGIApp:
        self._loop = asyncio.get_running_loop()
        return self._respond

    async def sleep(self, level: int = 1) -> str | None:
        return "an upstream model uses no memory here"

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._in_flight))

    async def check_health(self) -> None:
        """Raise only if closed: an upstream outage may pass, and a new replica would not end it."""
        if self._closed:
            raise RuntimeError("this engine is closed")

    def close(self) -> None:
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel_requests)

    def _cancel_requests(self) -> None:
        for request in self._in_flight:
            request.cancel()
        asyncio.ensure_future(self._client.aclose())  # noqa: RUF006  the replica is shutting down

    # the application

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        tracked = _TrackedSend(send)
        try:
            if scope["path"] == "/v1/models" and scope["method"] == "GET":
                await JSONResponse(self._models())(scope, receive, tracked)
            elif scope["path"] in FORWARDED_PATHS and scope["method"] == "POST":
                body = self._rename_model((await json_request(scope, receive)).fields)
                await self._run_until_disconnect(self._forward(scope, receive, tracked, body), receive)
            else:
                raise RequestError("an upstream model has no such route", 404, "not_found_error")
        except RequestError as error:
            if not tracked.started:
                await error_response(error)(scope, receive, send)
            elif not tracked.between_events:  # the connection is cut
                raise
            else:
                await send({"type": "http.response.body", "body": sse_bytes(error_body(error))})
        except ClientDisconnect:
            logger.debug("a client disconnected before its request body was complete")

    def _models(self) -> JsonObject:
        return {
            "object": "list",
            "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "upstream"}],
        }

    def _rename_model(self, body: JsonObject) -> bytes:
        """Encode a request body with the upstream's name of the model.

        Raises:
            RequestError: the body asks for another model.
        """
        requested = body.get("model")
        if requested != self.model:
            raise UnknownModelError(requested, self.model)
        return msgspec.json.encode(body | {"model": self._upstream_model})

    async def _run_until_disconnect(self, work: Awaitable[None], receive: Receive) -> None:
        """Await `work`; cancel it when the client disconnects.

        Raises:
            RequestError: the work failed, or this engine was closed meanwhile.
        """
        task = asyncio.ensure_future(work)
        disconnect = asyncio.ensure_future(until_disconnect(receive))
        self._in_flight.add(task)
        try:
            await asyncio.wait([task, disconnect], return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                task.result()
            elif self._closed:
                raise RequestError("this engine is closed", 503, "overloaded_error")
        finally:
            self._in_flight.discard(task)
            disconnect.cancel()
            task.cancel()  # no effect on a finished task
            await asyncio.wait([task])

    async def _forward(self, scope: Scope, receive: Receive, send: _TrackedSend, body: bytes) -> None:
        """Send the request to the upstream, and its response to the client as it arrives.

        Raises:
            RequestError: the upstream cannot be reached, is silent for too long, or ends its response early.
        """
        if self._closed:
            raise RequestError("this engine is closed", 503, "overloaded_error")
        url = self._url(scope["path"])
        try:
            async with self._client.stream("POST", url, content=body, headers=self._headers) as response:
                headers = {
                    name: value
                    for name, value in response.headers.items()
                    if name in FORWARDED_HEADERS or name.startswith(FORWARDED_HEADER_PREFIXES)
                }
                if response.status_code >= 300:
                    await response.aread()
                    error = _error_of(response, scope["path"])
                    if error.code == NO_QUOTA:
                        headers.setdefault("x-should-retry", "false")
                    refusal = error_response(error)
                    refusal.headers.update(headers | {"content-type": "application/json"})
                    return await refusal(scope, receive, send)
                raw = [(name.encode(), value.encode()) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": response.status_code, "headers": raw})
                async for piece in response.aiter_bytes():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except httpx2.PoolTimeout:
            raise RequestError(
                "all connections to the upstream model are in use", 503, "overloaded_error"
            ) from None
        except httpx2.TimeoutException:
            raise RequestError(
                f"the upstream model at {self._base_url} did not answer in time", 504, "timeout_error"
            ) from None
        except httpx2.HTTPError as error:
            logger.warning("the upstream at %s failed: %r", self._base_url, error)
            what = "broke off its response" if send.started else "cannot be reached"
            raise RequestError(
                f"the upstream model at {self._base_url} {what}: {error}", 502, "api_error"
            ) from None
        await send({"type": "http.response.body", "body": b""})

    def _url(self, path: str) -> str:
        """Return the upstream's URL of a path. vLLM and others have `/tokenize` outside `/v1`."""
        if path.startswith("/v1/"):
            return f"{self._base_url}{path.removeprefix('/v1')}"
        return f"{self._base_url.removesuffix('/v1')}{path}"


class _TrackedSend:
    """ASGI `send` that tracks the progress of a response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_event_stream = False
        self._last_bytes = b""
        self.started = False

    @property
    def between_events(self) -> bool:
        """True if a further server-sent event may follow the bytes sent so far."""
        return self._is_event_stream and (
            not self._last_bytes or self._last_bytes.replace(b"\r", b"").endswith(b"\n\n")
        )

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            content_type = dict(message["headers"]).get(b"content-type", b"")
            self._is_event_stream = content_type.startswith(b"text/event-stream")
        else:
            self._last_bytes = (self._last_bytes + message.get("body", b""))[-4:]
        await self._send(message)


def _error_of(response: httpx2.Response, path: str) -> RequestError:
    """The error for the agent: the upstream's own, except where only this server's settings can be wrong."""
    status = response.status_code
    if status < 400:
        return RequestError(
            f"the upstream redirects with status {status}; set engine.url to its final URL", 502, "api_error"
        )
    if status in (401, 403):  # the upstream's own message may quote the key
        own = read_error(status, response.content)
        what = "Incorrect API key provided" if status == 401 else "Access denied"
        message = f"{what}: the upstream rejected this server's API key (status {status}); set engine.api_key"
        return RequestError(message, status, own.kind, code=own.code)
    if path not in ("/v1/chat/completions", "/v1/completions") and status in (404, 405):
        return RequestError(f"the upstream has no {path}")
    error = read_error(status, response.content)
    if status == 404 and error.code is None:
        message = f"{error.message} (the upstream's answer; check engine.url, which usually ends in /v1)"
        return RequestError(message, status, error.kind, param=error.param)
    return error


def _parse_base_url(url: str) -> str:
    """Validate the upstream's URL and strip its trailing slash.

    Raises:
        ConfigError: it is not an HTTP URL, or holds a query, a fragment or a password.
    """
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"the upstream's url {url!r} is invalid: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise ConfigError(
            f"the upstream's url {url!r} is invalid; it must look like https://api.example.com/v1"
        )
    if parsed.userinfo:
        raise ConfigError("the upstream's url must not contain a password; set api_key instead")
    return url.rstrip("/")
