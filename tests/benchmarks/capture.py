"""Latency and throughput cost of capture: a mock engine in Ray Serve, bare and behind raylight's gateway.

    python tests/benchmarks/capture.py [--count 3000] [--rounds 5] [--engine-ms MS] [--default-ingress]
                                       [--bound] [--peer-url URL] [--flame DIR] [--against CHECKOUT]

Measures p50 latency with one caller and requests per second with 32, of both targets in turn, in each of some
rounds. Eight calls in a row belong to one attempt, like an agent's. Prints the added latency and the
ratio of the rates as medians over the rounds, with their range, and the CPU time per call of each process: of
the client, HAProxy, the replicas and the store. Takes two minutes.

The mock engine answers immediately, or after `--engine-ms` milliseconds: work that capture does while the
engine computes then adds no latency. `--bound` adds the barest capture (bare_capture.py): what any capture
costs that stores the tokens in another process. With `--peer-url`, another project's proxy in front of a mock
engine gets the same load, and the ratios are printed. `--default-ingress` uses Serve's own HTTP proxy instead
of HAProxy. `--flame` adds a load during which py-spy records the replica and the store, and writes a flame
graph of each. `--against` compares the medians with another checkout's, measured before and after this one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from bare_capture import BareCapture, BareStore
from flames import FLAME_S, Recorders, flame_folder
from harness import ROOT, cpu_seconds, make_parser, medians, run_script, spread, start_attempts, start_store

from raylight.engines.protocol import EngineLoad

TOKENS = 32
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi " * 100}],
    "max_tokens": TOKENS,
    "temperature": 1.0,
}
CONCURRENT = 32
CALLS_PER_ATTEMPT = 8
WARM_UP = 5
"""Requests of each connection before the measured ones."""
Target = tuple[str, str]
"""URL and key."""
Targets = Callable[[int], list[Target]]
"""Returns targets for a number of attempts."""
PROCESSES = {
    "HAProxy": "/haproxy",
    "bare replica": "ServeReplica:bare",
    "captured replica": "ServeReplica:captured",
    "store": "StoreActor",
    "bound replica": "ServeReplica:bound",
    "bound store": "BareStore",
}
"""Text in the command lines of the processes whose CPU time is measured."""


async def load(targets: list[Target], count: int, concurrency: int) -> None:
    """Send `count` requests, CALLS_PER_ATTEMPT to a target before the next one follows. Print requests per
    second, p50 in milliseconds, and the CPU time of a request in microseconds."""
    import aiohttp

    latencies: list[float] = []
    following = itertools.cycle(targets)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session:

        async def worker(number: int) -> None:
            url, key = "", ""
            for call in range(number):
                if call % CALLS_PER_ATTEMPT == 0:
                    url, key = next(following)
                start = time.perf_counter()
                headers = {"Authorization": f"Bearer {key}"}
                async with session.post(url, json=BODY, headers=headers) as response:
                    body = await response.read()
                    assert response.status == 200, (response.status, body[:300])
                latencies.append(time.perf_counter() - start)

        await asyncio.gather(*(worker(WARM_UP) for _ in range(concurrency)))
        latencies.clear()
        used, start = time.process_time(), time.perf_counter()
        await asyncio.gather(*(worker(count // concurrency) for _ in range(concurrency)))
        seconds = time.perf_counter() - start
    cpu_us = (time.process_time() - used) / len(latencies) * 1e6
    print(len(latencies) / seconds, 1e3 * statistics.median(latencies), cpu_us)


def measure(targets: Targets, count: int, concurrency: int) -> tuple[float, float, float]:
    """Return requests per second, p50 in milliseconds and the client's CPU time of a request in microseconds,
    measured by a separate process."""
    command = [sys.executable, __file__, "--load", "--count", str(count), "--concurrency", str(concurrency)]
    attempts = (count // concurrency // CALLS_PER_ATTEMPT + 2) * concurrency
    given = json.dumps(targets(attempts))
    done = subprocess.run(command, check=True, input=given, stdout=subprocess.PIPE, text=True)
    rate, p50, cpu_us = done.stdout.split()
    return float(rate), float(p50), float(cpu_us)


def processes(text: str) -> list[psutil.Process]:
    """Return the processes below this one whose command line contains a text."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if text in " ".join(process.cmdline()):
                found.append(process)
    return found


