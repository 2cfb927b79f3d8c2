"""A gateway around fakes, and clients of it."""

import json
from collections.abc import Callable
from typing import Any

import httpx
from dialect_helpers import FakeChat, Say
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from unit_helpers import within

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.engines.capture_context import SCOPE, AttemptScope
from raylight.ray_metrics.reporter import series
from raylight.serving.dialects.translate import TranslationMiddleware
from raylight.serving.gateway.gateway import Gateway
from raylight.serving.gateway.metrics import Metrics
from raylight.traces.otlp import traces_route
from raylight.types import Span

SECRET = "run-secret"
CHAT = "/v1/chat/completions"
MINE = attempt_path("ro-1", "at-1")
KEY = attempt_key(SECRET, "ro-1", "at-1")
BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
POSTED = [
    CHAT,
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/tokenize",
    "/v1/detokenize",
]
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
}
MODELS = {
    "object": "list",
    "data": [{"id": "policy", "object": "model"}, {"id": "org/lora 1", "object": "model"}],
}


def value_of(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return the value of a series as Prometheus shows it; None if there is none."""
    found = [
        value
        for measurement in metrics.collect()
        for series_name, value, of in series(measurement)
        if (series_name, of) == (f"raylight_{name}", labels)
    ]
    assert len(found) <= 1
    return found[0] if found else None


class StubEngine:
    """A fake engine that may be unhealthy."""

    kind = "stub"
    model = "policy"
    tokenizer = None
    max_model_len = 64
    ill: Exception | None = None

    async def check_health(self) -> None:
        if self.ill:
            raise self.ill


class Inner:
    """Inner application of a gateway: records requests, and answers with `answer`, or with `app`."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        """Path, attempt, body and headers of each request."""
        self.answer: Any = ANSWER
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"] if scope["method"] == "POST" else b""
        self.seen.append((scope["path"], SCOPE.get(), body, dict(scope["headers"])))
        if self.app is not None:
            await self.app(scope, receive, send)
        else:
            answer = MODELS if scope["path"] == "/v1/models" else self.answer
            await JSONResponse(answer)(scope, receive, send)

    @property
    def attempts(self) -> list[tuple[str, str]]:
        return [(scope.rollout_id, scope.attempt_id) for _, scope, _, _ in self.seen if scope is not None]


class Site:
    """A gateway in this process, and a client of it."""

    def __init__(
        self, secret: str | None = SECRET, sink: Callable[..., Any] | None = None, **settings: Any
    ) -> None:
        self.engine = StubEngine()
        self.inner = Inner()
        self.metrics = Metrics()
        self.spans: list[Span] = []
        traces = traces_route(sink or self._take, lambda: self._attempt())
        self.app = Gateway(self.inner, self.engine, secret, traces, self.metrics, **settings)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://replica")

    async def _take(self, spans: list[Span]) -> None:
        self.spans += spans

    @staticmethod
    def _attempt() -> tuple[str, str] | None:
        scope = SCOPE.get()
        return (scope.rollout_id, scope.attempt_id) if scope else None

    async def post(self, path: str = MINE + CHAT, key: str | None = None, **how: Any) -> httpx.Response:
        """Call with the attempt's key or another one."""
        if not {"json", "content", "data"} & set(how):
            how["json"] = BODY
        headers = {"authorization": f"Bearer {KEY if key is None else key}"} | how.pop("headers", {})
        if isinstance(how.get("content"), bytes):
            headers.setdefault("content-type", "application/json")
        async with within():
            return await self.client.post(path, headers=headers, **how)

    async def get(
        self, path: str, key: str | None = SECRET, method: str = "GET", **headers: str
    ) -> httpx.Response:
        given = {} if key is None else {"authorization": f"Bearer {key}"}
        async with within():
            return await self.client.request(method, path, headers=given | headers)

    def value(self, name: str, **labels: str) -> float | None:
        return value_of(self.metrics, name, **labels)


class Replica(FakeChat):
    """Scripted model behind a gateway.

    Attributes:
        app: the gateway's application.
        attempts: the attempts that called.
    """

    def __init__(self, *says: Say) -> None:
        super().__init__(*says)
        self.attempts: list[AttemptScope | None] = []
        engine: Any = StubEngine()
        self.app = Gateway(TranslationMiddleware(self), engine, SECRET, None, Metrics())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.attempts.append(SCOPE.get())
        await super().__call__(scope, receive, send)


def asgi_scope(path: str, method: str = "POST", key: str = SECRET, **changes: Any) -> dict[str, Any]:
    """Return the ASGI scope of a request."""
    headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "server": ("replica", 80),
        "client": ("agent", 1),
    } | changes


def is_refusal(answer: httpx.Response, path: str) -> bool:
    """Return True if an answer is an error in the shape of the dialect of a path."""
    body = json.loads(answer.content)
    error = body["error"]
    if path.rpartition("/v1/")[2].startswith("messages"):
        return (
            body["type"] == "error"
            and body["request_id"] == answer.headers["request-id"]
            and set(error) == {"type", "message"}
            and all(map(error.get, ("type", "message")))
        )
    return set(error) == {"message", "type", "param", "code"} and all(map(error.get, ("type", "message")))
