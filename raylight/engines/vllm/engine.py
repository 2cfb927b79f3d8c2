"""The engine `vllm`: vLLM's own application and client, with capture, weights and adapters."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.exceptions import GracefulHTTPError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from raylight.engines.grammar import Grammars
from raylight.engines.protocol import LoraAdapter, UpdateMode
from raylight.engines.vllm.adapters import VllmAdapters
from raylight.engines.vllm.capture import Capture
from raylight.engines.vllm.core_watch import CoreWatch
from raylight.engines.vllm.fields import RejectUnknownFields
from raylight.engines.vllm.schemas import SchemaCheck
from raylight.engines.vllm.weights import ExpectedWeights, shared_file
from raylight.errors import WeightSyncError

CLOSED = "the engine is shutting down"
REPLACED_MIDDLEWARE = ("CORSMiddleware", "PrometheusInstrumentatorMiddleware")
"""Middleware of vLLM's application that raylight's gateway replaces. The second one searches all routes for
each request."""
UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE
SHUTDOWN_TIMEOUT_S = 1.0
"""Time for vLLM's processes to end by themselves."""


class VllmEngine:
    """`Engine` around an `AsyncLLM`.

    New weights are written to an in-memory file that each worker loads, on CPUs and GPUs (a GPU worker copies
    the tensors to its device; not yet run on a GPU). The workers must therefore be on this machine.

    Args:
        client: an `AsyncLLM` whose event loop has not run since it was made.
        build_app: builds vLLM's native application around the client.
        model: name under which the model is served.
        path: the model's folder, for the names and shapes of its tensors.
    """

    def __init__(
        self, client: Any, build_app: Callable[[], Awaitable[FastAPI]], model: str, path: str
    ) -> None:
        self.model = model
        self.tokenizer = client.get_tokenizer()
        self.max_model_len: int | None = client.model_config.max_model_len
        self._client, self._build_app, self._path = client, build_app, path
        self._capture = Capture(client)
        self._adapters = VllmAdapters(client, self._capture)
        self._expected: ExpectedWeights | None = None
        self._update_lock = asyncio.Lock()
        self._core_watch = CoreWatch(client.engine_core.is_sleeping_async)
        self._asleep = self._closed = False
        self._failure: str | None = None

    @property
    def version(self) -> int:
        """Version of the current weights."""
        return self._capture.version

    async def app(self) -> ASGIApp:
        await self._client.collective_rpc("raylight_end_with", args=(os.getpid(),))
        await self._client.collective_rpc("raylight_repair_updates")
        problems = await self._client.collective_rpc("raylight_record_constraints")
        self._capture.constraint_problem = next(filter(None, problems), None)
        app = await self._build_app()
        models = app.state.openai_serving_models
        models.lora_requests = self._adapters.served
        show_models = models.show_available_models

        async def show_each_model_once() -> Any:  # an adapter may have the name of the model itself
            shown = await show_models()
            shown.data = list({card.id: card for card in reversed(shown.data)}.values())[::-1]
            return shown

        models.show_available_models = show_each_model_once
        app.user_middleware = [
            layer
            for layer in app.user_middleware
            if getattr(layer.cls, "__name__", "") not in REPLACED_MIDDLEWARE
        ]
        app.middleware_stack = None  # built before; Starlette builds it again

        @app.get("/v1/models/{name:path}")
        async def retrieve_model(name: str) -> Any:
            for card in (await models.show_available_models()).data:
                if card.id == name:
                    return card
            raise HTTPException(404, f"the model {name!r} does not exist")

        config = self._client.vllm_config
        checked = RejectUnknownFields(
            app,
            config.scheduler_config.max_num_queued_reqs,
            config.model_config.max_model_len,
            thinking_budgets=getattr(config, "reasoning_config", None) is not None,
            schemas=self._schema_check(),
        )

        async def open_app(scope: Scope, receive: Receive, send: Send) -> None:
            if self._closed and scope["type"] == "http":
                body = {
                    "error": {
                        "message": CLOSED,
                        "type": "overloaded_error",
                        "param": None,
                        "code": UNAVAILABLE,
                    }
                }
                await JSONResponse(body, UNAVAILABLE)(scope, receive, send)
            else:
                await checked(scope, receive, send)

        return open_app

    def _schema_check(self) -> SchemaCheck | None:
        config = self._client.vllm_config
        if self.tokenizer is None or config.structured_outputs_config.backend not in ("auto", "xgrammar"):
            return None
        eos = self.tokenizer.eos_token_id
        return SchemaCheck(
            Grammars(self.tokenizer, config.model_config.get_vocab_size(), [] if eos is None else [eos])
        )

    async def load_weights(self, version: int, weights: Mapping[str, Any], mode: UpdateMode = "keep") -> None:
        async with self._update_lock:
            self._check_awake()
            if self._expected is None:
                trust = bool(self._client.model_config.trust_remote_code)
                self._expected = await asyncio.to_thread(ExpectedWeights, self._path, trust)
            tensors = self._expected.complete(weights)
            with contextlib.ExitStack() as files:
                path = await asyncio.to_thread(files.enter_context, shared_file(tensors))
                async with self._paused(mode):
                    await self._load(path)
                    self._capture.version = version

    async def load_adapter(
        self, name: str, version: int, adapter: LoraAdapter, mode: UpdateMode = "keep"
    ) -> None:
        async with self._update_lock:
            self._check_awake()
            await self._adapters.load(name, version, adapter, mode)

    async def drop_adapter(self, name: str) -> None:
        async with self._update_lock:
            await self._adapters.drop(name)

    async def logprobs(self, ids: list[int], adapter: str | None = None) -> list[float]:
        if not 2 <= len(ids) < (self.max_model_len or 0):
            raise WeightSyncError(
                f"log-probs need 2 to {(self.max_model_len or 0) - 1} token ids, not {len(ids)}"
            )
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        name, lora = f"logprobs-{uuid.uuid4().hex}", self._adapters.find(adapter) if adapter else None
        outputs = [o async for o in self._client.generate(tokens_input(ids), params, name, lora_request=lora)]
        logprobs = outputs[-1].prompt_logprobs
        return [entry[token].logprob for token, entry in zip(ids[1:], logprobs[1:], strict=True)]

    async def sleep(self, level: int = 1) -> str | None:
        config = self._client.vllm_config
        if config.device_config.device_type == "cpu":
            return "vLLM on a CPU has no device memory to free"
        if not config.model_config.enable_sleep_mode:
            return "vLLM was started without the argument enable_sleep_mode=True"
        async with self._update_lock:
            await self._client.engine_core.sleep_async(level, "keep")
            self._asleep = True
        return None

    async def wake(self) -> None:
        async with self._update_lock:
            if self._asleep:
                await self._client.engine_core.wake_up_async(None)
                self._asleep = False

    async def check_health(self) -> None:
        if self._failure:
            raise WeightSyncError(self._failure)
        await self._client.check_health()
        if self._update_lock.locked():  # loading may take long, and has a deadline of its own
            self._core_watch.reset()
        else:
            self._core_watch.check()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._core_watch.reset()
            for state in self._client.output_processor.request_states.values():
                state.queue.put(GracefulHTTPError(CLOSED, UNAVAILABLE))
            self._client.shutdown(SHUTDOWN_TIMEOUT_S)
            self._adapters.close()

    def _check_awake(self) -> None:
        if self._closed or self._asleep:
            raise WeightSyncError(
                self._failure or (CLOSED if self._closed else "the engine is asleep; wake it first")
            )

    @contextlib.asynccontextmanager
    async def _paused(self, mode: UpdateMode) -> AsyncIterator[None]:
        """Pause scheduling; `mode` decides what happens to requests in flight.

        Cached keys and values are recomputed afterwards.
        """
        core = self._client.engine_core  # the client's own method adds a pause of 20 ms
        try:
            await core.pause_scheduler_async(mode, True)
            await self._capture.wait_until_recorded()
            yield
        finally:
            if not self._closed:
                await core.resume_scheduler_async()

    async def _load(self, path: str) -> None:
        """Have every worker load a file.

        On failure the workers' weights are undefined, so the engine closes.
        """
        try:
            await self._client.collective_rpc("raylight_load_weights", args=(path,))
        except (
            BaseException
        ) as error:  # a worker's failure is a plain Exception; the caller may also be cancelled
            self._failure = (
                f"vLLM failed to load new weights and must be restarted: {error or type(error).__name__}"
            )
            self.close()
            if isinstance(error, Exception):
                raise WeightSyncError(self._failure) from error
            raise
