"""A server of the Tinker API in a thread of this process: the trainer and the engine without Ray."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.routing import Mount

from raylight.engines.transformers.engine import TransformersEngine
from raylight.tinker.app import build_app
from raylight.tinker.checkpoints import CheckpointPath, Checkpoints
from raylight.tinker.lora_trainer import LoraTrainer
from raylight.tinker.sampling import Samplers
from raylight.tinker.service import TinkerService
from raylight.tinker.settings import TinkerSettings

NAME, KEY = "raylight/tiny", "tml-test"
"""Name of the model that the tests serve, and the server's key."""


class LocalTrainer:
    """A LoraTrainer with the methods of the actor's client."""

    def __init__(self, model: str) -> None:
        self._trainer = LoraTrainer(model, "float32", torch.device("cpu"), max_tokens=4096)

    async def wait_loss(self) -> list[str]:
        await asyncio.Event().wait()  # it lives as long as this process
        return []

    async def call(self, method: Callable[..., Any], model_id: str, *args: Any) -> Any:
        return await asyncio.to_thread(getattr(self._trainer, method.__name__), model_id, *args)


class LocalReplicas:
    """One engine with the methods of a coordinator's client."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine

    async def pin(self, name: str, version: int, payload: list[Any], timeout: float) -> None:
        await self._engine.load_adapter(name, version, payload[0])

    async def release(self, name: str, timeout: float) -> None:
        await self._engine.drop_adapter(name)

    async def probe(self, ids: list[int], timeout: float, adapter: str | None) -> dict[str, list[float]]:
        return {"replica": await self._engine.logprobs(ids, adapter)}


@contextlib.contextmanager
def local_server(
    model: str, name: str, folder: Path, key: str | None = None, **settings: Any
) -> Iterator[str]:
    """Serve a model under a name until the block ends; yields the base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    started, stop = threading.Event(), threading.Event()

    async def run() -> None:
        engine = TransformersEngine(
            model,
            "base",
            dtype="float32",
            slots=64,
            max_waiting=1000,
            max_model_len=512,
            seed=0,
            device="cpu",
        )
        checkpoints = Checkpoints(folder)

        async def fetch(path: str) -> list[Any]:
            return [checkpoints.load(CheckpointPath.parse(path))]

        replicas: Any = LocalReplicas(engine)
        samplers = Samplers(url, key or "", "base", replicas, fetch, limit=2, timeout_s=60)
        limits = TinkerSettings(name, vocabulary=288, max_model_len=512, **settings)
        service = TinkerService(limits, LocalTrainer(model), samplers, checkpoints, print)
        app = build_app(service, key)
        app.router.routes.append(Mount("/", await engine.app()))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        started.set()
        await asyncio.to_thread(stop.wait)
        await service.close()
        server.should_exit = True
        await serving
        await samplers.close()
        engine.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert started.wait(120)
        yield url
    finally:
        stop.set()
        thread.join(60)
