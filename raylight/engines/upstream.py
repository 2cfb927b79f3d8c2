"""The engine `upstream`: a model at any OpenAI-compatible URL. Its calls are traced, not trained on: its tokens are not known."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any

import httpx2
import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylight.engines.protocol import LoraAdapter, UpdateMode
from raylight.errors import ConfigError, WeightSyncError
from raylight.http.errors import RequestError, error_body, error_response, read_error
from raylight.http.request import json_request, until_disconnect
from raylight.http.sse import sse_bytes

logger = logging.getLogger(__name__)

FORWARDED = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
TOLD = ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "x-request-id")
"""Headers of the upstream's answers that clients are given."""
TOLD_PREFIXES = ("x-ratelimit-", "openai-")
CONNECT_TIMEOUT_S = 10.0
NOT_TRAINED = "an upstream model cannot be trained: its weights are not here, and its tokens are not known"


class UpstreamEngine:
    """Forwards requests, and their answers as they come.

    Args:
        url: base URL of the upstream as OpenAI's client takes it, usually ending in `/v1`.
        api_key: the upstream's; None sends none. What an agent sends as its key never goes there.
        model: the name under which the model is served here.
        upstream_model: the upstream's name of it; None: the same.
        timeout_s: longest silence of the upstream, before an answer or within it.
        max_connections: to the upstream at once; further requests wait for one, up to `timeout_s`.
        transport: replaces the network, in tests.

    Raises:
        ConfigError: the URL is none.
    """

    kind = "upstream"
    tokenizer: Any = None
    max_model_len: int | None = None

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
        self._base = _base_url(url)
        self._timeout_s = timeout_s
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
        )
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._working: set[asyncio.Future[None]] = set()

    async def app(self) -> ASGIApp:
        self._loop = asyncio.get_running_loop()
        return self._answer

    async def load_weights(self, version: int, weights: Mapping[str, Any], mode: UpdateMode = "keep") -> None:
        raise WeightSyncError(NOT_TRAINED)

    async def load_adapter(
        self, name: str, version: int, adapter: LoraAdapter, mode: UpdateMode = "keep"
    ) -> None:
        raise WeightSyncError(NOT_TRAINED)

    async def drop_adapter(self, name: str) -> None:
        """There is none."""

    async def logprobs(self, ids: list[int], adapter: str | None = None) -> list[float]:
        raise WeightSyncError(NOT_TRAINED)

    async def sleep(self, level: int = 1) -> str | None:
        return "an upstream model takes no memory here"

    async def wake(self) -> None:
        """It never slept."""

    async def check_health(self) -> None:
        """An upstream that does not answer now may do so later, and a new replica would not change it."""
        if self._closed:
            raise RuntimeError("this engine is closed")

    def close(self) -> None:
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hang_up)

    def _hang_up(self) -> None:
        for work in self._working:
            work.cancel()
        asyncio.ensure_future(self._client.aclose())  # noqa: RUF006  nobody waits for it

    # the application

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = _Started(send)
        try:
            if scope["path"] == "/v1/models" and scope["method"] == "GET":
                await JSONResponse(self._models())(scope, receive, started)
            elif scope["path"] in FORWARDED and scope["method"] == "POST":
                body = self._translate((await json_request(scope, receive)).fields)
                await self._while_wanted(self._forward(scope, body, started), receive)
            else:
                raise RequestError("an upstream model has no such route", 404, "not_found_error")
        except RequestError as error:
            if not started.yes:
                await error_response(error)(scope, receive, send)
            elif not started.between_events:  # the connection is cut
                raise
            else:
                await send({"type": "http.response.body", "body": sse_bytes(error_body(error))})
        except ClientDisconnect:
            logger.debug("a client left before its request was read")

    def _models(self) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "upstream"}],
        }

    def _translate(self, body: dict[str, Any]) -> bytes:
        """A body with the upstream's name of the model.

        Raises:
            RequestError: it asks for another model.
        """
        asked = body.get("model")
        if asked != self.model:
            message = f"the model {asked!r:.200} does not exist; this endpoint serves {self.model!r}"
            raise RequestError(message, 404, "not_found_error")
        return msgspec.json.encode(body | {"model": self._upstream_model})

    async def _while_wanted(self, work: Awaitable[None], receive: Receive) -> None:
        """Do the work, but stop when the client goes away.

        Raises:
            RequestError: the work failed, or this engine was closed meanwhile.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(until_disconnect(receive))
        self._working.add(task)
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                task.result()
            elif self._closed:
                raise RequestError("this engine is closed", 503, "overloaded_error")
        finally:
            self._working.discard(task)
            gone.cancel()
            task.cancel()  # no effect on one that is done
            await asyncio.wait([task])

    async def _forward(self, scope: Scope, body: bytes, send: _Started) -> None:
        """Ask the upstream, and send its answer on as it comes.

        Raises:
            RequestError: it cannot be reached, says nothing for too long, or breaks off.
        """
        if self._closed:
            raise RequestError("this engine is closed", 503, "overloaded_error")
        url = self._url(scope["path"])
        try:
            async with self._client.stream("POST", url, content=body, headers=self._headers) as answer:
                told = {
                    name: value
                    for name, value in answer.headers.items()
                    if name in TOLD or name.startswith(TOLD_PREFIXES)
                }
                if answer.status_code >= 300:
                    await answer.aread()
                    refusal = error_response(_refusal(answer, scope["path"]))
                    refusal.headers.update(told | {"content-type": "application/json"})
                    await send(
                        {
                            "type": "http.response.start",
                            "status": refusal.status_code,
                            "headers": refusal.raw_headers,
                        }
                    )
                    await send({"type": "http.response.body", "body": refusal.body})
                    return
                headers = [(name.encode(), value.encode()) for name, value in told.items()]
                await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
                async for piece in answer.aiter_bytes():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except httpx2.PoolTimeout:
            raise RequestError(
                "all connections to the upstream model are in use", 503, "overloaded_error"
            ) from None
        except httpx2.TimeoutException:
            raise RequestError(
                f"the upstream model at {self._base} did not answer in time", 504, "timeout_error"
            ) from None
        except httpx2.HTTPError as error:
            logger.warning("the upstream at %s failed: %r", self._base, error)
            what = "broke off its answer" if send.yes else "cannot be reached"
            raise RequestError(
                f"the upstream model at {self._base} {what}: {error}", 502, "api_error"
            ) from None
        await send({"type": "http.response.body", "body": b""})

    def _url(self, path: str) -> str:
        """Where the upstream has what is at `path` here; vLLM and its kin tokenize beside their `/v1`."""
        return (
            f"{self._base}{path.removeprefix('/v1')}"
            if path.startswith("/v1/")
            else f"{self._base.removesuffix('/v1')}{path}"
        )


class _Started:
    """A `send` that knows how far an answer has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._streams = False
        self._end = b""
        self.yes = False

    @property
    def between_events(self) -> bool:
        """Whether an event may be added to what was sent."""
        return self._streams and (not self._end or self._end.replace(b"\r", b"").endswith(b"\n\n"))

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.yes = True
            self._streams = (
                dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            )
        else:
            self._end = (self._end + message.get("body", b""))[-4:]
        await self._send(message)


def _refusal(answer: httpx2.Response, path: str) -> RequestError:
    """What an upstream's error is to the agent: the same, but for what only this server can have done wrong."""
    status = answer.status_code
    if status < 400:
        return RequestError(
            f"the upstream redirects with status {status}; give its final URL", 502, "api_error"
        )
    if status in (401, 403):  # its words may quote the key
        return RequestError(
            f"the upstream refused the key that this server has for it (status {status})",
            status,
            "authentication_error",
        )
    if path not in ("/v1/chat/completions", "/v1/completions") and status in (404, 405):
        return RequestError(f"the upstream has no {path}")
    return read_error(status, answer.content)


def _base_url(url: str) -> str:
    """The URL without a slash at its end.

    Raises:
        ConfigError: it is none of HTTP.
    """
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"the upstream's url {url!r} is none: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise ConfigError(f"the upstream's url {url!r} must look like https://api.example.com/v1")
    if parsed.userinfo:
        raise ConfigError("the upstream's url must not hold a password; give it as api_key")
    return url.rstrip("/")
