"""One engine in a separate process: reads its task as JSON from the command line, prints its figures.

python engine_program.py '{"model": FOLDER, "device": "cuda", "shape": "0.5B", "kind": "vllm", "dtype": ...}'
"""

import asyncio
import json
import os
import sys
import time
from argparse import Namespace
from typing import Any

import httpx
import torch
from gpu_shapes import SHAPES, Shape
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from raylight.config import EngineConfig
from raylight.engines.capture_context import CURRENT, AttemptScope, CaptureContext, Sample, new_keys
from raylight.engines.protocol import Engine, EngineSettings
from raylight.engines.registry import build_engine

MODEL = "policy"
MAX_MODEL_LEN = 2048
MEMORY_SHARE = 0.5
"""Part of the GPU's memory for vLLM; plain transformers uses the rest."""
PROBE = list(range(40, 60))


def make_config(task: dict[str, Any], shape: Shape) -> EngineConfig:
    return EngineConfig(
        kind=task["kind"], dtype=task["dtype"], max_model_len=MAX_MODEL_LEN, max_concurrent=max(shape.rows, 8)
    )


def make_vllm(task: dict[str, Any], config: EngineConfig) -> Engine:
    """Build vLLM's engine as a replica does, without Ray."""
    from raylight.engines.vllm.placement import environment

    on_gpu = task["device"] == "cuda"
    os.environ |= environment(config.model_copy(update={"num_gpus": float(on_gpu)}), task["model"])
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from raylight.engines.vllm.args import vllm_args
    from raylight.engines.vllm.engine import VllmEngine

    own = {"enable_sleep_mode": True, "gpu_memory_utilization": MEMORY_SHARE} if on_gpu else {}
    options = vllm_args(
        task["model"],
        own,
        dtype=config.dtype,
        max_model_len=MAX_MODEL_LEN,
        max_concurrent=config.max_concurrent,
        max_waiting=config.max_waiting,
        seed=0,
        gpus=float(on_gpu),
        max_adapters=0,
    )
    frontend = {name: options.pop(name) for name in list(options) if hasattr(FrontendArgs(), name)}
    arguments = AsyncEngineArgs(task["model"], served_model_name=[MODEL], **options)
    namespace = Namespace(**vars(FrontendArgs(**frontend)) | vars(arguments))
    client = AsyncLLM.from_engine_args(arguments)

    async def native_app() -> Any:
        supported = await client.get_supported_tasks()
        app = build_app(namespace, supported, client.model_config)
        await init_app_state(client, app.state, namespace, supported)
        return app

    return VllmEngine(client, native_app, MODEL)


async def sample(engine: Engine, shape: Shape) -> tuple[list[Sample], float]:
    """Send concurrent requests twice, and return the samples and the seconds of the second time."""
    app, contexts = await engine.app(), []

    async def captured(scope: Any, receive: Any, send: Any) -> None:
        attempt = AttemptScope("ro-1", "at-1")
        contexts.append(CaptureContext(attempt, "chat", {}, 0.0, new_keys(attempt, 1)))
        CURRENT.set(contexts[-1])
        await app(scope, receive, send)

    transport = httpx.ASGITransport(app=captured)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=600) as http:
        client = AsyncOpenAI(base_url="http://engine/v1", api_key="unused", http_client=http, max_retries=0)

        async def ask(number: int) -> None:
            await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"{number}+1="}],
                max_tokens=shape.answer_tokens,
                extra_body={"ignore_eos": True},
            )

        for _ in range(2):
            contexts.clear()
            start = time.perf_counter()
            await asyncio.gather(*map(ask, range(shape.rows)))
            seconds = time.perf_counter() - start
    return [found for context in contexts for found in context.samples.values()], seconds


@torch.no_grad()
def differences(model: str, device: str, samples: list[Sample]) -> list[float]:
    """Return the differences of the samples' log-probs from plain transformers in float32."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    found: list[float] = []
    for one in samples:
        prompt, output = list(one.prompt_ids), list(one.output_ids)
        logits = plain(torch.tensor([prompt + output], device=device)).logits[0, len(prompt) - 1 : -1]
        known = logits.log_softmax(-1).gather(-1, torch.tensor(output, device=device)[:, None])[:, 0]
        found += (known.cpu() - torch.tensor(one.logprobs)).abs().tolist()
    return found


async def sleep_and_wake(engine: Engine) -> dict[str, Any]:
    """Return the memory that sleep frees, and the difference of log-probs before and after."""
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    before = await engine.logprobs(PROBE)
    reason = await engine.sleep()
    freed = torch.cuda.mem_get_info()[0] - free if torch.cuda.is_available() else 0
    await engine.wake()
    after = await engine.logprobs(PROBE)
    change = max(abs(a - b) for a, b in zip(before, after, strict=True))
    return {"not_asleep": reason, "freed_bytes": freed, "changed": change}


async def main(task: dict[str, Any]) -> dict[str, Any]:
    shape = SHAPES[task["shape"]]
    config = make_config(task, shape)
    if task["kind"] == "vllm":
        engine = make_vllm(task, config)
    else:
        engine = await build_engine(EngineSettings(task["model"], MODEL, config, device=task["device"]))
    try:
        samples, seconds = await sample(engine, shape)
        slept = await sleep_and_wake(engine)
    finally:
        engine.close()
    found = differences(task["model"], task["device"], samples)
    tokens = sum(len(one.output_ids) for one in samples)
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "difference_mean": sum(found) / len(found),
        "difference_max": max(found),
        **slept,
    }


if __name__ == "__main__":
    result = asyncio.run(main(json.loads(sys.argv[1])))
    print(json.dumps(result))
