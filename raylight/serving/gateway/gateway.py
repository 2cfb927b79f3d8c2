"""The outermost layer of a replica, and the whole stack of layers around an engine's application."""

from __future__ import annotations

import hmac
import json
import logging

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight.agent.attempt_keys import is_attempt_key
from raylight.engines.capture_context import SCOPE, AttemptScope
from raylight.engines.protocol import Engine
from raylight.http.errors import RequestError
from raylight.http.request import MAX_BODY, read_request
from raylight.serving.capture.conversation_loader import History
from raylight.serving.capture.finished_attempts import FinishedAttempts, IsFinished
from raylight.serving.capture.middleware import CaptureMiddleware
from raylight.serving.capture.recorder import AttemptOver, Overloaded, Recorder
from raylight.serving.capture.retry_cache import RETRY_COUNT, RetryCache
from raylight.serving.conversations.conversations import Conversations
from raylight.serving.dialects.registry import dialect_of
from raylight.serving.dialects.translate import TranslationMiddleware
from raylight.serving.gateway.error_shaping import ShapedSend, refuse_websocket
from raylight.serving.gateway.metrics import CONTENT_TYPE, Metrics, Watch
from raylight.serving.gateway.routes import MethodError, Route, below_root, find_attempt, find_route
from raylight.traces.otlp import Sink, traces_route

logger = logging.getLogger(__name__)

SECRETS = (b"authorization", b"x-api-key", b"cookie", b"proxy-authorization")
"""Headers that no inner layer is shown."""


