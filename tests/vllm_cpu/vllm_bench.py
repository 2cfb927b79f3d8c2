"""Test bench of a vLLM engine on a CPU: its application, clients, and the capture contexts of requests."""

import contextlib
import itertools
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

import httpx
from openai import AsyncOpenAI

from raylight.engines.capture_context import CURRENT, AttemptScope, CaptureContext, new_keys

MODEL = "policy"
MAX_MODEL_LEN = 512


class Bench:
    """Test bench: the engine, its application, clients, and the capture contexts of requests."""

    def __init__(self, engine: Any, app: Any, path: str) -> None:
        self.engine, self.path = engine, path
        self.contexts: list[CaptureContext] = []
        self._app = app
        self.versions = itertools.count(1)
        self.max_tokens: int | None = None
        """Further limit of the tokens of a choice."""
        self.trains = False
        """True if the requests are of rollouts that are trained."""
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.captured), base_url="http://engine", timeout=60
        )
        self.openai = AsyncOpenAI(
            base_url="http://engine/v1", api_key="unused", http_client=self.http, max_retries=0
        )

    async def captured(self, scope: Any, receive: Any, send: Any) -> None:
        """Call the application, with a new capture context for each request."""
        attempt = AttemptScope("ro-1", "at-1", trains=self.trains)
        dialect = "completions" if scope["path"] == "/v1/completions" else "chat"
        keys = new_keys(attempt, 1)
        context = CaptureContext(attempt, dialect, {}, 0.0, keys, max_tokens=self.max_tokens)
        self.contexts.append(context)
        CURRENT.set(context)
        await self._app(scope, receive, send)

    async def bare(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    @property
    def context(self) -> CaptureContext:
        return self.contexts[-1]

    @property
    def sample(self) -> Any:
        """Sample of the only choice of the last request."""
        (sample,) = self.context.samples.values()
        return sample

    def reference(self) -> Any:
        """Load the same model in plain transformers."""
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)


@contextlib.asynccontextmanager
async def open_bench(
    model_path: str,
    slots: int = 64,
    dtype: str = "float32",
    max_adapters: int = 2,
    max_model_len: int = MAX_MODEL_LEN,
    **more: Any,
) -> AsyncIterator[Bench]:
    """Run an engine until the block ends.

    Args:
        more: arguments of vLLM.
        max_adapters: 0 for a model whose adapters vLLM does not serve.
    """
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from raylight.engines.vllm.args import vllm_args
    from raylight.engines.vllm.engine import VllmEngine

    options = vllm_args(
        model_path,
        {"lora_target_modules": ["q_proj", "v_proj", "down_proj"], **more},
        dtype=dtype,
        max_model_len=max_model_len,
        max_concurrent=slots,
        max_waiting=100,
        seed=0,
        gpus=0,
        max_adapters=max_adapters,
    )
    frontend = {name: options.pop(name) for name in list(options) if hasattr(FrontendArgs(), name)}
    engine_args = AsyncEngineArgs(model_path, served_model_name=[MODEL], **options)
    args = Namespace(**vars(FrontendArgs(**frontend)) | vars(engine_args))
    client = AsyncLLM.from_engine_args(engine_args)

    async def native_app() -> Any:
        tasks = await client.get_supported_tasks()
        app = build_app(args, tasks, client.model_config)
        await init_app_state(client, app.state, args, tasks)
        return app

    engine = VllmEngine(client, native_app, MODEL)
    bench = Bench(engine, await engine.app(), model_path)
    yield bench
    await bench.http.aclose()
    engine.close()
