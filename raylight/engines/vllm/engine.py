"""The engine `vllm`: vLLM's own application and client, with capture, weights and adapters."""

from __future__ import annotations

import asyncio
import os
import pickle
import uuid
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

import numpy as np
from fastapi import FastAPI, HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.exceptions import GracefulHTTPError
from vllm.inputs import tokens_input
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from raylight.engines.families import find_style
from raylight.engines.grammar import Grammars
from raylight.engines.protocol import EngineLoad, LoraAdapter, UpdateMode
from raylight.engines.vllm.adapters import VllmAdapters
from raylight.engines.vllm.capture import Capture
from raylight.engines.vllm.core_watch import CoreWatch
from raylight.engines.vllm.fields import RejectUnknownFields
from raylight.engines.vllm.images import ImagePrompts
from raylight.engines.vllm.prompt_temperature import PROMPT_TEMPERATURE
from raylight.engines.vllm.schemas import SchemaCheck
from raylight.engines.vllm.transfer_worker import LOST
from raylight.errors import WeightSyncError
from raylight.images.model_inputs import ModelImages
from raylight.types import TopLogprobs

INCOMPLETE = "an update of the engine's weights was broken off; publish a new version"
CLOSED = "the engine is shutting down"
REPLACED_MIDDLEWARE = ("CORSMiddleware", "PrometheusInstrumentatorMiddleware")
"""Middleware of vLLM's application that raylight's gateway replaces. The second one searches all routes for
each request."""
UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE
SHUTDOWN_TIMEOUT_S = 1.0
"""Time for vLLM's processes to end by themselves."""


