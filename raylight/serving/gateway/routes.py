"""The routes of a replica, and the ways in which clients write them.

A path that is neither here nor a dialect's does not exist, whatever the engine serves.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote

from starlette.types import Scope as AsgiScope

from raylight.engines.capture_context import AttemptScope
from raylight.http.errors import RequestError
from raylight.serving.dialects.dialect import Dialect
from raylight.serving.dialects.registry import DIALECTS, dialect_of

ATTEMPT_PATH = re.compile(r"/rollout/([^/]+)/attempt/([^/]+)(?:/agent/([^/]+))?(?=/|$)")
"""The part of a path as sent that names an attempt. Ids are percent-encoded, so that each is one segment."""
VERSION = "/v1"
MODEL_PREFIX = "/v1/models/"
SESSION_PATH = re.compile(r"/v1/sessions/([^/]+)(?:/(reward|heartbeat))?")
"""Path of a session, and of what is done with it."""
REMEMBERED_PATH = 1_000
"""Length of the longest path whose reading is remembered: an attempt makes many calls with one."""


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
        of_attempts: True if it also exists below an attempt's address.
        session_id: the session, if the path names one.
        action: what is done with the session; empty: it is read, or cancelled.
    """

    name: str
    inner: str
    methods: tuple[str, ...] = ("POST",)
    model: str | None = None
    samples: bool = False
    of_attempts: bool = True
    session_id: str | None = None
    action: str = ""


GET = ("GET",)
ROUTES = {
    "/v1/tokenize": Route("tokenize", "/tokenize"),
    "/v1/detokenize": Route("detokenize", "/detokenize"),
    "/v1/traces": Route("traces", "/v1/traces"),
    "/v1/models": Route("models", "/v1/models", GET),
    "/v1/sessions": Route("sessions", "/v1/sessions", of_attempts=False),
    "/health": Route("health", "/health", ("GET", "HEAD"), of_attempts=False),
}
"""Routes by path, in addition to the dialects'."""


def read_path(scope: AsgiScope) -> tuple[AttemptScope | None, str]:
    """Return the attempt in a request's path, and the path without it and without the application's root.

    The path is as sent: percent-encoding or a dot never lead to a route. It is written as the route's for a
    base URL without `/v1` or with two of them, for repeated slashes, and for a slash at its end.
    """
    sent = scope.get("raw_path") or quote(scope["path"]).encode()
    read = _read_path if len(sent) <= REMEMBERED_PATH else _read_path.__wrapped__
    return read(sent.partition(b"?")[0], scope.get("root_path", ""))


@functools.lru_cache(8192)
def _read_path(sent: bytes, root: str) -> tuple[AttemptScope | None, str]:
    path = sent.decode("latin-1")
    attempt = None
    if match := ATTEMPT_PATH.search(path):
        rollout, attempt_id, agent = (part and unquote(part) for part in match.groups())
        attempt = AttemptScope(rollout, attempt_id, agent)
        path = path[: match.start()] + path[match.end() :]
    return attempt, _as_route(_without_root(path, root))


def _without_root(path: str, root: str) -> str:
    """Return a path as sent without the prefix under which the application is mounted."""
    *prefix, rest = path.split("/", root.count("/") + 1)
    return f"/{rest}" if root and unquote("/".join(prefix)) == root else path


def _as_route(path: str) -> str:
    """Return the path of the route that a path stands for; a path that stands for none as it is."""
    bare = re.sub("/{2,}", "/", path).rstrip("/")
    while bare.startswith(f"{VERSION}/"):
        bare = bare.removeprefix(VERSION)
    return next((route for route in (VERSION + bare, bare) if _route_of(route)), path)


def find_route(method: str, path: str, attempt: AttemptScope | None = None) -> Route:
    """Return the route of a path that `read_path` returned.

    Raises:
        RequestError: 404, the route does not exist.
        MethodError: 405, the route takes another method.
    """
    route = _route_of(path)
    if route is None or (attempt is not None and not route.of_attempts):
        known = ", ".join(_known_routes(attempt))
        raise RequestError(
            f"Invalid URL ({method:.20} {quote(path[:200], safe='/%')}): this route does not exist. "
            f"A client's base URL ends in {VERSION}; the routes are: {known}",
            404,
        )
    if method not in route.methods:
        allowed = " or ".join(route.methods)
        raise MethodError(f"Invalid method for URL ({method:.20} {path}): it takes {allowed}", route.methods)
    return route


def _route_of(path: str) -> Route | None:
    if path in ROUTES:
        return ROUTES[path]
    if path.startswith(MODEL_PREFIX):
        return Route(
            "models", ROUTES["/v1/models"].inner, GET, model=unquote(path.removeprefix(MODEL_PREFIX))
        )
    if session := SESSION_PATH.fullmatch(path):
        session_id, action = unquote(session[1]), session[2] or ""
        methods = ("POST",) if action else ("GET", "DELETE")
        sessions = ROUTES["/v1/sessions"]
        return replace(sessions, methods=methods, session_id=session_id, action=action)
    dialect = dialect_of(path)
    if path == dialect.path:
        return _sampling_route(dialect)
    name = dialect.other_paths.get(path)
    return Route(name, path) if name else None


@functools.cache
def _sampling_route(dialect: type[Dialect]) -> Route:
    return Route(dialect.name, dialect.path, samples=True)


def _known_routes(attempt: AttemptScope | None) -> list[str]:
    """Return method and path of each route."""
    posted = [path for dialect in DIALECTS.values() for path in (dialect.path, *dialect.other_paths)]
    others = [
        f"{route.methods[0]} {path}" for path, route in ROUTES.items() if route.of_attempts or attempt is None
    ]
    return [f"POST {path}" for path in posted] + others
