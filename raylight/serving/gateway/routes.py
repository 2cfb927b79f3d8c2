"""The addresses that a replica answers: every route is listed here, and what is not listed does not exist for anyone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from starlette.types import Scope as AsgiScope

from raylight.engines.capture_context import AttemptScope
from raylight.http.errors import RequestError
from raylight.serving.dialects.registry import dialect_of

ATTEMPT = re.compile(r"(/rollout/([^/]+)/attempt/([^/]+)(?:/agent/([^/]+))?)(/v1/.*|/tokenize|/detokenize)$")
"""The end of a path as it was sent: ids are percent-encoded, so that each is one segment, whatever characters it has."""
MODEL = "/v1/models/"


class MethodError(RequestError):
    """A route takes other methods than the one it was called with."""

    def __init__(self, message: str, methods: tuple[str, ...]) -> None:
        super().__init__(message, 405)
        self.methods = methods


@dataclass(frozen=True)
class Route:
    """One address and the method that it takes.

    Attributes:
        name: what metrics call it.
        inner: the path under which the inner layers know it.
        model: what is asked for, where the address names a model.
        samples: True if its requests sample, so that capture announces them to the store.
    """

    name: str
    inner: str
    methods: tuple[str, ...] = ("POST",)
    model: str | None = None
    samples: bool = False


READ = ("GET",)
ROUTES = {
    "/tokenize": Route("tokenize", "/tokenize"),
    "/detokenize": Route("detokenize", "/detokenize"),
    "/v1/tokenize": Route("tokenize", "/tokenize"),
    "/v1/detokenize": Route("detokenize", "/detokenize"),
    "/v1/traces": Route("traces", "/v1/traces"),
    "/v1/models": Route("models", "/v1/models", READ),
    "/health": Route("health", "/health", ("GET", "HEAD")),
    "/metrics": Route("metrics", "/metrics", READ),
}
"""Routes by path, besides those of the dialects."""


def sent_path(scope: AsgiScope) -> str:
    """The path as the client wrote it, without its query."""
    sent = scope.get("raw_path") or quote(scope["path"]).encode()
    return sent.partition(b"?")[0].decode("latin-1")


def find_attempt(scope: AsgiScope) -> tuple[AttemptScope, str] | None:
    """The attempt that a request's path names, and the path without it; None if it names none."""
    found = ATTEMPT.search(sent_path(scope))
    if found is None:
        return None
    rollout, attempt, agent = (part and unquote(part) for part in found.groups()[1:4])
    return AttemptScope(rollout, attempt, agent), scope["path"].removesuffix(unquote(found[0])) + found[5]


def below_root(path: str, root: str) -> str:
    """A path without the prefix under which the application stands."""
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def find_route(scope: AsgiScope, path: str) -> Route:
    """The route of a path that names no attempt any more, and stands below no prefix.

    It is compared as it was sent: a percent sign, a double slash or a dot never lead to another spelling of a route.

    Raises:
        RequestError: there is no such route.
        MethodError: it takes another method.
    """
    method, sent = scope["method"], sent_path(scope)
    route = ROUTES.get(path) or _dialect_route(path)
    if route is None and path.startswith(MODEL):
        model = unquote(sent.rpartition(MODEL)[2])
        route = Route("models", ROUTES["/v1/models"].inner, READ, model=model) if model else None
    elif route is not None and not sent.endswith(path):
        route = None
    if route is None:
        hint = "; give an Anthropic client the base URL without its /v1" if path.startswith("/v1/v1/") else ""
        raise RequestError(f"there is no route {_shown(path)} here{hint}", 404, "not_found_error")
    if method not in route.methods:
        raise MethodError(
            f"{_shown(path)} takes {' or '.join(route.methods)}, not {method:.20}", route.methods
        )
    return route


def _dialect_route(path: str) -> Route | None:
    dialect = dialect_of(path)
    if path == dialect.path:
        return Route(dialect.name, path, samples=True)
    name = dialect.other_paths.get(path)
    return Route(name, path) if name else None


def _shown(path: str) -> str:
    """A path as a message may show it."""
    return quote(path[:200], safe="/")
