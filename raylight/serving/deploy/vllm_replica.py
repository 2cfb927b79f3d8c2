"""The vLLM replica: Ray's LLM server with raylight's gateway in front of vLLM's own application."""

from __future__ import annotations

import copy
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from raylight.engines.vllm.args import chat_template
from raylight.engines.vllm.engine import VllmEngine
from raylight.engines.vllm.server import VllmServer
from raylight.serving.deploy.replica import ReplicaRuntime, ReplicaSpec


@serve.ingress()
class VllmReplica(VllmServer):
    """vLLM behind HTTP."""

    async def __init__(self, llm_config: Any, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        self._shell = ReplicaRuntime(spec)
        try:
            await super().__init__(llm_config, spec)
        except Exception as error:
            await self._shell.cannot_start(error)
            raise

    async def wrap(self, engine: VllmEngine) -> ASGIApp:
        from prometheus_client import REGISTRY, generate_latest

        args = self.spec.config.args
        if template := chat_template(self.spec.model_path, args.get("chat_template")):
            engine.tokenizer = copy.copy(engine.tokenizer)
            engine.tokenizer.chat_template = (
                template  # conversations are continued with the one that vLLM renders with
            )
        return await self._shell.wrap(engine, lambda: generate_latest(REGISTRY))

    async def __del__(self) -> None:  # Serve awaits it at the end
        await self._shell.close()

    async def check_health(self) -> None:
        await super().check_health()
        await self._shell.check_health()
