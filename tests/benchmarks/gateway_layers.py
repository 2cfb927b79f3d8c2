"""CPU time that each layer of a replica adds to a captured call, which bounds the requests per second.

    python tests/benchmarks/gateway_layers.py [--calls 2000] [--rounds 9] [--profile FILE]

Calls of 32 callers, eight in a row of one attempt, pass the layers of `build_gateway` in this process: first
the engine's application alone, which answers at once, and then with one layer more at a time. There are no
sockets, no HTTP and no Ray, so what Serve and its server add is missing. Prints the microseconds that each
layer adds, as medians over the rounds, and what is left of requests per second with it. `--profile` writes
a cProfile of the whole stack, for `python -m pstats`.
"""

import asyncio
import cProfile
import json
import statistics
import time
from typing import Any

import msgpack
from capture import BODY, CALLS_PER_ATTEMPT, CONCURRENT, MockEngine
from harness import make_parser, start_attempts
from starlette.types import ASGIApp, Message, Scope

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.engines.capture_context import SCOPE, AttemptScope
from raylight.serving.capture.middleware import CaptureMiddleware
from raylight.serving.capture.recorder import CallSink, Recorder
from raylight.serving.capture.retry_cache import RetryCache
from raylight.serving.dialects.translate import TranslationMiddleware
from raylight.serving.gateway.gateway import Gateway
from raylight.serving.gateway.metrics import Metrics
from raylight.serving.gateway.model_names import AnyModelName
from raylight.store.call_rows import CallDeltas
from raylight.store.client import StoreClient
from raylight.store.service import StoreService

SECRET = "secret"
CONTENT = json.dumps(BODY).encode()
PATH = "/v1/chat/completions"
Ids = tuple[str, str]
"""Ids of a rollout and of its attempt."""


async def discard(opened: list[Any], closed: list[Any]) -> list[Any]:
    """Sink of records that has the store's messages made, and drops them."""
    return []


def encoding_sink() -> CallSink:
    """Return a sink that encodes records as the store's client does, and drops them."""
    deltas = CallDeltas()

    async def encode(opened: list[Any], closed: list[Any]) -> list[Any]:
        msgpack.packb([deltas.encode(*call) for call in closed])
        return []

    return encode


def stacks(engine: MockEngine, engine_app: ASGIApp, store: StoreClient) -> dict[str, ASGIApp]:
    """Return the application with one layer more at a time, by the name of the layer that is added."""
    metrics = Metrics()

    def retries(app: ASGIApp) -> ASGIApp:
        return RetryCache(AnyModelName(TranslationMiddleware(app), engine.model, lambda: None))

    def captured(sink: CallSink) -> ASGIApp:
        return CaptureMiddleware(metrics.count_samples(engine_app), engine, Recorder(sink), None)

    def gateway(app: ASGIApp) -> ASGIApp:
        return Gateway(app, engine, SECRET, None, metrics)

    checked = TranslationMiddleware(metrics.count_samples(engine_app))
    return {
        "engine's application": engine_app,
        "dialects: bounds, normal form, keep-alive": checked,
        "model names, retries": retries(metrics.count_samples(engine_app)),
        "keys, routes, errors, metrics": gateway(retries(metrics.count_samples(engine_app))),
        "announcements, answers, records": gateway(retries(captured(discard))),
        "encoding for the store": gateway(retries(captured(encoding_sink()))),
        "the store itself, in this process": gateway(retries(captured(store.capture))),
    }


async def call(app: ASGIApp, ids: Ids, key: str, content: bytes = CONTENT) -> None:
    """Send one request through an application, and check its status."""
    is_gateway = isinstance(app, Gateway)
    path = attempt_path(*ids) + PATH if is_gateway else PATH
    headers = [
        (b"host", b"127.0.0.1:8000"),
        (b"authorization", f"Bearer {key}".encode()),
        (b"accept", b"*/*"),
        (b"accept-encoding", b"gzip, deflate"),
        (b"user-agent", b"benchmark"),
        (b"content-length", str(len(content)).encode()),
        (b"content-type", b"application/json"),
    ]
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
    }
    sent, status = False, 0

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError("the event is never set")

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    token = None if is_gateway else SCOPE.set(AttemptScope(*ids))
    await app(scope, receive, send)
    if token is not None:
        SCOPE.reset(token)
    assert status == 200, status


async def load(app: ASGIApp, attempts: list[Ids]) -> float:
    """Send eight calls of each attempt, of 32 attempts at once; return the CPU time of a call, in seconds."""
    waiting = iter(attempts)

    async def caller() -> None:
        for ids in waiting:
            key = attempt_key(SECRET, *ids)
            for _ in range(CALLS_PER_ATTEMPT):
                await call(app, ids, key)

    started = time.process_time()
    await asyncio.gather(*(caller() for _ in range(CONCURRENT)))
    return (time.process_time() - started) / len(attempts) / CALLS_PER_ATTEMPT


async def measure(calls: int, rounds: int, profile: str | None) -> None:
    engine, store = MockEngine(0.0), StoreClient(StoreService())
    apps = stacks(engine, await engine.app(), store)
    seconds: dict[str, list[float]] = {name: [] for name in apps}
    for number in range(rounds + 1):
        for name, app in apps.items():
            attempts = await start_attempts(store, calls // CALLS_PER_ATTEMPT)
            used = await load(app, attempts)
            if number:  # the first round warms up
                seconds[name].append(used)
    report(seconds)
    if profile:
        attempts = await start_attempts(store, calls // CALLS_PER_ATTEMPT)
        with cProfile.Profile() as recorded:
            await load(app, attempts)
        recorded.dump_stats(profile)


def report(seconds: dict[str, list[float]]) -> None:
    before: list[float] | None = None
    for name, values in seconds.items():
        added = values if before is None else [now - then for now, then in zip(values, before, strict=True)]
        total = statistics.median(values)
        print(f"{name:44} +{1e6 * statistics.median(added):5.0f} us  in all {1e6 * total:5.0f} us")
        before = values


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", metavar="FILE")
    args = parser.parse_args()
    asyncio.run(measure(args.calls, args.rounds, args.profile))


if __name__ == "__main__":
    main()
