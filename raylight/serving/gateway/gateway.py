"""The outermost layer of a replica, and the stack of layers around an engine's application."""

from __future__ import annotations

import functools
import hmac
import logging
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight._utils.bounds import MAX_BODY
from raylight.agent.attempt_keys import KeyUse, key_use
from raylight.config import EngineConfig
from raylight.engines.capture_context import SCOPE, AttemptScope
from raylight.engines.protocol import Engine
from raylight.http.errors import RequestError, UnknownModelError
from raylight.http.request import OTHER_HOST, JsonRequest, is_own_host, read_request
from raylight.images.image import ImageLimits
from raylight.images.urls import ImageFetcher
from raylight.serving.capture.attempt_limits import CallBudgets, FinishedAttempts
from raylight.serving.capture.middleware import CaptureMiddleware
from raylight.serving.capture.recorder import AttemptFinishedError, Recorder
from raylight.serving.capture.retry_cache import RETRY_COUNT, RetryCache
from raylight.serving.conversations.conversations import Conversations
from raylight.serving.dialects.registry import dialect_of
from raylight.serving.dialects.request_images import ImageReader, ImageSender
from raylight.serving.dialects.translate import KEEP_ALIVE_S, TranslationMiddleware
from raylight.serving.gateway.error_shaping import ErrorShapingSend, reject_websocket
from raylight.serving.gateway.metrics import Metrics, RequestTimer
from raylight.serving.gateway.model_names import (
    AnyModelName,
    describe_model,
    list_models,
    model_in_place_of,
)
from raylight.serving.gateway.routes import MethodError, Route, find_route, read_path
from raylight.serving.gateway.session_service import SessionService, answer_request
from raylight.store.client import StoreClient
from raylight.traces.otlp import traces_route
from raylight.types.request_fields import drop_field, log_dropped

logger = logging.getLogger(__name__)

TRACES = "/v1/traces"
"""Path of the route of spans."""
SECRET_HEADERS = (b"authorization", b"x-api-key", b"cookie", b"proxy-authorization")
"""Headers that inner layers do not receive."""