class Gateway:
    """Lets a request in if its key opens its address, its route is one of those listed, and its body is sound.

    `/rollout/{rid}/attempt/{aid}[/agent/{name}]/v1/...` is opened by that attempt's key alone, and becomes `/v1/...` within the
    attempt's scope. Other addresses need the run's secret, except `/health`. Errors leave in the shape of the dialect; an exception
    of an inner layer is logged and becomes a 500.

    Args:
        secret: None: no key is needed, and no attempt has an address. For a server of its own on loopback.
        over: the attempts that are over, whose keys open nothing any more.
        traces: takes what is sent to `/v1/traces`; None: there is no such route.
        attempts: whether attempts have addresses; without a recorder their calls would be lost.
        max_body: bytes of a request's body.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        secret: str | None,
        traces: ASGIApp | None,
        metrics: Metrics,
        over: FinishedAttempts | None = None,
        *,
        attempts: bool = True,
        max_body: int = MAX_BODY,
    ) -> None:
        self._app = app
        self._engine = engine
        self._secret = secret
        self._traces = traces
        self._metrics = metrics
        self._over = over or FinishedAttempts()
        self._attempts = attempts and secret is not None
        self._max_body = max_body

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await refuse_websocket(scope, receive, send)
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens within."""
        inside, path = find_attempt(scope) or (None, scope["path"])
        path = below_root(path, scope.get("root_path", ""))
        dialect = dialect_of(path)
        watch = Watch(self._metrics, send)
        shaped = ShapedSend(watch.send, None if path == "/v1/traces" else dialect)
        try:
            if inside is not None or path != "/health":
                self._check_key(dict(scope["headers"]), inside)
            route = find_route(scope, path)
            watch.route = route.name
            if inside is not None:
                await self._check_alive(inside, route, dict(scope["headers"]))
            await self._serve(route, inside, scope, receive, shaped)
        except RequestError as error:
            if shaped.started:
                raise
            await shaped.send_error(dialect, error, _headers_of(error))
        except ClientDisconnect:
            logger.debug("a client left before its request was read")
        except Exception:
            if shaped.started:  # the server cuts the connection, so that the client knows
                raise
            logger.exception("%s %s failed", scope["method"], path)
            await shaped.send_error(
                dialect, RequestError("the server failed; its log tells why", 500, "server_error")
            )
        finally:
            watch.end()

    def _check_key(self, headers: dict[bytes, bytes], inside: AttemptScope | None) -> None:
        """See that a request may have what its address names.

        Raises:
            RequestError: no key of the request opens the address (401), or attempts have no addresses here (404).
        """
        if inside is not None and not self._attempts:
            raise RequestError(
                "this server records no rollouts, and has no addresses for them", 404, "not_found_error"
            )
        if self._secret is not None and not any(
            self._opens(key, self._secret, inside) for key in _keys(headers)
        ):
            self._metrics.refused_keys.inc()
            raise RequestError("this API key does not open this address", 401, "authentication_error")

    async def _check_alive(self, inside: AttemptScope, route: Route, headers: dict[bytes, bytes]) -> None:
        """See that an attempt is not over. Calls that are sampled are told so by the store when they are announced; others ask.

        Raises:
            AttemptOver: it is.
        """
        announced = route.samples and headers.get(RETRY_COUNT, b"0") == b"0"
        if inside in self._over or (not announced and await self._over.check(inside)):
            raise AttemptOver

    def _opens(self, key: str, secret: str, inside: AttemptScope | None) -> bool:
        if inside is not None:
            return is_attempt_key(key, secret, inside.rollout_id, inside.attempt_id)
        return hmac.compare_digest(key.encode(), secret.encode())

    async def _serve(
        self,
        route: Route,
        inside: AttemptScope | None,
        scope: AsgiScope,
        receive: Receive,
        shaped: ShapedSend,
    ) -> None:
        """Answer a request that was let in.

        Raises:
            RequestError: its body cannot be taken, or what it asks for is not there.
            ClientDisconnect: the client went away before the end of its body.
        """
        headers = [pair for pair in scope["headers"] if pair[0] not in SECRETS]
        path = route.inner.encode()
        inner = {
            **scope,
            "path": route.inner,
            "raw_path": path,
            "root_path": "",
            "headers": headers,
        }
        token = SCOPE.set(inside)
        try:
            if route.name == "health":
                await self._tell_health(inner, receive, shaped)
            elif route.name == "metrics":
                await Response(self._metrics.page(), media_type=CONTENT_TYPE)(inner, receive, shaped)
            elif route.name == "traces":
                await self._take_spans(inner, receive, shaped)
            elif route.name == "models":
                await self._list_models(route.model, inner, receive, shaped)
            else:
                await self._pass_on(inner, receive, shaped)
        finally:
            SCOPE.reset(token)

    async def _pass_on(self, inner: AsgiScope, receive: Receive, shaped: ShapedSend) -> None:
        """Have the inner layers answer a request with a body."""
        request = await read_request(inner, receive, self._max_body)
        await self._app(request.put_into(inner), request, shaped)
        if not (shaped.started or request.disconnected):
            raise RuntimeError("the inner layers gave no answer")

    async def _take_spans(self, inner: AsgiScope, receive: Receive, shaped: ShapedSend) -> None:
        if self._traces is None:
            raise RequestError("this server takes no spans", 404, "not_found_error")
        await self._traces(inner, receive, shaped)

    async def _list_models(
        self, model: str | None, inner: AsgiScope, receive: Receive, shaped: ShapedSend
    ) -> None:
        """The list of models that the engine gives, or one of it."""
        if model is None:
            await self._app(inner, receive, shaped)
            return
        heard = bytearray()

        async def hear(message: Message) -> None:
            heard.extend(message.get("body", b""))

        await self._app(inner, receive, hear)
        found = [entry for entry in json.loads(heard).get("data", []) if entry.get("id") == model]
        if not found:
            raise RequestError(f"the model {model[:200]!r} does not exist", 404, "not_found_error")
        await JSONResponse(found[0])(inner, receive, shaped)

    async def _tell_health(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        try:
            await self._engine.check_health()
        except Exception:
            logger.exception("the engine is not well")
            raise RequestError("the engine can serve no more", 503, "overloaded_error") from None
        await JSONResponse({"status": "ok", "model": self._engine.model})(scope, receive, send)


def build_gateway(
    engine_app: ASGIApp,
    engine: Engine,
    secret: str | None,
    recorder: Recorder | None,
    spans: Sink | None,
    *,
    max_body: int = MAX_BODY,
    metrics: Metrics | None = None,
    token_in: bool = True,
    history: History | None = None,
    is_over: IsFinished | None = None,
) -> ASGIApp:
    """The whole application of one replica, from the outermost layer to the engine's own.

    Args:
        secret: the run's, or the key of a server of its own; None lets everyone in, and gives attempts no addresses.
        recorder: takes the calls of attempts; None: attempts have no addresses.
        spans: stores spans that other processes send to `/v1/traces`; None: there is no such route.
        token_in: build a conversation's next prompt from the tokens that it had, where the engine has a tokenizer.
        is_over: tells whether an attempt is over, for requests that open no call; normally `StoreClient.is_attempt_finished`.
        history: brings back the conversations of an attempt that another replica served until now; normally `StoreClient.chat_history`.
    """
    metrics = metrics or Metrics()
    over = FinishedAttempts(is_over)
    app = metrics.counting_samples(engine_app)
    if recorder is not None:
        conversations = Conversations(engine.tokenizer) if token_in and engine.tokenizer is not None else None
        _show_calls(recorder, conversations, metrics)
        app = CaptureMiddleware(app, engine, recorder, conversations, history, over=over)
    app = TranslationMiddleware(app)
    if recorder is not None:
        app = RetryCache(app, on_replay=metrics.replays.inc)
    traces = None if spans is None else traces_route(spans, _attempt_of_scope)
    return Gateway(
        app, engine, secret, traces, metrics, over, attempts=recorder is not None, max_body=max_body
    )


def _show_calls(recorder: Recorder, conversations: Conversations | None, metrics: Metrics) -> None:
    """Have the metrics show what becomes of records and prompts."""
    stats = recorder.stats
    metrics.gauge(
        "recorder_open", "Calls that are announced and not yet over", lambda: stats.opened - stats.closed
    )
    metrics.gauge(
        "recorder_unsent", "Announcements and records that the store does not have yet", lambda: stats.unsent
    )
    metrics.gauge(
        "recorder_lost", "Announcements and records that never reached the store", lambda: stats.lost
    )
    metrics.gauge(
        "recorder_overloaded", "Calls turned away for want of room or of the store", lambda: stats.overloaded
    )
    metrics.gauge(
        "recorder_refused", "Calls turned away because their attempt was over", lambda: stats.refused
    )
    if conversations is not None:
        counts = conversations.counts
        metrics.gauge(
            "prompts_spliced", "Prompts made of the tokens of their conversation", lambda: counts.spliced
        )
        metrics.gauge(
            "prompts_partly",
            "Prompts of which only the earlier turns were known in tokens",
            lambda: counts.partly,
        )
        metrics.gauge(
            "prompts_rendered", "Prompts of attempts that the engine rendered", lambda: counts.rendered
        )
        refused = "Prompts that the chat template did not let continue"
        metrics.gauge("prompts_refused_by_template", refused, lambda: counts.refused_by_template)


def _attempt_of_scope() -> tuple[str, str] | None:
    """The attempt whose address was called; spans sent there belong to it."""
    scope = SCOPE.get()
    return (scope.rollout_id, scope.attempt_id) if scope else None


def _keys(headers: dict[bytes, bytes]) -> list[str]:
    """The keys that a request brings: as OpenAI's clients send them, and as Anthropic's do."""
    scheme, _, bearer = headers.get(b"authorization", b"").decode("latin-1").strip().partition(" ")
    keys = [
        bearer.strip() if scheme.lower() == "bearer" else "",
        headers.get(b"x-api-key", b"").decode("latin-1").strip(),
    ]
    return [key for key in keys if key]


def _headers_of(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Headers that HTTP wants with a status."""
    if isinstance(error, MethodError):
        return [(b"allow", ", ".join(error.methods).encode())]
    if isinstance(error, Overloaded):
        return [(b"retry-after", str(error.retry_after).encode())]
    return [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