def cpu_of_each() -> dict[str, float]:
    """Return the CPU time used so far by each of `PROCESSES`."""
    return {name: cpu_seconds(processes(text)) for name, text in PROCESSES.items()}


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
                sample.output_ids, sample.logprobs = [1] * TOKENS, [-0.5] * TOKENS
                sample.weight_versions, sample.finish_reason = [0] * TOKENS, "stop"
            message = {"role": "assistant", "content": "hello world " * 8}
            usage = {"prompt_tokens": 200, "completion_tokens": TOKENS, "total_tokens": 200 + TOKENS}
            answer = {
                "id": f"chatcmpl-{time.time_ns()}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": body["model"],
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                "usage": usage,
            }
            return JSONResponse(answer)

        return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


def deploy(store: Any, secret: str, engine_s: float, bare_store: Any = None) -> list[str]:
    """Serve the engine bare and captured. Return both base URLs.

    Args:
        bare_store: actor of the barest capture, whose base URL is then the third.
    """
    from ray import serve

    from raylight.serving.capture.recorder import Recorder
    from raylight.serving.deploy import ingress
    from raylight.serving.deploy.ingress_host import ingress_host
    from raylight.serving.gateway.gateway import build_gateway

    @serve.ingress()
    class Mock:
        def __init__(self, kind: str) -> None:
            self._kind = kind

        async def __serve_build_asgi_app__(self) -> Any:
            engine = MockEngine(engine_s)
            if self._kind == "bare":
                return await engine.app()
            if self._kind == "bound":
                return BareCapture(await engine.app(), bare_store)
            return build_gateway(await engine.app(), engine, secret, Recorder(store.capture), None)

    with ingress_host(ingress.head_node()["NodeID"], own_cluster=True, timeout_s=180) as machine:
        host, port = ingress.start_serve(None, None, machine, 180, deploy=lambda host, port: None)
    names = ["bare", "captured"] + (["bound"] if bare_store else [])
    for name in names:
        options = {"num_cpus": 0, "runtime_env": {"env_vars": ingress.SERVE_FLAGS}}
        app = serve.deployment(
            name=name, ray_actor_options=options, max_ongoing_requests=1000, logging_config=ingress.QUIET
        )(Mock).bind(name)
        serve.run(app, name=name, route_prefix=f"/{name}")
    if "RAY_SERVE_ENABLE_HA_PROXY" in ingress.SERVE_FLAGS:
        for name in names:
            ingress.wait_for_route(f"http://{host}:{port}/{name}/v1/chat/completions", 60.0)
    return [f"http://{host}:{port}/{name}" + ("/v1" if name != "captured" else "") for name in names]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bound", action="store_true", help="measure the barest capture too")
    parser.add_argument("--flame", type=flame_folder, help="folder for flame graphs (needs py-spy)")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--peer-url", help="chat-completions URL of another project's proxy in front of a mock engine"
    )
    parser.add_argument("--against", type=Path)
    parser.add_argument("--default-ingress", action="store_true")
    parser.add_argument("--engine-ms", type=float, default=0.0)
    options = parser.parse_args()
    if options.load:
        asyncio.run(load(json.load(sys.stdin), options.count, options.concurrency))
        return
    if options.against:
        compare_checkouts(options.against.resolve(), options.count, options.rounds)
        return
    if options.default_ingress:
        os.environ |= {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
    from raylight.serving.deploy import ingress

    if options.default_ingress:
        for flag in ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_ENABLE_DIRECT_INGRESS"):
            del ingress.SERVE_FLAGS[flag]
    compare(options)


def compare_checkouts(other: Path, count: int, rounds: int) -> None:
    """Print the medians of the captured target in both checkouts, and their ratios."""
    runs: dict[Path, list[dict[str, float]]] = {other: [], ROOT: []}
    for checkout in (other, ROOT, other):
        runs[checkout] += run_script(__file__, "--count", count, "--rounds", rounds, checkout=checkout)
    before, now = medians(runs[other]), medians(runs[ROOT])
    for name in now:
        ratio = now[name] / max(before[name], 1e-9)
        print(f"{name:28} other {before[name]:8.2f}   this {now[name]:8.2f}   ratio {ratio:5.2f}")


def measure_round(targets: Targets, count: int) -> dict[str, float]:
    """Return the figures of one target: latency, rate, and the CPU time per call of each process."""
    p50 = measure(targets, count // 3, 1)[1]
    prepared = targets((count // CONCURRENT // CALLS_PER_ATTEMPT + 2) * CONCURRENT)
    before = cpu_of_each()
    rate, _, client_us = measure(lambda _: prepared, count, CONCURRENT)
    sent = (count // CONCURRENT + WARM_UP) * CONCURRENT
    used = {name: (seconds - before[name]) / sent * 1e6 for name, seconds in cpu_of_each().items()}
    figures = {"ms p50 at 1": p50, f"requests/s at {CONCURRENT}": rate, "us/call client": client_us}
    return figures | {f"us/call {name}": us for name, us in used.items()}


def write_flames(folder: Path, targets: Targets) -> None:
    """Record the captured replica and the store under load, and write their flame graphs."""
    pids = {
        name: processes(text)[0].pid
        for name, text in (
            ("capture_replica", PROCESSES["captured replica"]),
            ("capture_store", "StoreActor"),
        )
    }
    recorders = Recorders(folder, pids)
    while recorders.are_running:
        measure(targets, 100 * FLAME_S, CONCURRENT)
    recorders.finish()
    print(f"flame graphs: {', '.join(f'{name}.svg' for name in pids)} in {folder}")


def compare(options: argparse.Namespace) -> None:
    import ray

    from raylight.agent.attempt_keys import attempt_key, attempt_path

    with tempfile.TemporaryDirectory() as folder:
        ray.init(address="local", log_to_driver=False, logging_level="ERROR")
        store = start_store("capture", folder)
        bare_store = None
        if options.bound:
            bare_store = ray.remote(BareStore).options(num_cpus=0).remote(f"{folder}/bare.db")
        bare, captured, *bound = deploy(store, "secret", options.engine_ms / 1e3, bare_store)

        def attempts(count: int) -> list[Target]:
            return [
                (f"{captured}{attempt_path(*ids)}/v1/chat/completions", attempt_key("secret", *ids))
                for ids in asyncio.run(start_attempts(store, count))
            ]

        targets: dict[str, Targets] = {
            "bare": lambda count: [(f"{bare}/chat/completions", "unused")],
            "captured": attempts,
        }
        if bound:
            targets["bound"] = lambda count: [(f"{bound[0]}/chat/completions", "unused")]
        if options.peer_url:
            targets["peer"] = lambda count: [(options.peer_url, "unused")]
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
        for _ in range(options.rounds):
            for name, target in targets.items():
                count = options.count if name != "peer" else options.count // 20
                runs[name].append(measure_round(target, count))
                rounded = {figure: round(value, 2) for figure, value in runs[name][-1].items()}
                print(f"{name:9} {json.dumps(rounded)}", flush=True)
        print_comparison(runs)
        print(json.dumps(runs["captured"]))
        if options.flame:
            write_flames(options.flame, targets["captured"])
        ray.shutdown()


def print_comparison(runs: dict[str, list[dict[str, float]]]) -> None:
    """Print the figures of all rounds: of each round's pair, and the CPU time per call."""
    p50, rate = "ms p50 at 1", f"requests/s at {CONCURRENT}"
    pairs = list(zip(runs["bare"], runs["captured"], strict=True))
    added = [captured[p50] - bare[p50] for bare, captured in pairs]
    ratios = [captured[rate] / bare[rate] for bare, captured in pairs]
    print(f"\nmedian (range) of {len(pairs)} rounds")
    print(f"added p50 with one caller: {spread(added, 2)} ms")
    print(f"captured / bare requests/s with {CONCURRENT} callers: {spread(ratios, 2)}")
    if "bound" in runs:
        limits = [bound[rate] / bare[rate] for bare, bound in zip(runs["bare"], runs["bound"], strict=True)]
        print(f"bound / bare requests/s with {CONCURRENT} callers: {spread(limits, 2)}")
    if "peer" in runs:
        both = list(zip(runs["peer"], runs["captured"], strict=True))
        print(f"peer / captured p50: {spread([peer[p50] / one[p50] for peer, one in both], 2)}")
        print(f"captured / peer requests/s: {spread([one[rate] / peer[rate] for peer, one in both], 2)}")
    for name in (name for name in runs["bare"][0] if name.startswith("us/call")):
        medians = {target: statistics.median(run[name] for run in runs[target]) for target in runs}
        print(f"{name:26}" + "".join(f" {target} {median:6.0f}" for target, median in medians.items()))


if __name__ == "__main__":
    main()
