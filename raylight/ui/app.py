"""The web application of `raylight ui`: pages, and the JSON that they show.

Laws:
- Nothing that an agent or a model wrote becomes HTML: the server sends it as JSON only, and the pages' policy
  refuses inline scripts and styles.
- Only files of the known runs are read, and none is written but the search index.
- A visitor needs the server's key, or addresses the server by a name of its host; a policy tells
  browsers what pages may load.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request, cookie_parser
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylight._utils.aio import pause
from raylight._utils.no_proxy import LOOPBACK
from raylight._utils.plain_json import plain
from raylight.errors import ConfigError, ImageError, QueryError, RaylightError, UnknownIdError
from raylight.experience.trajectories.row_rules import algorithm_settings
from raylight.http.request import is_own_host
from raylight.http.slow_clients import ImpatientProtocol
from raylight.http.sse import sse_bytes
from raylight.images.image import media_type_of
from raylight.types import JsonObject
from raylight.ui import rollout_view, token_view
from raylight.ui.run_folder import REFRESH_S, RunFolder, ShownRun, find_runs, name_runs
from raylight.ui.workers import show_workers

COOKIE = "raylight-ui-"
"""Beginning of the cookie's name. Its port follows, because browsers send cookies to all ports of a host."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
HEADERS = {  # of every answer; files are asked for again, as another version of raylight may serve others
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class AccessGuard:
    """Middleware that admits visitors, and adds the policy to every answer.

    With a key, a visitor needs it: in the address of the first page (`?key=`), then in a cookie, or in the
    header `Authorization: Bearer KEY`. Without one, the page must be addressed by a name of the host, against
    DNS rebinding.

    Args:
        key: the key; None for none.
    """

    def __init__(self, app: ASGIApp, key: str | None = None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal_for(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send_with_policy)

    def _refusal_for(self, scope: Scope) -> Response | None:
        """Return the answer to a visitor who is not admitted yet; None for one who is."""
        headers = Headers(scope=scope)
        if self._key is None:
            if is_own_host(scope["headers"]):
                return None
            return _refusal(
                "this address is not one of the server's; open the one that `raylight ui` has printed"
            )
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if "key" in query and not scope["path"].startswith("/api/"):
            return self._exchange_key(scope, query)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        cookie = cookie_parser(headers.get("cookie", "")).get(_cookie_name(scope), "")
        if self._is_key(token.strip() if scheme.lower() == "bearer" else unquote(cookie)):
            return None
        return _refusal("a key is needed; open the address with `?key=` that `raylight ui` has printed")

    def _exchange_key(self, scope: Scope, query: dict[str, list[str]]) -> Response:
        """Exchange the key in an address for a cookie, so that the key does not stay in the address."""
        if not self._is_key(query.pop("key")[0]):
            return _refusal("the key is wrong; open the address that `raylight ui` has printed")
        rest = urlencode(query, doseq=True)
        local = "/" + scope["path"].lstrip("/\\")  # `//name` would be another host
        response = RedirectResponse(f"{local}?{rest}" if rest else local, 303)
        response.set_cookie(_cookie_name(scope), quote(self._key or ""), httponly=True, samesite="strict")
        return response

    def _is_key(self, given: str) -> bool:
        return bool(self._key and given) and hmac.compare_digest(given.encode(), (self._key or "").encode())


def _cookie_name(scope: Scope) -> str:
    return f"{COOKIE}{(scope.get('server') or ('', ''))[1]}"


def _refusal(message: str) -> Response:
    return JSONResponse({"error": message}, 401, {"WWW-Authenticate": "Bearer"})


STATIC = Path(__file__).parent / "static"
MAX_PAGE = 1_000
"""Rollouts in one answer."""
MAX_POINTS = 20_000
CACHED_ROLLOUTS = 4
"""Rollouts whose rows of tokens are kept in memory."""
FILTERS = ("mode", "status", "step", "group", "failure", "min_reward", "max_reward", "q")

STATUSES: dict[type[Exception], int] = {
    UnknownIdError: 404,
    ImageError: 404,
    QueryError: 400,
    ConfigError: 400,
}
"""Statuses of errors; any other error means that a store cannot be read."""

Answer = Callable[[Request], Awaitable[object]]


class Ui:
    """State of the server: the runs that it shows.

    Args:
        paths: run directories, and folders of them.

    Raises:
        ConfigError: a path does not exist.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        for path in self._paths:
            if not path.is_dir():
                raise ConfigError(f"there is no folder {path}; give run directories, or folders of them")
        self._names: dict[Path, str] = {}
        """Names of the run directories so far, which stay as they are."""
        self._folders: dict[str, RunFolder] = {}
        self._finding = threading.Lock()
        self._open: dict[str, ShownRun] = {}
        self._tokens: dict[tuple[object, ...], list[token_view.TokenRow]] = {}
        """Rows of tokens by store and rollout."""
        self.find()

    def find(self) -> list[RunFolder]:
        """Look for new runs; return all, the latest first."""
        with self._finding:  # requests look in threads
            paths = find_runs(self._paths)
            name_runs(paths, self._names)
            known = {folder.path: folder for folder in self._folders.values()}
            folders = [known.get(path) or RunFolder(path, self._names[path]) for path in paths]
            self._folders = {folder.name: folder for folder in folders}
        return folders

    def run(self, request: Request) -> ShownRun:
        """Return the run that a request names.

        Raises:
            UnknownIdError: there is no such run.
        """
        name = request.path_params["run"]
        if name not in self._folders:
            self.find()
        if name not in self._folders:
            raise UnknownIdError(f"there is no run {name!r}; the start page lists the runs")
        return self._open.setdefault(name, ShownRun(self._folders[name]))

    async def close(self) -> None:
        await asyncio.gather(*(run.close() for run in self._open.values()))

    # runs

    async def runs(self, request: Request) -> object:
        folders = await asyncio.to_thread(self.find)
        return {"runs": [await asyncio.to_thread(folder.card) for folder in folders]}

    async def details(self, request: Request) -> object:
        """Return a run's card with all that its page shows except curves."""
        return await asyncio.to_thread(self.run(request).folder.details)

    async def metrics(self, request: Request) -> object:
        metrics = self.run(request).folder.metrics
        await asyncio.to_thread(metrics.refresh)
        names = request.query_params.get("names")
        return {"columns": metrics.columns(names.split(",") if names else None)}

    async def evaluations(self, request: Request) -> object:
        folder = self.run(request).folder
        await asyncio.to_thread(folder.metrics.refresh)
        rows = [row for row in folder.metrics.rows if "val/reward" in row]
        items = [
            {
                "step": int(row.get("val/step", row["step"])),
                "reward": row["val/reward"],
                "error": row.get("val/reward_error"),
                "rollouts": row.get("val/rollouts"),
                "metrics": {name: value for name, value in row.items() if name.startswith("val/")},
            }
            for row in rows
        ]
        return {"items": items, "scores": await asyncio.to_thread(folder.evaluation)}

    async def workers(self, request: Request) -> object:
        """Return what the runners, replicas and learners of a run do."""
        run = self.run(request)
        return await show_workers(await run.store(), run.folder)

    async def events(self, request: Request) -> Response:
        """Send what is new in a run, as server-sent events, until the client disconnects."""
        run = self.run(request)
        return StreamingResponse(
            run_events(run), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )

    # rollouts

    async def rollouts(self, request: Request) -> object:
        """Return a page of the rollouts that match."""
        index, query = await self.run(request).index(), request.query_params
        limit, offset = _integer(query, "limit", 100, 1, MAX_PAGE), _integer(query, "offset", 0, 0, 2**31)
        find = functools.partial(
            index.find,
            _filters(query),
            sort=query.get("sort") or "position",
            order=query.get("order") or "asc",
            limit=limit,
            offset=offset,
        )
        total, items = await asyncio.to_thread(find)
        return {"total": total, "items": items, **await asyncio.to_thread(index.counts)}

    async def points(self, request: Request) -> object:
        """Return columns of the rollouts that match, for scatter plots."""
        index, query = await self.run(request).index(), request.query_params
        limit = _integer(query, "limit", 5_000, 1, MAX_POINTS)
        total, columns = await asyncio.to_thread(index.points, _filters(query), limit)
        return {"total": total, "columns": columns}

    async def failures(self, request: Request) -> object:
        """Return the errors of the rollouts."""
        index = await self.run(request).index()
        return {"items": await asyncio.to_thread(index.failures)}

    async def group(self, request: Request) -> object:
        run = self.run(request)
        return await rollout_view.show_group(
            await run.store(), await run.index(), run.records, request.path_params["group"]
        )

    async def rollout(self, request: Request) -> object:
        """Return a rollout, with the sizes of its rows of tokens."""
        run, name = self.run(request), request.path_params["rollout"]
        shown = await rollout_view.show_rollout(
            await run.store(), await run.index(), run.records, run.rules, name
        )
        rows = await self._rows(run, name, shown["step"])
        sizes = [
            {
                "row": number,
                "tokens": len(row.ids),
                "trained": int(row.trained.sum()),
                "calls": row.call_starts(),
            }
            for number, row in enumerate(rows)
        ]
        return shown | {"rows": sizes}

    async def tokens(self, request: Request) -> Any:
        """Return a part of a row of tokens."""
        run, query = self.run(request), request.query_params
        rows, number, row = await self._row(request)
        offset, limit = _integer(query, "offset", 0, 0, 2**31), _integer(query, "limit", 4_096, 1, 2**31)
        model = algorithm_settings(run.folder.config()).get("model")
        folders = (str(model), str(run.folder.path / "checkpoint"))
        tokenizer = await asyncio.to_thread(token_view.find_tokenizer, folders)
        columns = await asyncio.to_thread(token_view.page, row, offset, limit, tokenizer)
        return {"row": number, "rows": len(rows), "total": len(row.ids), "offset": offset, "columns": columns}

    async def token_summary(self, request: Request) -> object:
        """Return the means of parts of a row of tokens."""
        _, _, row = await self._row(request)
        bins = _integer(request.query_params, "bins", 512, 1, token_view.MAX_BINS)
        return {"total": len(row.ids), "columns": await asyncio.to_thread(token_view.summary, row, bins)}

    async def raw(self, request: Request) -> object:
        """Return what is stored of a rollout."""
        return await rollout_view.show_raw(await self.run(request).store(), request.path_params["rollout"])

    async def request_of_call(self, request: Request) -> object:
        store, path = await self.run(request).store(), request.path_params
        return await rollout_view.show_request(store, path["rollout"], path["call"])

    async def image(self, request: Request) -> Response:
        """Return the file of an image; its digest names it for good."""
        store, sha256 = await self.run(request).store(), request.path_params["image"]
        data = (await store.read_images([sha256]))[sha256]
        headers = {"Content-Disposition": "inline"}
        return Response(data, media_type=media_type_of(data) or "application/octet-stream", headers=headers)

    async def _row(self, request: Request) -> tuple[list[token_view.TokenRow], int, token_view.TokenRow]:
        """Return all rows of a rollout, and the one that a request names, with its number."""
        run, name = self.run(request), request.path_params["rollout"]
        card = (await run.index()).card(name)
        rows = await self._rows(run, name, card["step"] if card else None)
        number = _integer(request.query_params, "row", 0, 0, 2**31)
        if number >= len(rows):
            raise UnknownIdError(
                f"rollout {name!r} has {len(rows)} rows of tokens, and none with the number {number}"
            )
        return rows, number, rows[number]

    async def _rows(self, run: ShownRun, name: str, step: int | None) -> list[token_view.TokenRow]:
        has_records = step is not None and run.records.has(step)
        key = (run.folder.name, run.store_identity(), name, step, has_records)
        if key in self._tokens:
            return self._tokens[key]
        finished = await rollout_view.read_rollout(await run.store(), name)

        def build() -> list[token_view.TokenRow]:
            recorded = run.records.read(step, [name])[name] if step and has_records else None
            return token_view.token_rows(finished, recorded, run.rules, run.stale_mask(step))

        rows = await asyncio.to_thread(build)
        if finished.rollout.status == "succeeded":
            while len(self._tokens) >= CACHED_ROLLOUTS:
                self._tokens.pop(next(iter(self._tokens)))
            self._tokens[key] = rows
        return rows


def _filters(query: Any) -> JsonObject:
    """Return the filters in a query string.

    Raises:
        QueryError: a value is not a number.
    """
    values: JsonObject = {name: query[name] for name in FILTERS if query.get(name)}
    for name in ("step", "min_reward", "max_reward"):
        if name in values:
            try:
                values[name] = float(values[name])
            except ValueError:
                raise QueryError(f"{name} must be a number, not {values[name]!r}") from None
    return values


def _integer(query: Any, name: str, default: int, least: int, most: int) -> int:
    """Return a whole number of a query string.

    Raises:
        QueryError: the value is not a whole number, or out of range.
    """
    text = query.get(name) or default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise QueryError(f"{name} must be a whole number from {least} to {most}, not {text!r}")
    return value


def _json_route(path: str, answer: Answer) -> Route:
    async def handle(request: Request) -> Response:
        return Response(json_text(await answer(request)), media_type="application/json")

    return Route(f"/api{path}", handle)


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer an error with its message."""
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, RaylightError):
        status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 503)
        message = str(error)
    else:
        status, message = 500, f"raylight ui failed, its log has more: {type(error).__name__}: {error}"
    return JSONResponse({"error": message}, status)


async def _page(request: Request) -> Response:
    """Answer any page's address with the front end, which reads the address."""
    return FileResponse(STATIC / "index.html")


async def _unknown(request: Request) -> Response:
    raise HTTPException(404, f"the API has no {request.url.path}")


def build_app(paths: Iterable[Path], key: str | None = None) -> Starlette:
    """Return the application.

    Args:
        paths: run directories, and folders of them.
        key: key that visitors must have; None for none.

    Raises:
        ConfigError: a path does not exist.
    """
    ui = Ui(paths)
    run, rollout = "/runs/{run}", "/runs/{run}/rollouts/{rollout}"
    routes = [
        _json_route("/runs", ui.runs),
        _json_route(run, ui.details),
        _json_route(f"{run}/metrics", ui.metrics),
        _json_route(f"{run}/evaluations", ui.evaluations),
        _json_route(f"{run}/workers", ui.workers),
        _json_route(f"{run}/rollouts", ui.rollouts),
        _json_route(f"{run}/points", ui.points),
        _json_route(f"{run}/failures", ui.failures),
        _json_route(f"{run}/groups/{{group}}", ui.group),
        _json_route(rollout, ui.rollout),
        _json_route(f"{rollout}/tokens", ui.tokens),
        _json_route(f"{rollout}/token_summary", ui.token_summary),
        _json_route(f"{rollout}/raw", ui.raw),
        _json_route(f"{rollout}/calls/{{call}}/request", ui.request_of_call),
        Route(f"/api{run}/images/{{image}}", ui.image),
        Route(f"/api{run}/events", ui.events),
        Route("/api/{rest:path}", _unknown),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/{rest:path}", _page),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await ui.close()

    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(AccessGuard, key=key)],
        exception_handlers={RaylightError: _refuse, HTTPException: _refuse, Exception: _refuse},
    )


async def run_events(run: ShownRun) -> AsyncIterator[bytes]:
    """Yield the rows of metrics that are new, and the run's card and counts when they change, until the run
    has ended and its index is complete."""
    folder, sent = run.folder, len(run.folder.metrics.rows)
    last: JsonObject = {}

    def changed(kind: str, data: object) -> list[bytes]:
        if last.get(kind) == data:
            return []
        last[kind] = data
        return [sse_bytes(json_text(data), kind)]

    yield b"retry: 2000\n\n"
    while True:
        card = await asyncio.to_thread(folder.card)
        if len(folder.metrics.rows) < sent:  # a resumed run has written its metrics again
            sent = 0
        if len(folder.metrics.rows) > sent:
            columns = folder.metrics.columns(start=sent)
            sent = len(folder.metrics.rows)
            yield sse_bytes(json_text({"columns": columns}), "metrics")
        for event in changed("run", card):
            yield event
        is_complete = True
        if folder.store is not None:
            try:
                index = await run.index()
                is_complete = index.is_complete
                events = changed("rollouts", await asyncio.to_thread(index.counts))
            except RaylightError as error:
                events = changed("problem", {"error": str(error)})
            for event in events:
                yield event
        if card["status"] != "running" and is_complete:
            yield sse_bytes("{}", "end")
            return
        yield b": alive\n\n"
        await pause(REFRESH_S)  # files of another process raise no event


def json_text(value: object) -> str:
    """Return a value as ASCII JSON; what JSON lacks, such as NaN, is null."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(plain(value))


DEFAULT_PORT = 7860
PORTS_TRIED = 50
"""Ports after the default one that are tried, if no port was asked for."""
GRACE_S = 1
"""Seconds for which a stopping server waits for event streams, which do not end by themselves."""


def serve_ui(
    paths: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    key: str | None = None,
    until_closed: bool = False,
    show: Callable[[str], None] = print,
) -> None:
    """Serve the pages until Ctrl-C.

    Args:
        paths: run directories, and folders of them.
        host: address to listen on. Any but loopback needs a key.
        port: None for the first free one from DEFAULT_PORT on.
        key: key that visitors must have. None: none on loopback, and a new one elsewhere.
        until_closed: end with the standard input, and so with the process that writes it.
        show: receives the address.

    Raises:
        ConfigError: a path does not exist, the key is empty, or the port is taken.
    """
    server, listener, address = _prepare(paths, host, port, key)
    if until_closed:
        show(f"the run is shown at {address}")
        threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    else:
        show(f"raylight ui: {address} (press Ctrl-C to stop)")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def _end_with_input(server: uvicorn.Server) -> None:
    sys.stdin.read()
    server.should_exit = True


def _prepare(
    paths: Sequence[Path], host: str, port: int | None, key: str | None
) -> tuple[uvicorn.Server, socket.socket, str]:
    """Return a server, the socket that it listens on, and the address of its first page."""
    if key == "":
        raise ConfigError("the key of raylight ui is empty; give one, or leave --key and RAYLIGHT_UI_KEY out")
    if key is None and host not in LOOPBACK:
        key = secrets.token_urlsafe(24)
    app = build_app(paths, key)
    listener = _listen(host, port)
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=GRACE_S, lifespan="on", http=ImpatientProtocol
    )
    shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}/"
    return uvicorn.Server(config), listener, f"{address}?{urlencode({'key': key})}" if key else address


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a socket on a port, or on the first free one.

    Raises:
        ConfigError: the address is not this machine's, or the port is taken.
    """
    tried = [port] if port is not None else list(range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED))
    problem: OSError | None = None
    for number in tried:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, number), family=family, backlog=256)
        except OSError as error:
            problem = error
    raise ConfigError(
        f"raylight ui cannot listen on {host} port {tried[0]}: {problem}; choose another --host or --port"
    )
