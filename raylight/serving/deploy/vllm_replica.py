"""The vLLM replica: Ray's LLM server with raylight's gateway in front of vLLM's own application."""

from __future__ import annotations

import copy
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from raylight.engines.vllm.args import chat_template
from raylight.engines.vllm.cache_connectors import check_connectors
from raylight.engines.vllm.engine import VllmEngine
from raylight.engines.vllm.server import VllmServer
from raylight.serving.deploy.replica import ReplicaRuntime, ReplicaSettings, ScoredRow
from raylight.types import LogprobArray


@serve.ingress()
class VllmReplica(VllmServer):
    """vLLM behind HTTP."""

    async def __init__(self, llm_config: Any, settings: ReplicaSettings) -> None:  # type: ignore[misc]  # awaited by Serve
        self._settings = settings
        self._runtime = ReplicaRuntime(settings)
        try:
            if settings.config.weight_transfer != "auto":  # there are learners
                check_connectors(settings.config.args.get("kv_transfer_config"))
            llm_config.update_engine_kwargs(seed=await self._runtime.seed())
            await super().__init__(llm_config)
        except Exception as error:
            await self._runtime.report_start_failure(error)
            raise

    async def wrap(self, engine: VllmEngine) -> ASGIApp:
        args = self._settings.config.args
        if template := chat_template(self._settings.model_path, args.get("chat_template")):
            # conversations must be continued with the template that vLLM renders with
            engine.tokenizer = copy.copy(engine.tokenizer)
            engine.tokenizer.chat_template = template
        return await self._runtime.start(engine)

    async def token_logprobs(self, rows: list[ScoredRow]) -> list[LogprobArray]:
        """See `ReplicaRuntime.token_logprobs`."""
        return await self._runtime.token_logprobs(rows)

    async def render_chats(self, requests: list[str]) -> list[list[int]]:
        """See `ReplicaRuntime.render_chats`."""
        return await self._runtime.render_chats(requests)

    async def __del__(self) -> None:  # awaited by Serve when the replica stops
        await self._runtime.close()

    async def check_health(self) -> None:
        await super().check_health()
        await self._runtime.check_health()
