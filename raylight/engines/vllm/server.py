"""vLLM as a Ray Serve deployment: the class that each replica runs. A thin shell; requests come straight from HAProxy."""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm import LLMServer
from starlette.types import ASGIApp

from raylight.engines.vllm.engine import VllmEngine


class CapturedVLLM(VLLMEngine):
    """Ray's vLLM engine, whose client is captured before its event loop turns."""

    captured: VllmEngine

    def _start_async_llm_engine(self, *args: Any, **named: Any) -> Any:
        client = super()._start_async_llm_engine(*args, **named)
        self.captured = VllmEngine(
            client, self.build_asgi_app, self.llm_config.model_id, client.model_config.model
        )
        return client


class VllmServer(LLMServer):
    """Deploy it with `serve.ingress()` around a subclass that says, in `wrap`, what goes around the engine's application.

    Args:
        llm_config: see `deployment.llm_config`.
        spec: whatever `wrap` needs.
    """

    engine: CapturedVLLM | None

    async def __init__(self, llm_config: Any, spec: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self.spec = spec
        await super().__init__(llm_config, engine_cls=CapturedVLLM)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        assert self.engine is not None, "started in the constructor"
        return await self.wrap(self.engine.captured)

    async def wrap(self, engine: VllmEngine) -> ASGIApp:
        """The application that HTTP requests reach."""
        return await engine.app()

    async def check_health(self) -> None:
        if self.engine is not None:  # else it is still starting
            await self.engine.captured.check_health()

    async def __del__(self) -> None:
        captured = getattr(getattr(self, "engine", None), "captured", None)
        if captured is not None:  # construction did not fail half-way
            captured.close()
        await super().__del__()
