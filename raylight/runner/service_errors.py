"""Exceptions of agents that show a failure of a service that they called. Pure.

An answer of raylight's gateway has a mark. An answer without it, to a request to the attempt's own address,
comes from the ingress in front of the gateway, which sends 404, 500 or 503 while it reaches no replica. Such
an answer is a failure of the infrastructure, whatever its status.
"""

from __future__ import annotations

import contextlib
import re
import socket
import urllib.error
from collections.abc import Iterator
from typing import Any

from raylight.errors import (
    CommandUnavailableError,
    EnvironmentUnavailableError,
    RewardError,
    SandboxUnavailableError,
)
from raylight.semconv import REPLICA_HEADER
from raylight.types import FailureKind

CLIENT_LIBRARIES = frozenset(
    {
        "openai",
        "anthropic",
        "litellm",
        "httpx",
        "httpx2",
        "httpcore",
        "httpcore2",
        "aiohttp",
        "requests",
        "urllib3",
        "urllib",
        "http",
    }
)
"""Packages whose exceptions are failures of the infrastructure if they report a lost connection or a 5xx
status."""
UNAVAILABLE = (CommandUnavailableError, EnvironmentUnavailableError, SandboxUnavailableError)
"""Errors of raylight that report a failure of the infrastructure."""
CONNECTION_WORDS = ("Connect", "Timeout", "Disconnected", "Protocol", "ReadError", "IncompleteRead")
"""Parts of the names of exceptions that report a lost connection."""
OWN_ADDRESS = re.compile(r"/rollout/[^/]+/attempt/[^/]+")
"""Part of the URL of each request to an attempt's address."""


def classify(error: BaseException) -> FailureKind:
    """Kind of failure of an exception: the agent's own, or of a service that it called."""
    if any(_is_from_ingress(link) for link in _chain(error)):
        return "infrastructure"
    current: BaseException | None = error
    visited: set[int] = set()
    while current is not None and id(current) not in visited:  # an exception may be its own cause
        visited.add(id(current))
        if isinstance(current, RewardError):
            return "reward"
        if isinstance(current, UNAVAILABLE):
            return "infrastructure"
        if isinstance(current, BaseExceptionGroup):
            kinds = {classify(inner) for inner in current.exceptions}
            return kinds.pop() if len(kinds) == 1 else "agent"
        if type(current).__module__.split(".")[0] in CLIENT_LIBRARIES:
            code = _status_code(current)
            if code is not None:
                return "infrastructure" if code >= 500 else "agent"
            if _lost_connection(current):
                return "infrastructure"
        current = current.__cause__
    return "agent"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and all that led to it: causes, exceptions that it was raised in the handling of, and
    members of groups."""
    pending, visited = [error], set[int]()
    while pending:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        yield current
        pending += [link for link in (current.__cause__, current.__context__) if link is not None]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions


def _is_from_ingress(error: BaseException) -> bool:
    """True if a request to the attempt's own address got no answer, or none of a replica."""
    response = _read(error, "response")
    requests = (_read(holder, name) for holder in (error, response) for name in ("request", "request_info"))
    holders = (error, response, *requests)
    urls = (_read(holder, name) for holder in holders for name in ("url", "real_url"))
    if not any(OWN_ADDRESS.search(str(url)) for url in urls if url is not None):
        return False
    if _status_code(error) is None:
        return _lost_connection(error)
    headers = _read(response, "headers") if response is not None else _read(error, "headers")
    return headers is None or REPLICA_HEADER not in headers


def _lost_connection(error: BaseException) -> bool:
    reason = _read(error, "reason")
    if isinstance(error, urllib.error.URLError) and isinstance(
        reason, ConnectionError | TimeoutError | socket.gaierror
    ):
        return True
    return any(word in type(error).__name__ for word in CONNECTION_WORDS)


def _status_code(error: BaseException) -> int | None:
    """HTTP status in an exception of a client library; each library has another attribute for it."""
    for holder in (error, _read(error, "response")):
        for name in ("status_code", "status", "code"):
            if isinstance(code := _read(holder, name), int):
                return code
    return None


def _read(holder: Any, name: str) -> Any:
    """Return an attribute; None if it does not exist or was not set."""
    with contextlib.suppress(Exception):  # httpx raises a RuntimeError
        return getattr(holder, name, None)
    return None
