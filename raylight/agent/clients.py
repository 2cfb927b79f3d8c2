"""HTTP clients of OpenAI and Anthropic that all attempts of a process share.

A client that an attempt creates for itself takes 20 ms, and its connections end with it. Here an attempt gets
its own light client, with its URL and its key, on top of connections that are kept alive by the event loop,
or by the process for agents in threads. Its URL ends with a slash, because the libraries would parse it again
to add one, which takes most of the time of a light client.

Asynchronous clients use aiohttp, where the library offers it: the default pool of the libraries examines all
its connections at each request, and takes 2.6 times the CPU time of a call at 256 calls at once.

Direct clients ignore the proxies of the environment.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import os
import threading
from collections.abc import AsyncGenerator
from typing import Any, Literal

from raylight.errors import ConfigError

Provider = Literal["openai", "anthropic"]
"""Library of a client."""
CLASSES = {"openai": ("AsyncOpenAI", "OpenAI"), "anthropic": ("AsyncAnthropic", "Anthropic")}
"""Asynchronous and synchronous client of each library."""

_ASYNC: dict[tuple[asyncio.AbstractEventLoop, str, bool], tuple[object, AsyncGenerator[None]]] = {}
"""HTTP client of each event loop and library, direct or not, and the generator that closes it."""
_SYNC: dict[tuple[str, bool], Any] = {}
"""HTTP client of each library, direct or not, for all threads."""
_SYNC_LOCK = threading.Lock()


def async_client(provider: Provider, endpoint: str, api_key: str | None, direct: bool) -> Any:
    """Return an asynchronous client on top of the event loop's connections.

    Raises:
        ConfigError: no event loop is running, or the library is unknown or not installed.
    """
    library = _library(provider)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError(
            "LLM.client() is called outside an event loop; use LLM.sync_client(), or an `async def` agent"
        ) from None
    if (loop, provider, direct) not in _ASYNC:
        for key in [key for key in _ASYNC if key[0].is_closed()]:  # closed without `shutdown_asyncgens`
            del _ASYNC[key]
        _open(loop, provider, direct, library)
    http, _ = _ASYNC[loop, provider, direct]
    return getattr(library, CLASSES[provider][0])(
        base_url=_with_slash(endpoint), api_key=api_key, http_client=http
    )


def sync_client(provider: Provider, endpoint: str, api_key: str | None, direct: bool) -> Any:
    """Return a synchronous client on top of the process's connections.

    Raises:
        ConfigError: the library is unknown or not installed.
    """
    library = _library(provider)
    with _SYNC_LOCK:
        if (provider, direct) not in _SYNC:
            http = _SYNC[provider, direct] = library.DefaultHttpxClient(trust_env=not direct)
            http.close = lambda: None  # an agent may close its client, as by `with`
        http = _SYNC[provider, direct]
    return getattr(library, CLASSES[provider][1])(
        base_url=_with_slash(endpoint), api_key=api_key, http_client=http
    )


def _with_slash(endpoint: str) -> str:
    """Return a URL with the slash at its end; one with a query is left to the library."""
    return endpoint if endpoint.endswith("/") or "?" in endpoint else f"{endpoint}/"


async def close_clients() -> None:
    """Close the connections of the running event loop's clients."""
    loop = asyncio.get_running_loop()
    for lifetime in [lifetime for (other, *_), (_, lifetime) in _ASYNC.items() if other is loop]:
        await lifetime.aclose()


def _library(provider: Provider) -> Any:
    if provider not in CLASSES:
        raise ConfigError(f"{provider!r} is not a library of clients; give one of {', '.join(CLASSES)}")
    try:
        return importlib.import_module(provider)
    except ImportError as error:
        raise ConfigError(f"{provider} cannot be imported: {error}; pip install {provider}") from None


def _open(loop: asyncio.AbstractEventLoop, provider: Provider, direct: bool, library: Any) -> None:
    """Create the HTTP client of an event loop. It is closed by `close_clients`, or by `asyncio.run`, which
    closes all asynchronous generators at its end."""
    try:
        http = library.DefaultAioHttpClient(trust_env=not direct)
    except (AttributeError, RuntimeError):  # an older version of the library
        http = library.DefaultAsyncHttpxClient(trust_env=not direct)

    async def leave_open() -> None:
        """Replace `aclose`, because an agent may close its client, as by `async with`."""

    async def live() -> AsyncGenerator[None]:
        try:
            yield
        finally:
            _ASYNC.pop((loop, provider, direct), None)
            await type(http).aclose(http)

    http.aclose = leave_open
    lifetime = live()
    _ASYNC[loop, provider, direct] = http, lifetime
    with contextlib.suppress(StopIteration):
        lifetime.__anext__().send(None)  # runs up to its yield, so that the event loop has to close it


@atexit.register
def _close_sync() -> None:
    while _SYNC:
        http = _SYNC.popitem()[1]
        type(http).close(http)


def _leave_to_parent() -> None:
    """Forget the connections of threads after a fork: two processes cannot share one."""
    global _SYNC_LOCK
    _SYNC_LOCK = threading.Lock()
    _SYNC.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
