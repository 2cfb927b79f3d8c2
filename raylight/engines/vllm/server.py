"""vLLM as a Ray Serve deployment: the class that each replica runs.

A thin shell; HAProxy sends requests straight to it.
"""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm import LLMServer
from starlette.types import ASGIApp

from raylight.engines.vllm.engine import VllmEngine


class CapturingVLLMEngine(VLLMEngine):
    """Ray's vLLM engine; its client is wrapped for capture before the client's event loop runs."""

    captured: VllmEngine

    def _start_async_llm_engine(self, args: Any, config: Any, placement_group: Any) -> Any:
        parallel = config.parallel_config
        if config.device_config.device_type != "cpu" and parallel.distributed_executor_backend == "mp":
            # Ray asks for a process per worker where it places none. vLLM on a CPU needs it.
            parallel.distributed_executor_backend = "uni"
        client = super()._start_async_llm_engine(args, config, placement_group)
        self.captured = VllmEngine(client, self.build_asgi_app, self.llm_config.model_id)
        return client


class VllmServer(LLMServer):
    """Base of a deployment class.

    Apply `serve.ingress()` to a subclass, which puts its middleware around the engine in `wrap`.

    Args:
        llm_config: see `deployment.llm_config`.
    """

    engine: CapturingVLLMEngine | None

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]  # awaited by Serve
        await super().__init__(llm_config, engine_cls=CapturingVLLMEngine)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        assert self.engine is not None, "started in the constructor"
        return await self.wrap(self.engine.captured)

    async def wrap(self, engine: VllmEngine) -> ASGIApp:
        """Return the application that HTTP requests reach."""
        return await engine.app()

    async def check_health(self) -> None:
        if self.engine is not None:  # None while it starts
            await self.engine.captured.check_health()

    async def __del__(self) -> None:
        captured = getattr(getattr(self, "engine", None), "captured", None)
        if captured is not None:  # None after a failed start
            captured.close()
        await super().__del__()