class VllmEngine:
    """`Engine` around an `AsyncLLM`.

    Its workers receive new weights by vLLM's weight transfer, while nothing is scheduled. An update that was
    broken off leaves a mixture of weights: requests then wait for the next complete update.

    Args:
        client: an `AsyncLLM` whose event loop has not run since it was made.
        build_app: builds vLLM's native application around the client.
        model: name under which the model is served.
    """

    def __init__(self, client: AsyncLLM, build_app: Callable[[], Awaitable[FastAPI]], model: str) -> None:
        self.model = model
        self.tokenizer = client.get_tokenizer()
        self.max_model_len: int | None = client.model_config.max_model_len
        self._client, self._build_app = client, build_app
        parallel = client.vllm_config.parallel_config
        self.workers: int = parallel.world_size * parallel.data_parallel_size
        self._capture = Capture(client)
        self._adapters = VllmAdapters(client, self._capture)
        takes_images = client.renderer.mm_processor is not None
        self.images = ModelImages.load(client.model_config.model) if takes_images else None
        if takes_images:
            ImagePrompts(client)
        self._load = LoadStats(client)
        self._update_lock = asyncio.Lock()
        self._core_watch = CoreWatch(client.engine_core.is_sleeping_async)
        self._asleep = self._closed = self._scales_prompts = False
        self._paused = self._started = self._incomplete = False
        """The state of a weight update: scheduling is paused, layers are being loaded, and some have been."""
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
        self._scales_prompts = all(await self._client.collective_rpc("raylight_scale_prompts"))
        if self._client.model_config.enable_return_routed_experts:
            self._capture.expert_layers, *_ = await self._client.collective_rpc("raylight_expert_layers")
        app = await self._build_app()
        models = app.state.openai_serving_models
        models.lora_requests = self._adapters.served
        show_models = models.show_available_models

        async def show_each_model_once() -> object:  # an adapter may have the name of the model itself
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
        async def retrieve_model(name: str) -> object:
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
            unparsed_reasoning=self._leaves_reasoning(),
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

    def _leaves_reasoning(self) -> bool:
        """Return True if the model's template shows reasoning for which vLLM has no parser."""
        has_parser = self._client.vllm_config.structured_outputs_config.reasoning_parser
        return (
            not has_parser and self.tokenizer is not None and find_style(self.tokenizer).reasoning is not None
        )

    def _schema_check(self) -> SchemaCheck | None:
        config = self._client.vllm_config
        if self.tokenizer is None or config.structured_outputs_config.backend not in ("auto", "xgrammar"):
            return None
        eos = self.tokenizer.eos_token_id
        return SchemaCheck(
            Grammars(self.tokenizer, config.model_config.get_vocab_size(), [] if eos is None else [eos])
        )

    async def init_weight_transfer_engine(self, info: Mapping[str, object]) -> None:
        self._check_awake()
        await self._transfer("init_weight_transfer_engine", dict(info))

    async def start_weight_update(self, mode: UpdateMode = "keep") -> None:
        self._check_awake()
        self._paused = True
        self._load.begin_pause()
        try:
            # the client's own method adds a pause of 20 ms; cached keys and values are recomputed afterwards
            await self._client.engine_core.pause_scheduler_async(mode, True)
            if self.images is not None:  # the core has dropped the images that are not sent to it again
                await self._client.renderer.clear_mm_cache_async()
            await self._capture.wait_until_recorded()
        except BaseException:  # including a caller that gives up
            await self._resume()
            raise

    async def update_weights(self, info: object) -> None:
        if not self._started:  # not before there are weights: a simulated learner sends none
            await self._transfer("start_weight_update")
            self._started = True
        self._incomplete = True
        await self._transfer("update_weights", info)

    async def finish_weight_update(self, version: int) -> None:
        if self._started:
            await self._transfer("finish_weight_update")
        elif self._incomplete:
            raise WeightSyncError(INCOMPLETE)
        self._capture.version = version
        self._started = self._incomplete = False
        await self._resume()

    async def abort_weight_update(self) -> None:
        if self._closed:
            return
        started, self._started = self._started, False
        try:
            await self._transfer("raylight_abort_update", started)
        except Exception as error:  # of any kind: the state of the workers is not known
            self._failure = f"vLLM failed to load new weights and must be restarted: {error}"
            self.close()
            raise WeightSyncError(self._failure) from error
        await self._resume()

    async def load_adapter(
        self, name: str, version: int, adapter: LoraAdapter, mode: UpdateMode = "keep"
    ) -> None:
        async with self._update_lock:
            self._check_awake()
            await self._adapters.load(name, version, adapter, mode)

    async def drop_adapter(self, name: str) -> None:
        async with self._update_lock:
            await self._adapters.drop(name)

    async def logprobs(
        self, ids: list[int], adapter: str | None = None, temperature: float = 1.0
    ) -> list[float]:
        entries = await self._prompt_logprobs(ids, 0, adapter, temperature)
        return [entry[token].logprob for token, entry in zip(ids[1:], entries, strict=True)]

    async def top_logprobs(self, ids: list[int], k: int, temperature: float = 1.0) -> TopLogprobs:
        entries = await self._prompt_logprobs(ids, k, None, temperature)
        # the token itself is there too, with its rank
        tops = [
            sorted((one.rank, token, one.logprob) for token, one in entry.items())[:k] for entry in entries
        ]
        found = np.array(tops, np.float64)
        return TopLogprobs(found[..., 1].astype(np.int32), found[..., 2].astype(np.float32))

    async def _prompt_logprobs(
        self, ids: list[int], k: int, adapter: str | None, temperature: float
    ) -> list[dict[int, Logprob]]:
        """Return vLLM's log-probs in the place of each of `ids[1:]`, by token: of the k most probable
        ones and of the id itself."""
        if not 2 <= len(ids) < (self.max_model_len or 0):
            raise WeightSyncError(
                f"log-probs need 2 to {(self.max_model_len or 0) - 1} token ids, not {len(ids)}"
            )
        if self._incomplete:
            raise WeightSyncError(INCOMPLETE)
        if temperature != 1 and not self._scales_prompts:
            raise WeightSyncError(
                "log-probs at a temperature other than 1 need vLLM's V1 model runner; start the run with "
                "VLLM_USE_V2_MODEL_RUNNER=0, or sample at temperature 1"
            )
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=k,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={PROMPT_TEMPERATURE: temperature},
        )
        name, lora = f"logprobs-{uuid.uuid4().hex}", self._adapters.find(adapter) if adapter else None
        outputs = [o async for o in self._client.generate(tokens_input(ids), params, name, lora_request=lora)]
        return outputs[-1].prompt_logprobs[1:]

    async def sleep(self, level: int = 1) -> str | None:
        config = self._client.vllm_config
        if config.device_config.device_type == "cpu":
            return "vLLM on a CPU has no device memory to free"
        if not config.model_config.enable_sleep_mode:
            return "vLLM was started without the argument enable_sleep_mode=True"
        async with self._update_lock:
            self._load.begin_pause()
            await self._client.engine_core.sleep_async(level, "keep")
            self._asleep = True
        return None

    async def wake(self) -> None:
        async with self._update_lock:
            if self._asleep:
                await self._client.engine_core.wake_up_async(None)
                self._asleep = False

    def load(self) -> EngineLoad:
        return self._load.read(paused=self._paused or self._asleep)

    async def check_health(self) -> None:
        if self._failure:
            raise WeightSyncError(self._failure)
        await self._client.check_health()
        if self._paused or self._update_lock.locked():  # loading may take long, and has its own deadline
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

    async def _resume(self) -> None:
        """Continue scheduling after an update, unless the weights are a mixture of versions."""
        if self._paused and not self._incomplete and not self._closed:
            self._paused = False
            await self._client.engine_core.resume_scheduler_async()

    async def _transfer(self, phase: str, *args: object) -> None:
        """Have every worker execute a phase of a weight transfer.

        The arguments are pickled here: vLLM's own messages cannot contain the handles of GPU memory of the
        transport ipc.

        Raises:
            ConnectionError: a process that takes part in the transfer was lost.
            WeightSyncError: a worker failed.
        """
        failures = await self._client.collective_rpc("raylight_transfer", args=(phase, pickle.dumps(args)))
        failed = [failure for failure in failures if failure is not None]
        for kind, reason in sorted(failed):  # FAILED before LOST: a failure is the cause of the loss
            raise ConnectionError(reason) if kind == LOST else WeightSyncError(reason)


