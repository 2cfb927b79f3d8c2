"""Tokens per second of an engine, bare and behind the gateway and a durable store, and time of a weight sync.

    python tests/benchmarks/engine_tokens.py --engine transformers|vllm [--concurrent 64] [--tokens 64]

"bare" calls the engine's own `generate`; for vLLM also with the log-probs that training needs. "captured"
sends a chat-completions request through every layer of the gateway, and its record reaches the store. The
modes are measured in turn, with the quickstart's model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from weight_loading import load_weights

from raylight.quickstart import STARTER_MODEL

PROMPT = [65, 66, 67, 68]
SECRET = "secret"


async def call(app: Any, path: str, key: str, body: dict[str, Any]) -> None:
    """Send a request by plain ASGI: a client library's time would be measured too."""
    sent = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {key}".encode())]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "server": ("engine", 80),
        "client": ("me", 1),
    }
    pieces = [{"type": "http.request", "body": sent, "more_body": False}]

    async def receive() -> Any:
        if pieces:
            return pieces.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        assert message.get("status", 200) == 200, message

    await app(scope, receive, send)


@asynccontextmanager
async def transformers_engine(
    concurrent: int,
) -> AsyncIterator[tuple[Any, dict[str, Callable[[int], Awaitable[Any]]]]]:
    import torch

    from raylight.engines.transformers.engine import TransformersEngine
    from raylight.engines.transformers.sampling import SamplingParams

    torch.set_num_threads(1)
    engine = TransformersEngine(STARTER_MODEL, "policy", slots=concurrent)

    async def bare(tokens: int) -> None:
        await engine.generate(PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True))

    yield engine, {"bare": bare}
    engine.close()


@asynccontextmanager
async def vllm_engine(
    concurrent: int,
) -> AsyncIterator[tuple[Any, dict[str, Callable[[int], Awaitable[Any]]]]]:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from argparse import Namespace

    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from raylight.engines.vllm.args import vllm_args
    from raylight.engines.vllm.engine import VllmEngine

    engine_args = vllm_args(
        STARTER_MODEL,
        {},
        dtype="float32",
        max_model_len=512,
        max_concurrent=concurrent,
        max_waiting=1000,
        seed=0,
        gpus=0,
        max_adapters=0,
    )
    frontend = {name: engine_args.pop(name) for name in list(engine_args) if hasattr(FrontendArgs(), name)}
    args = AsyncEngineArgs(model=STARTER_MODEL, served_model_name=["policy"], **engine_args)
    client = AsyncLLM.from_engine_args(args)
    namespace = Namespace(**(vars(FrontendArgs(**frontend)) | vars(args)))

    async def native() -> Any:
        tasks = await client.get_supported_tasks()
        app = build_app(namespace, tasks, client.model_config)
        await init_app_state(client, app.state, namespace, tasks)
        return app

    engine = VllmEngine(client, native, "policy")

    def bare(logprobs: int | None) -> Callable[[int], Awaitable[Any]]:
        async def generate(tokens: int) -> None:
            params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, logprobs=logprobs)
            async for _ in client.generate(
                {"prompt_token_ids": PROMPT}, params, request_id=str(time.perf_counter_ns())
            ):
                pass

        return generate

    yield engine, {"bare": bare(None), "bare with log-probs": bare(0)}
    engine.close()


async def measure(kind: str, concurrent: int, tokens: int, rounds: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from raylight.agent.attempt_keys import attempt_key, attempt_path
    from raylight.config import StoreConfig
    from raylight.serving.capture.recorder import Recorder
    from raylight.serving.gateway.gateway import build_gateway
    from raylight.store.client import StoreClient
    from raylight.store.service import StoreService
    from raylight.types import EnqueueRolloutRequest

    with tempfile.TemporaryDirectory() as folder:
        store = StoreClient(StoreService(f"{folder}/store.db", StoreConfig(lease_seconds=3600)))
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="x", mode="train")])
        (rollout,) = await store.dequeue_many_rollouts(worker_id="benchmark")
        ids = (rollout.rollout_id, rollout.attempt.attempt_id)
        async with (transformers_engine if kind == "transformers" else vllm_engine)(concurrent) as (
            engine,
            modes,
        ):
            app = build_gateway(await engine.app(), engine, SECRET, Recorder(store.capture), None)
            path, key = f"{attempt_path(*ids)}/v1/chat/completions", attempt_key(SECRET, *ids)

            def captured(stream: bool) -> Callable[[int], Awaitable[Any]]:
                async def ask(tokens: int) -> None:
                    messages = [{"role": "user", "content": "12+30="}]
                    body = {
                        "model": "policy",
                        "messages": messages,
                        "max_tokens": tokens,
                        "ignore_eos": True,
                        "stream": stream,
                    }
                    await call(app, path, key, body)

                return ask

            modes = modes | {"captured": captured(False), "captured, streaming": captured(True)}
            rates: dict[str, list[float]] = {name: [] for name in modes}
            for turn in range(rounds + 1):
                for name, send_request in modes.items():
                    start = time.perf_counter()
                    await asyncio.gather(*(send_request(tokens) for _ in range(concurrent)))
                    if turn:  # the first round warms up
                        rates[name].append(concurrent * tokens / (time.perf_counter() - start))
            bare = statistics.median(rates["bare"])
            for name, values in rates.items():
                rate = statistics.median(values)
                share = f"{rate / bare:6.1%} of the bare engine"
                print(f"{name:22} {rate:8.0f} tokens/s   {share}   (best {max(values):.0f})")
            weights = dict(
                AutoModelForCausalLM.from_pretrained(STARTER_MODEL, dtype=torch.float32).state_dict()
            )
            times = []
            for version in range(1, 21):
                start = time.perf_counter()
                await load_weights(engine, version, weights)
                times.append(1e3 * (time.perf_counter() - start))
            print(f"weight sync            {statistics.median(times):8.1f} ms, longest {max(times):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    asyncio.run(measure(options.engine, options.concurrent, options.tokens, options.rounds))


if __name__ == "__main__":
    main()
