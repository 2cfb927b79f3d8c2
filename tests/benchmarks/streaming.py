"""Tokens per second of streamed answers over HTTP, from an engine's own application and behind the gateway.

    python tests/benchmarks/streaming.py [--engine vllm|transformers] [--dialect chat|messages|responses]
                                         [--callers 64] [--tokens 64] [--rounds 6] [--whole]

A server process holds one engine and serves its application on one port, bare, and on another port behind the
gateway, whose records go to the store's actor. This process has a number of callers, each with a connection
and one request after another. All modes are measured in turn, in every round:

- bare: no log-probs are requested, so that the engine computes none.
- bare, computed: no log-probs are requested, but vLLM is made to compute them for the sampled tokens.
  Training needs them, so that this is the bound of "captured".
- captured: the same request behind the gateway.
- bare, with log-probs; captured, with log-probs: the request asks for them.

Prints tokens per second, events for a token (engines put several tokens into an event while the server is
busy) and the CPU time of each process for a token, as medians of the rounds, and the ratios of captured to
bare, of each round's pair. `--whole` asks for answers that are not streamed. vLLM
serves all dialects itself; the transformers engine serves chat.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import psutil
from harness import cpu_seconds, make_parser, spread, start_attempts, start_store

SECRET = "secret"
MODEL = "policy"
REQUESTS_PER_CALLER = 4
COMPUTED = "computed"
"""Header of a bare request for which vLLM is to compute log-probs."""
_COMPUTE: ContextVar[bool] = ContextVar("compute", default=False)
QUESTION = "12+30="
PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}


def request_body(dialect: str, tokens: int, stream: bool, logprobs: bool) -> dict[str, Any]:
    common = {"model": MODEL, "stream": stream, "temperature": 1.0}
    if dialect == "responses":
        return common | {"input": QUESTION, "max_output_tokens": tokens}
    messages = [{"role": "user", "content": QUESTION}]
    body = common | {"messages": messages, "max_tokens": tokens}
    if dialect == "chat":
        body |= {"ignore_eos": True}
    return body | ({"logprobs": True, "top_logprobs": 0} if logprobs else {})


# the server process


@asynccontextmanager
async def transformers_engine(callers: int) -> AsyncIterator[tuple[Any, Any]]:
    import torch

    from raylight.engines.transformers.engine import TransformersEngine
    from raylight.quickstart import STARTER_MODEL

    torch.set_num_threads(1)
    engine = TransformersEngine(STARTER_MODEL, MODEL, slots=callers)
    app = await engine.app()
    yield engine, (app, app)
    engine.close()


@asynccontextmanager
async def vllm_engine(callers: int) -> AsyncIterator[tuple[Any, Any]]:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from argparse import Namespace

    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from raylight.engines.vllm.args import vllm_args
    from raylight.engines.vllm.engine import VllmEngine
    from raylight.quickstart import STARTER_MODEL

    engine_args = vllm_args(
        STARTER_MODEL,
        {},
        dtype="float32",
        max_model_len=512,
        max_concurrent=callers,
        max_waiting=1000,
        seed=0,
        gpus=0,
        max_adapters=0,
    )
    frontend = {name: engine_args.pop(name) for name in list(engine_args) if hasattr(FrontendArgs(), name)}
    args = AsyncEngineArgs(model=STARTER_MODEL, served_model_name=[MODEL], **engine_args)
    client = AsyncLLM.from_engine_args(args)
    namespace = Namespace(**(vars(FrontendArgs(**frontend)) | vars(args)))
    add_request = client.output_processor.add_request

    def add_with_logprobs(request: Any, *rest: Any) -> None:
        """Have all answers be as long as allowed, and the core compute log-probs that nothing reads."""
        params = request.sampling_params
        params._eos_token_id, params.stop_token_ids = None, []  # not all dialects have `ignore_eos`
        if not _COMPUTE.get():
            add_request(request, *rest)
            return
        params.logprobs = 0
        add_request(request, *rest)
        processor = client.output_processor.request_states[request.request_id].logprobs_processor
        processor.logprobs = processor.cumulative_logprob = None
        processor._update_sample_logprobs = lambda _: None

    client.output_processor.add_request = add_with_logprobs

    async def native() -> Any:
        tasks = await client.get_supported_tasks()
        app = build_app(namespace, tasks, client.model_config)
        await init_app_state(client, app.state, namespace, tasks)
        return app

    engine = VllmEngine(client, native, MODEL)
    own = await native()

    async def bare(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            _COMPUTE.set(any(name == COMPUTED.encode() for name, _ in scope["headers"]))
        await own(scope, receive, send)

    yield engine, (bare, await engine.app())
    engine.close()


async def serve(kind: str, callers: int, folder: str) -> None:
    """Serve until the standard input ends. Print the addresses and the processes as JSON."""
    import ray
    import uvicorn

    from raylight.agent.attempt_keys import attempt_key, attempt_path
    from raylight.serving.capture.recorder import Recorder
    from raylight.serving.gateway.gateway import build_gateway

    make_engine = transformers_engine if kind == "transformers" else vllm_engine
    async with make_engine(callers) as (engine, (bare, engine_app)):
        ray.init(address="local", log_to_driver=False, logging_level="ERROR", num_cpus=2)
        store = start_store("streaming", folder)
        (ids,) = await start_attempts(store, 1)
        recorder = Recorder(store.capture)
        gateway = build_gateway(engine_app, engine, SECRET, recorder, None)
        servers = [
            uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False, lifespan="off"))
            for app in (bare, gateway)
        ]
        sockets = [server.config.bind_socket() for server in servers]
        ports = [socket.getsockname()[1] for socket in sockets]
        tasks = [
            asyncio.create_task(server.serve(sockets=[socket]))
            for server, socket in zip(servers, sockets, strict=True)
        ]
        processes = {"server": os.getpid()}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                if "EngineCore" in title:
                    processes["engine core"] = process.pid
                elif "Worker" in title and "VLLM" in title:
                    processes["worker"] = process.pid
                elif "StoreActor" in title:
                    processes["store"] = process.pid
        info = {
            "bare": f"http://127.0.0.1:{ports[0]}/v1",
            "captured": f"http://127.0.0.1:{ports[1]}{attempt_path(*ids)}/v1",
            "key": attempt_key(SECRET, *ids),
            "processes": processes,
        }
        gc.collect()
        gc.freeze()  # as vLLM's own server and Serve's replicas do
        print(json.dumps(info), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)
        await recorder.aclose()
        ray.shutdown()


# the callers


@contextlib.contextmanager
def server(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--serve", folder]
        command += ["--engine", options.engine, "--callers", str(options.callers)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = next((line for line in process.stdout if line.startswith('{"bare"')), None)
            if line is None:
                raise SystemExit("the server did not start")
            yield json.loads(line)
        finally:
            process.stdin.close()
            process.wait(60)


async def send_all(
    url: str, key: str, headers: dict[str, str], body: dict[str, Any], callers: int
) -> tuple[float, int]:
    """Have each caller send its requests; return the seconds until all answers are complete, and the number
    of events."""
    import aiohttp

    headers = {"Authorization": f"Bearer {key}"} | headers
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=callers), headers=headers
    ) as session:
        events = 0

        async def caller() -> None:
            nonlocal events
            for _ in range(REQUESTS_PER_CALLER):
                async with session.post(url, json=body) as response:
                    last = b""
                    async for piece in response.content.iter_any():
                        last = piece
                        events += piece.count(b"data: ")
                    assert response.status == 200, (response.status, last[:300])
                    assert not body["stream"] or last.rstrip().endswith((b"[DONE]", b"}")), last[-300:]

        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        return time.perf_counter() - start, events


def cpu_of_each(processes: dict[str, int]) -> dict[str, float]:
    return {name: cpu_seconds([psutil.Process(pid)]) for name, pid in processes.items()}


def measure(options: argparse.Namespace) -> None:
    def body(logprobs: bool) -> dict[str, Any]:
        return request_body(options.dialect, options.tokens, not options.whole, logprobs)

    modes: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {"bare": ("bare", {}, body(False))}
    if options.engine == "vllm":
        modes["bare, computed"] = ("bare", {COMPUTED: "1"}, body(False))
    modes["captured"] = ("captured", {}, body(False))
    if options.dialect == "chat":
        modes["bare, with log-probs"] = ("bare", {}, body(True))
        modes["captured, with log-probs"] = ("captured", {}, body(True))
    if options.only:
        modes = {name: mode for name, mode in modes.items() if name == options.only}
    rates: dict[str, list[float]] = {name: [] for name in modes}
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in modes}
    events_per_token: dict[str, list[float]] = {name: [] for name in modes}
    tokens = options.callers * REQUESTS_PER_CALLER * options.tokens
    with server(options) as info:
        print("processes:", json.dumps(info["processes"]), flush=True)
        for turn in range(options.rounds + 1):  # the first one warms up
            names = list(modes) if turn % 2 else list(reversed(modes))
            for name in names:
                target, headers, content = modes[name]
                url = f"{info[target]}/{PATHS[options.dialect]}"
                before = cpu_of_each(info["processes"])
                seconds, events = asyncio.run(send_all(url, info["key"], headers, content, options.callers))
                after = cpu_of_each(info["processes"])
                if turn:
                    rates[name].append(tokens / seconds)
                    costs[name].append({p: 1e6 * (after[p] - before[p]) / tokens for p in after})
                    events_per_token[name].append(events / tokens)
    for name, values in rates.items():
        cost = ", ".join(
            f"{process} {statistics.median(each[process] for each in costs[name]):.0f}"
            for process in costs[name][0]
        )
        events = statistics.median(events_per_token[name])
        rate = f"{statistics.median(values):7.0f} tokens/s; {events:.2f} events a token"
        print(f"{name:25} {rate}; CPU us a token: {cost}")
    for name, reference in (
        ("captured", "bare"),
        ("captured", "bare, computed"),
        ("bare, computed", "bare"),
        ("captured, with log-probs", "bare, with log-probs"),
    ):
        if name in rates and reference in rates:
            ratios = [ours / theirs for ours, theirs in zip(rates[name], rates[reference], strict=True)]
            print(f"{name} / {reference}: {spread(ratios, 2)}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="vllm")
    parser.add_argument("--dialect", choices=list(PATHS), default="chat")
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--whole", action="store_true", help="ask for answers that are not streamed")
    parser.add_argument("--only", help="measure only this mode, for a profiler")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        import uvloop

        uvloop.run(serve(options.engine, options.callers, options.serve))  # as in Serve's replicas
    else:
        measure(options)


if __name__ == "__main__":
    main()
