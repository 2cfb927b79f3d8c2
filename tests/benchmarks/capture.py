"""Latency and throughput cost of capture: a mock engine in Ray Serve, bare and behind raylight's gateway.

    python tests/benchmarks/capture.py [--count 3000] [--engine-ms MS] [--default-ingress] [--peer-url URL]
                                       [--against CHECKOUT]

Prints p50 latency at concurrency 1, requests per second at concurrency 32, and the CPU time of the replica
and of the store for one of these. All targets are measured in turn, three times. With `--against`, another
checkout of raylight is measured before and after this one, and the best figures of both are compared.

The mock engine answers immediately, or after `--engine-ms` milliseconds: work that capture does while the
engine computes then adds no latency. With `--peer-url`, another project's proxy in front of a mock engine
gets the same load, and the ratios are printed. `--default-ingress` uses Serve's own HTTP proxy instead of
HAProxy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from raylight.engines.protocol import EngineLoad

TOKENS = 32
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi " * 100}],
    "max_tokens": TOKENS,
    "temperature": 1.0,
}
CONCURRENT = 32
WARM_UP = 5
"""Requests of each connection before the measured ones."""
TITLES = ("ServeReplica:captured", "StoreActor")
"""Titles of the processes whose CPU time is measured."""
FIGURES = ("ms p50 at 1", f"requests/s at {CONCURRENT}", "replica us/call", "store us/call")


async def load(url: str, key: str, count: int, concurrency: int) -> None:
    """Send `count` requests to a URL. Print requests per second and p50 in milliseconds."""
    import aiohttp

    latencies: list[float] = []
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=concurrency), headers=headers
    ) as session:

        async def worker(number: int) -> None:
            for _ in range(number):
                start = time.perf_counter()
                async with session.post(url, json=BODY) as response:
                    body = await response.read()
                    assert response.status == 200, (response.status, body[:300])
                latencies.append(time.perf_counter() - start)

        await asyncio.gather(*(worker(WARM_UP) for _ in range(concurrency)))
        latencies.clear()
        start = time.perf_counter()
        await asyncio.gather(*(worker(count // concurrency) for _ in range(concurrency)))
        seconds = time.perf_counter() - start
    print(len(latencies) / seconds, 1e3 * statistics.median(latencies))


def measure(url: str, key: str, count: int, concurrency: int) -> tuple[float, float]:
    """Return requests per second and p50 in milliseconds, measured by a separate process."""
    command = [
        sys.executable,
        __file__,
        "--load",
        url,
        "--key",
        key,
        "--count",
        str(count),
        "--concurrency",
        str(concurrency),
    ]
    rate, p50 = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(rate), float(p50)


def cpu_seconds(title: str) -> float:
    """Return the CPU time of those processes below this one whose title contains a text."""
    import psutil

    found = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if title in " ".join(process.cmdline()):
                found += sum(process.cpu_times()[:2])
    return found


class MockEngine:
    """Engine that answers every chat request with 32 tokens after a fixed delay."""

    kind, model, tokenizer, max_model_len = "mock", "m", None, None

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        from raylight.engines.capture_context import CURRENT

        async def chat(request: Request) -> JSONResponse:
            body = await request.json()
            if self._seconds:
                await asyncio.sleep(self._seconds)
            context = CURRENT.get()
            if context is not None:
                sample = context.sample(0, list(range(200)), {"temperature": 1.0})
                sample.output_ids, sample.logprobs, sample.weight_versions = (
                    [1] * TOKENS,
                    [-0.5] * TOKENS,
                    [0] * TOKENS,
                )
                sample.finish_reason = "stop"
            message = {"role": "assistant", "content": "hello world " * 8}
            return JSONResponse(
                {
                    "id": f"chatcmpl-{time.time_ns()}",
                    "object": "chat.completion",
                    "created": int(time.time()),
                    "model": body["model"],
                    "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                    "usage": {
                        "prompt_tokens": 200,
                        "completion_tokens": TOKENS,
                        "total_tokens": 200 + TOKENS,
                    },
                }
            )

        return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


def deploy(store: Any, secret: str, engine_s: float) -> tuple[str, str]:
    """Serve the engine bare and captured. Return both base URLs."""
    from ray import serve

    from raylight.serving.capture.recorder import Recorder
    from raylight.serving.deploy import ingress
    from raylight.serving.deploy.ingress_host import ingress_host
    from raylight.serving.gateway.gateway import build_gateway

    @serve.ingress()
    class Mock:
        def __init__(self, captured: bool) -> None:
            self._captured = captured

        async def __serve_build_asgi_app__(self) -> Any:
            engine = MockEngine(engine_s)
            if not self._captured:
                return await engine.app()
            return build_gateway(await engine.app(), engine, secret, Recorder(store.capture), None)

    with ingress_host(ingress.head_node()["NodeID"], own_cluster=True, timeout_s=180) as machine:
        host, port = ingress.start_serve(None, None, machine, timeout_s=180)
    for name in ("bare", "captured"):
        options = {"num_cpus": 0, "runtime_env": {"env_vars": ingress.SERVE_FLAGS}}
        app = serve.deployment(name=name, ray_actor_options=options, max_ongoing_requests=1000)(Mock).bind(
            name == "captured"
        )
        serve.run(app, name=name, route_prefix=f"/{name}")
    if "RAY_SERVE_ENABLE_HA_PROXY" in ingress.SERVE_FLAGS:
        for name in ("bare", "captured"):
            ingress.wait_for_route(f"http://{host}:{port}/{name}/v1/chat/completions", 60.0)
    return f"http://{host}:{port}/bare/v1", f"http://{host}:{port}/captured"


async def start_attempt(store: Any) -> tuple[str, str]:
    from raylight.types import EnqueueRolloutRequest

    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="x", mode="train")])
    (rollout,) = await store.dequeue_many_rollouts(limit=1, worker_id="benchmark")
    return rollout.rollout_id, rollout.attempt.attempt_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--key", default="unused", help=argparse.SUPPRESS)
    parser.add_argument(
        "--peer-url", help="chat-completions URL of another project's proxy in front of a mock engine"
    )
    parser.add_argument("--against", type=Path)
    parser.add_argument("--default-ingress", action="store_true")
    parser.add_argument("--engine-ms", type=float, default=0.0)
    options = parser.parse_args()
    if options.load:
        asyncio.run(load(options.load, options.key, options.count, options.concurrency))
        return
    if options.against:
        compare_checkouts(options.against.resolve(), options.count)
        return
    if options.default_ingress:
        os.environ |= {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
    from raylight.serving.deploy import ingress

    if options.default_ingress:
        for flag in ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_ENABLE_DIRECT_INGRESS"):
            del ingress.SERVE_FLAGS[flag]
    compare(options.count, options.peer_url, options.engine_ms / 1e3)


def compare_checkouts(other: Path, count: int) -> None:
    """Print the best figures of the captured target in both checkouts, and their ratios."""
    here, script = Path(__file__).resolve().parents[2], str(Path(__file__).resolve())
    runs: dict[Path, list[dict[str, float]]] = {other: [], here: []}
    for checkout in (other, here, other):
        output = subprocess.run(
            [sys.executable, script, "--count", str(count)],
            cwd=checkout,  # Ray's workers import from there first
            env=os.environ | {"PYTHONPATH": str(checkout)},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        lines = [line.split(maxsplit=1) for line in output.splitlines()]
        runs[checkout] += [json.loads(line[1]) for line in lines if line and line[0] == "captured"]
    for name in FIGURES:
        best = max if name.startswith("requests") else min
        before, now = (best(run[name] for run in runs[checkout]) for checkout in (other, here))
        print(f"{name:18} other {before:8.2f}   this {now:8.2f}   ratio {now / before:5.2f}")


def compare(count: int, peer_url: str | None, engine_s: float) -> None:
    import ray

    from raylight.agent.attempt_keys import attempt_key, attempt_path
    from raylight.config import StoreConfig
    from raylight.store.actor import start_store
    from raylight.store.client import StoreClient

    with tempfile.TemporaryDirectory() as folder:
        ray.init(address="local", log_to_driver=False, logging_level="ERROR")
        store = StoreClient(start_store("capture", f"{folder}/store.db", StoreConfig(lease_seconds=3600)))
        bare, captured = deploy(store, "secret", engine_s)
        ids = asyncio.run(start_attempt(store))
        targets = {
            "bare": (f"{bare}/chat/completions", "unused"),
            "captured": (f"{captured}{attempt_path(*ids)}/v1/chat/completions", attempt_key("secret", *ids)),
        } | ({"peer": (peer_url, "unused")} if peer_url else {})
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in targets}
        for _ in range(3):
            for name, (url, key) in targets.items():
                requests = count if name != "peer" else count // 20
                p50 = measure(url, key, requests // 3, 1)[1]
                used = [cpu_seconds(title) for title in TITLES]
                rate = measure(url, key, requests, CONCURRENT)[0]
                sent = requests // CONCURRENT * CONCURRENT + WARM_UP * CONCURRENT
                after = [cpu_seconds(title) for title in TITLES]
                cpu = [(end - start) / sent * 1e6 for start, end in zip(used, after, strict=True)]
                results[name].append((p50, rate))
                rounded = [round(figure, 2) for figure in (p50, rate, *cpu)]
                figures = dict(zip(FIGURES, rounded, strict=True))
                print(f"{name:9} {json.dumps(figures)}", flush=True)
        best = {name: (min(p for p, _ in runs), max(r for _, r in runs)) for name, runs in results.items()}
        (bare_p50, _), (p50, rate) = best["bare"], best["captured"]
        print(f"\ncapture adds {p50 - bare_p50:.2f} ms at p50; {rate:.0f} requests/s captured")
        if peer_url:
            peer_p50, peer_rate = best["peer"]
            print(f"against the peer: {peer_p50 / p50:.1f} x lower p50, {rate / peer_rate:.1f} x the rate")
        ray.shutdown()


if __name__ == "__main__":
    main()
