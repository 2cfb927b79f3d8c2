"""The routes of a replica.

A path that is neither here nor a dialect's does not exist, whatever the engine serves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from starlette.types import Scope as AsgiScope

from raylight.engines.capture_context import AttemptScope
from raylight.http.errors import RequestError
from raylight.serving.dialects.registry import dialect_of

ATTEMPT_PATH = re.compile(
    r"(/rollout/([^/]+)/attempt/([^/]+)(?:/agent/([^/]+))?)(/v1/.*|/tokenize|/detokenize)$"
)
"""The end of a path as sent. Ids are percent-encoded, so that each is one segment with any characters."""
MODEL_PREFIX = "/v1/models/"


class MethodError(RequestError):
    """A request with a method that its route does not take."""

    def __init__(self, message: str, methods: tuple[str, ...]) -> None:
        super().__init__(message, 405)
        self.methods = methods


@dataclass(frozen=True)
class Route:
    """A path, and the methods that it takes.

    Attributes:
        name: label in metrics.
        inner: path that inner layers receive.
        model: the requested model, if the path names one.
        samples: True if its requests sample, so that capture announces them to the store.
    """

    name: str
    inner: str
    methods: tuple[str, ...] = ("POST",)
    model: str | None = None
    samples: bool = False


GET = ("GET",)
ROUTES = {
    "/tokenize": Route("tokenize", "/tokenize"),
    "/detokenize": Route("detokenize", "/detokenize"),
    "/v1/tokenize": Route("tokenize", "/tokenize"),
    "/v1/detokenize": Route("detokenize", "/detokenize"),
    "/v1/traces": Route("traces", "/v1/traces"),
    "/v1/models": Route("models", "/v1/models", GET),
    "/health": Route("health", "/health", ("GET", "HEAD")),
    "/metrics": Route("metrics", "/metrics", GET),
}
"""Routes by path, besides those of the dialects."""


def find_attempt(scope: AsgiScope) -> tuple[AttemptScope, str] | None:
    """Return the attempt in a request's path, and the path without it; None if the path names no attempt."""
    match = ATTEMPT_PATH.search(_sent_path(scope))
    if match is None:
        return None
    rollout, attempt, agent = (part and unquote(part) for part in match.groups()[1:4])
    return AttemptScope(rollout, attempt, agent), scope["path"].removesuffix(unquote(match[0])) + match[5]


def without_root(path: str, root: str) -> str:
    """Return a path without the prefix under which the application is mounted."""
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def find_route(scope: AsgiScope, path: str) -> Route:
    """Return the route of a path without attempt and root.

    The path as sent must equal the route's: percent-encoding, a double slash or a dot never lead to a route.

    Raises:
        RequestError: 404, the route does not exist.
        MethodError: 405, the route takes another method.
    """
    method, sent = scope["method"], _sent_path(scope)
    route = ROUTES.get(path) or _dialect_route(path)
    if route is None and path.startswith(MODEL_PREFIX):
        model = unquote(sent.rpartition(MODEL_PREFIX)[2])
        route = Route("models", ROUTES["/v1/models"].inner, GET, model=model) if model else None
    elif route is not None and not sent.endswith(path):
        route = None
    if route is None:
        hint = "; give an Anthropic client the base URL without its /v1" if path.startswith("/v1/v1/") else ""
        raise RequestError(f"the route {_quoted(path)} does not exist{hint}", 404, "not_found_error")
    if method not in route.methods:
        allowed = " or ".join(route.methods)
        raise MethodError(f"{_quoted(path)} takes {allowed}, not {method:.20}", route.methods)
    return route


def _dialect_route(path: str) -> Route | None:
    dialect = dialect_of(path)
    if path == dialect.path:
        return Route(dialect.name, path, samples=True)
    name = dialect.other_paths.get(path)
    return Route(name, path) if name else None


def _sent_path(scope: AsgiScope) -> str:
    """Return the path as the client sent it, without its query."""
    sent = scope.get("raw_path") or quote(scope["path"]).encode()
    return sent.partition(b"?")[0].decode("latin-1")


def _quoted(path: str) -> str:
    """Shorten and percent-encode a path for a message."""
    return quote(path[:200], safe="/")