class Gateway:
    """Accepts a request if its key is valid for its address, its route exists, and its body is sound JSON.

    `/rollout/{rid}/attempt/{aid}[/agent/{name}]/v1/...` takes that attempt's keys alone, one that calls
    models and one that sends spans. Inner layers receive `/v1/...` and find the attempt in `SCOPE`. All other
    addresses take the run's secret, except `/health`, which needs no key. Errors are sent in the shape of the
    request's dialect. An exception of an inner layer is logged and answered with status 500.

    Args:
        secret: the run's secret. None: no key is needed and attempts have no addresses, for a server of its
            own on loopback, which requests must name, against DNS rebinding.
        finished: finished attempts, whose keys are revoked.
        traces: application that answers `/v1/traces`; None: the route does not exist.
        attempts: True if attempts have addresses; without a recorder their calls would be lost.
        sessions: answers requests of agents outside the run; None: the routes do not exist.
        max_body: largest body of a request, in bytes.
        ignore_fields: request fields to drop before any layer reads them, in every dialect, as
            `EngineConfig.ignore_fields` names them.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        secret: str | None,
        traces: ASGIApp | None,
        metrics: Metrics,
        finished: FinishedAttempts | None = None,
        *,
        attempts: bool = True,
        sessions: SessionService | None = None,
        max_body: int = MAX_BODY,
        ignore_fields: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._engine = engine
        self._secret = secret
        self._traces = traces
        self._metrics = metrics
        self._finished = finished or FinishedAttempts()
        self._attempts = attempts and secret is not None
        self._sessions = sessions
        self._max_body = max_body
        self._ignore_fields = ignore_fields

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await reject_websocket(scope, receive, send)
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        else:
            await self._handle(scope, receive, send)

    async def _handle(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request, with an error if it is rejected or an inner layer fails."""
        attempt, path = read_path(scope)
        dialect = dialect_of(path)
        timer = RequestTimer(self._metrics, send)
        answer = ErrorShapingSend(timer.send, None if path == TRACES else dialect)
        headers = dict(scope["headers"])
        try:
            use = (
                self._check_key(scope["headers"], attempt)
                if attempt is not None or path != "/health"
                else None
            )
            route = find_route(scope["method"], path, attempt)
            timer.route = route.name
            if attempt is not None:
                _check_use(use, route)
                attempt = _scope_of(attempt, use)
                await self._check_running(attempt, route, headers)
            await self._serve(route, attempt, scope, receive, answer)
        except RequestError as error:
            if answer.started:
                raise
            await answer.send_error(dialect, error, _headers_of(error))
        except ClientDisconnect:
            logger.debug("a client disconnected before its request was read")
        except Exception:
            if (
                answer.started
            ):  # the server then closes the connection, which shows the client that the answer is cut
                raise
            logger.exception("%s %s failed (request %s)", scope["method"], path, answer.request_id)
            message = "The server had an error while processing your request; see its log"
            await answer.send_error(dialect, RequestError(message, 500))
        finally:
            timer.end()

    def _check_key(self, headers: list[tuple[bytes, bytes]], attempt: AttemptScope | None) -> KeyUse | None:
        """Check that a key of the request is valid for its address; return the use of an attempt's key.

        Raises:
            RequestError: 401, none is; 403, it needs none, and the request names another host; 404, attempts
                have no addresses here.
        """
        if attempt is not None and not self._attempts:
            raise RequestError("this server records no rollouts; use its addresses without /rollout", 404)
        if self._secret is None and not is_own_host(headers):
            raise RequestError(OTHER_HOST, 403)
        secret, keys = self._secret, _keys(dict(headers))
        uses = [] if secret is None else [_use_of(key, secret, attempt) for key in keys]
        if secret is not None and not any(uses):
            self._metrics.count("rejected_keys_total")
            problem = "it is not the key of this address" if keys else "the request has none"
            raise RequestError(
                f"Incorrect API key provided: {problem}. Send the key that was given with this base URL",
                401,
            )
        return next(filter(None, uses), None)

    async def _check_running(self, attempt: AttemptScope, route: Route, headers: dict[bytes, bytes]) -> None:
        """Check that an attempt has not finished.

        The store checks that itself when a sampled call is announced. For other requests, and for retries,
        the store is asked.

        Raises:
            AttemptFinishedError: the attempt has finished.
        """
        is_announced = route.samples and headers.get(RETRY_COUNT, b"0") == b"0"
        if attempt in self._finished or (not is_announced and await self._finished.check(attempt)):
            raise AttemptFinishedError

    async def _serve(
        self,
        route: Route,
        attempt: AttemptScope | None,
        scope: AsgiScope,
        receive: Receive,
        answer: ErrorShapingSend,
    ) -> None:
        """Answer an accepted request.

        Raises:
            RequestError: its body is rejected, or the resource does not exist.
            ClientDisconnect: the client disconnected before the end of the body.
        """
        inner = {
            **scope,
            "path": route.inner,
            "raw_path": route.inner.encode(),
            "root_path": "",
            "headers": [pair for pair in scope["headers"] if pair[0] not in SECRET_HEADERS],
        }
        token = SCOPE.set(attempt)
        try:
            if route.inner == "/health":
                await self._answer_health(inner, receive, answer)
            elif route.inner == TRACES:
                if self._traces is None:
                    raise RequestError("this server stores no spans", 404)
                await self._traces(inner, receive, answer)
            elif route.inner == "/v1/models":
                await self._answer_models(route.model, inner, receive, answer)
            elif route.name == "sessions":
                await answer_request(self._sessions, route, scope, inner, receive, answer, self._max_body)
            else:
                await self._forward(inner, receive, answer)
        finally:
            SCOPE.reset(token)

    async def _forward(self, inner: AsgiScope, receive: Receive, answer: ErrorShapingSend) -> None:
        """Have the inner layers answer a request with a JSON body."""
        request = self._without_ignored(await read_request(inner, receive, self._max_body), receive)
        await self._app(request.put_into(inner), request, answer)
        if not (answer.started or request.disconnected):
            raise RuntimeError("the inner layers sent no answer")

    def _without_ignored(self, request: JsonRequest, receive: Receive) -> JsonRequest:
        """Return a request without ignored fields. Each is counted, and the first one of a name is logged."""
        fields = request.fields
        for name in self._ignore_fields:
            kept = drop_field(fields, name.split("."))
            if kept is not fields:
                fields = kept
                self._metrics.count("ignored_fields_total", name)
                log_dropped(name, "engine.ignore_fields names")
        return request if fields is request.fields else JsonRequest(fields, receive)

    async def _answer_models(
        self, model: str | None, inner: AsgiScope, receive: Receive, answer: ErrorShapingSend
    ) -> None:
        """Answer with the engine's list of models, or with one entry of it.

        An attempt finds any model, as it may call any.
        """
        entries = [describe_model(entry) for entry in await list_models(self._app, inner, receive)]
        served = [entry["id"] for entry in entries]
        if model is None:
            ends = {"first_id": served[0], "last_id": served[-1]} if served else {}
            listed = {"object": "list", "data": entries, "has_more": False} | ends
            await JSONResponse(listed)(inner, receive, answer)
            return
        is_any = SCOPE.get() is not None and ".." not in model  # a path is not a name
        found = model_in_place_of(model, self._engine.model, served) if is_any else model
        if found not in served:
            raise UnknownModelError(model)
        entry = entries[served.index(found)] | {"id": model, "display_name": model}
        await JSONResponse(entry)(inner, receive, answer)

    async def _answer_health(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        try:
            await self._engine.check_health()
        except Exception:
            logger.exception("the engine's health check failed")
            raise RequestError("the engine is unhealthy and cannot serve", 503) from None
        await JSONResponse({"status": "ok", "model": self._engine.model})(scope, receive, send)


def build_gateway(
    engine_app: ASGIApp,
    engine: Engine,
    secret: str | None,
    recorder: Recorder | None,
    store: StoreClient | None,
    config: EngineConfig | None = None,
    *,
    metrics: Metrics | None = None,
    training_temperature: float | None = None,
    sessions: SessionService | None = None,
    keep_alive_s: float = KEEP_ALIVE_S,
) -> ASGIApp:
    """Build the application of a replica. A request goes through its layers in this order:

    Gateway > RetryCache > AnyModelName > TranslationMiddleware > CaptureMiddleware > ImageSender > engine_app

    Args:
        secret: the run's secret, or the key of `raylight serve`. None accepts every client, and attempts
            have no addresses.
        recorder: sends the calls of attempts to the store. None: attempts have no addresses.
        store: stores spans that other processes send to `/v1/traces`, has the conversations that another
            replica served before, with the finished attempts and the rest of each attempt's budgets.
            None: the route does not exist, and no call is limited.
        config: settings of the engine; None: the defaults.
        training_temperature: temperature of all calls of training rollouts, which then sample from the whole
            distribution; None leaves the sampling to the agents.
        sessions: answers requests of agents outside the run; None: they have no sessions.
        keep_alive_s: seconds of silence in a stream after which a sign of life is sent.
    """
    config = config or EngineConfig()
    metrics = metrics or Metrics()
    metrics.watch_load(engine.load)
    finished = FinishedAttempts(None if store is None else store.is_attempt_finished)
    app: ASGIApp = ImageSender(metrics.count_samples(engine_app))
    if recorder is not None:
        conversations = None
        if config.token_in and engine.tokenizer is not None:
            images = getattr(engine, "images", None)  # a user's own engine may lack it
            conversations = Conversations(
                engine.tokenizer, tolerate_rewrites=config.tolerate_rewrites, images=images
            )
        _watch_records(metrics, recorder, conversations)
        budgets = None
        if store is not None and config.kind != "upstream":  # whose tokens are not known
            budgets = CallBudgets(store.check_budgets)
        app = CaptureMiddleware(
            app,
            engine,
            recorder,
            conversations,
            None if store is None else store.chat_history,
            finished=finished,
            budgets=budgets,
            training_temperature=training_temperature,
            count_override=functools.partial(metrics.count, "overridden_requests_total"),
        )
    count_dropped = functools.partial(metrics.count, "dropped_tools_total")
    app = TranslationMiddleware(
        app, engine.tokenizer, count_dropped, keep_alive_s, _image_reader(engine, config)
    )
    if recorder is not None:
        app = AnyModelName(app, engine.model, functools.partial(metrics.count, "auxiliary_requests_total"))
        app = RetryCache(app, on_replay=functools.partial(metrics.count, "replays_total"))
    traces = None if store is None else traces_route(store.add_many_spans, _attempt_of_scope)
    return Gateway(
        app,
        engine,
        secret,
        traces,
        metrics,
        finished,
        attempts=recorder is not None,
        sessions=sessions,
        max_body=config.max_body_bytes,
        ignore_fields=config.ignore_fields,
    )


def _image_reader(engine: Engine, config: EngineConfig) -> ImageReader:
    limits = ImageLimits(config.max_image_bytes, config.max_image_pixels)
    fetcher = ImageFetcher(limits) if config.fetch_images else None
    return ImageReader(limits, config.max_images, fetcher, is_remote=engine.tokenizer is None)


def _watch_records(metrics: Metrics, recorder: Recorder, conversations: Conversations | None) -> None:
    """Add the metrics of the recorder's calls and of the prompts."""
    stats = recorder.stats
    metrics.watch("recorder_open_calls", lambda: stats.opened - stats.closed)
    metrics.watch("recorder_unsent_records", lambda: stats.unsent)
    metrics.watch("recorder_lost_records_total", lambda: stats.lost)
    metrics.watch("recorder_overloaded_calls_total", lambda: stats.overloaded)
    metrics.watch("recorder_rejected_calls_total", lambda: stats.rejected)
    if conversations is not None:
        counts = conversations.counts
        metrics.watch("prompts_total", lambda: counts.spliced, "spliced")
        metrics.watch("prompts_total", lambda: counts.partly, "partly spliced")
        metrics.watch("prompts_total", lambda: counts.rendered, "rendered")
        metrics.watch("prompts_total", lambda: counts.refused_by_template, "refused by template")


def _attempt_of_scope() -> tuple[str, str] | None:
    """Return the attempt whose address was called; spans sent there belong to it."""
    scope = SCOPE.get()
    return (scope.rollout_id, scope.attempt_id) if scope else None


def _keys(headers: dict[bytes, bytes]) -> list[str]:
    """Return the keys of a request: OpenAI's clients send a bearer token, Anthropic's `x-api-key`."""
    scheme, _, bearer = headers.get(b"authorization", b"").decode("latin-1").strip().partition(" ")
    keys = [
        bearer.strip() if scheme.lower() == "bearer" else "",
        headers.get(b"x-api-key", b"").decode("latin-1").strip(),
    ]
    return [key for key in keys if key]


def _use_of(key: str, secret: str, attempt: AttemptScope | None) -> KeyUse | None:
    """Return the use of a key that is valid for an attempt's address, or for the others; None if none is."""
    if attempt is not None:
        return key_use(key, secret, attempt.rollout_id, attempt.attempt_id)
    return "model" if hmac.compare_digest(key.encode(), secret.encode()) else None


@functools.lru_cache(8192)
def _scope_of(attempt: AttemptScope, use: KeyUse | None) -> AttemptScope:
    """Return the scope of an attempt's call with a key of this use."""
    trains, has_budgets = use in ("train", "train-budgets"), (use or "").endswith("-budgets")
    return replace(attempt, trains=trains, has_budgets=has_budgets)


def _check_use(use: KeyUse | None, route: Route) -> None:
    """Check that an attempt's key is for the route: spans, which may be rewards, need a separate key.

    Raises:
        RequestError: 403, it is for another use.
    """
    if (use == "traces") == (route.inner == TRACES):
        return
    raise RequestError(
        "this key sends spans only; call models with the attempt's API key (llm.api_key)"
        if use == "traces"
        else "this key calls models only; send spans with llm.traces_key, which the agent passes to a "
        "process that may set rewards (CommandAgent: sends_spans=True)",
        403,
    )


def _headers_of(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Return the headers that HTTP requires with the status of an error."""
    if isinstance(error, MethodError):
        return [(b"allow", ", ".join(error.methods).encode())]
    return [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
