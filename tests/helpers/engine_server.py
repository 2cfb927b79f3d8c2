"""Engine behind the complete gateway, served on a port by a thread, with a store in this process."""

import asyncio
import contextlib
import importlib.util
import threading
from argparse import Namespace
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp
from tiny_qwen import ASCII, TOOLS, build_tiny_qwen

from raylight.config import StoreConfig
from raylight.engines.protocol import Engine
from raylight.serving.capture.recorder import Recorder
from raylight.serving.gateway.gateway import build_gateway
from raylight.store.client import StoreClient
from raylight.store.service import StoreService

T = TypeVar("T")
ENGINES = ("transformers", "upstream", "vllm")
NONE: Mapping[str, Any] = MappingProxyType({})
MODEL, SECRET = "policy", "run-secret"
MAX_MODEL_LEN = 2048
DEADLINE_S = 60.0
START_S = 240.0
KEEP_ALIVE_S = 0.25
"""Seconds of silence in a stream until a sign of life."""
TEMPLATE = (
    TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": {{ c.function.name | tojson }}, '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny(folder: Path, template: str = TEMPLATE, markers: Sequence[str] = ()) -> str:
    """Build a Qwen3 of two layers that samples ASCII characters about equally often.

    Its chat template supports tools.

    Args:
        markers: words that are one token each.
    """
    return build_tiny_qwen(
        folder,
        template,
        letters=ASCII,
        markers=markers,
        vocab_size=len(ASCII) + 3 + len(markers),  # three special tokens
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("vllm.v1") is not None


class EngineServer:
    """Complete application of a replica, served on a port.

    Attributes:
        kind: kind of the engine.
        engine: the engine.
        vllm_options: arguments of vLLM.
        gateway_options: further arguments of `build_gateway`.
        port: port on which the application is served.
        tokenizer: tokenizer of the model; None if the engine does not return tokens.
    """

    def __init__(
        self, kind: str, model_path: str, vllm_options: Mapping[str, Any] = NONE, **gateway_options: Any
    ) -> None:
        self.kind = kind
        self.vllm_options = vllm_options
        self.gateway_options = gateway_options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()
        self.call(self._start(model_path), START_S)

    def call(self, work: Coroutine[Any, Any, T], timeout: float = DEADLINE_S) -> T:
        """Run a coroutine in the event loop of the server."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    async def _start(self, model_path: str) -> None:
        self._service = StoreService(None, StoreConfig(lease_s=600))
        self._stack.push_async_callback(self._service.close)
        self.store = StoreClient(self._service)
        self.engine = engine = await self._engine(model_path)
        self._stack.callback(engine.close)
        self.tokenizer = engine.tokenizer
        self.recorder = Recorder(self.store.capture, write_images=self.store.write_images)
        self._stack.push_async_callback(self.recorder.aclose)
        options = {"keep_alive_s": KEEP_ALIVE_S, **self.gateway_options}
        app = build_gateway(await engine.app(), engine, SECRET, self.recorder, self.store, **options)
        self.port = await self._serve(app)

    async def _engine(self, path: str) -> Engine:
        if self.kind == "transformers":
            return small_engine(path)
        if self.kind == "vllm":
            return vllm_engine(path, self.vllm_options)
        from raylight.engines.upstream import UpstreamEngine

        upstream = small_engine(path)
        self._stack.callback(upstream.close)
        app = build_gateway(await upstream.app(), upstream, None, None, None)  # as `raylight serve` does
        return UpstreamEngine(f"http://127.0.0.1:{await self._serve(app)}/v1", "up-key", MODEL)

    async def _serve(self, app: ASGIApp) -> int:
        """Serve an application until the server closes. Return its port."""
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup()
        self._stack.push_async_callback(server.shutdown)
        return server.servers[0].sockets[0].getsockname()[1]

    def close(self) -> None:
        self.call(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()


def small_engine(path: str) -> Engine:
    from raylight.engines.transformers.engine import TransformersEngine

    return TransformersEngine(path, MODEL, slots=16, max_model_len=MAX_MODEL_LEN)


def vllm_engine(path: str, engine_args: Mapping[str, Any] = NONE) -> Engine:
    """Build a vLLM engine as a replica runs it, without Ray."""
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from raylight.engines.vllm.args import vllm_args
    from raylight.engines.vllm.engine import VllmEngine

    options = vllm_args(
        path,
        engine_args,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_concurrent=16,
        max_waiting=100,
        seed=0,
        gpus=0,
        max_adapters=0,
    )
    frontend = {name: options.pop(name) for name in list(options) if hasattr(FrontendArgs(), name)}
    engine_args = AsyncEngineArgs(path, served_model_name=[MODEL], **options)
    args = Namespace(**vars(FrontendArgs(**frontend)) | vars(engine_args))
    client = AsyncLLM.from_engine_args(engine_args)

    async def native_app() -> Any:
        tasks = await client.get_supported_tasks()
        app = build_app(args, tasks, client.model_config)
        await init_app_state(client, app.state, args, tasks)
        return app

    return VllmEngine(client, native_app, MODEL)