class LoadStats(AggregateStatLoggerBase):
    """Keeps the last statistics of each engine core (one for each data-parallel part).

    Without statistics (`disable_log_stats`), only the number of requests is known.

    Args:
        client: an `AsyncLLM`.
    """

    def __init__(self, client: AsyncLLM) -> None:
        self._cache = client.vllm_config.cache_config
        self._requests: dict[str, object] = client.output_processor.request_states
        self._cores: dict[int, SchedulerStats] = {}
        self._preemptions = self._preempted_by_pause = 0
        if client.logger_manager is not None:
            client.logger_manager.stat_loggers.append(self)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._cores[engine_idx] = scheduler_stats
        if iteration_stats is not None:
            preempted = iteration_stats.num_preempted_reqs
            by_pause = min(preempted, self._preempted_by_pause)
            self._preempted_by_pause -= by_pause
            self._preemptions += preempted - by_pause

    def begin_pause(self) -> None:
        """Leave out the preemptions of a pause: vLLM preempts all requests to recompute their cache, and
        reports it with their next tokens."""
        self._preempted_by_pause = len(self._requests)

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    def read(self, paused: bool) -> EngineLoad:
        """Return the load; the engine core sends nothing while it has no requests."""
        cores = list(self._cores.values()) if self._requests else []
        waiting = sum(core.num_waiting_reqs for core in cores)
        running = sum(core.num_running_reqs for core in cores)
        return EngineLoad(
            kv_use=max((core.kv_cache_usage for core in cores), default=0.0),
            running=running if self._cores else len(self._requests),
            waiting=waiting,
            preemptions=self._preemptions,
            capacity=self._cache.kv_cache_size_tokens or 0,
            paused=paused,
        )
