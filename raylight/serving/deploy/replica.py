"""The engine replica: a Ray Serve deployment class around an engine and its gateway."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import threading
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import httpx2
import numpy as np
import ray
import ray.serve._private.constants as serve_constants
import ray.serve._private.replica as serve_replica
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylight._utils.broken_packages import find_broken
from raylight._utils.garbage import collect_less_often
from raylight.config import EngineConfig
from raylight.engines.protocol import Engine, EngineSettings
from raylight.engines.registry import build_engine, load_factory
from raylight.engines.reward_model.scorer import ConversationScorer, ScoredConversation
from raylight.engines.start_stages import StartStages, note_stage
from raylight.errors import TeacherPromptError
from raylight.ray_metrics.reporter import MetricReporter
from raylight.rewards.scoring_model import RewardModelInput
from raylight.serving.capture.recorder import Recorder
from raylight.serving.gateway.gateway import build_gateway
from raylight.serving.gateway.metrics import Metrics
from raylight.serving.gateway.session_service import SessionRules, SessionService
from raylight.store.client import StoreClient
from raylight.types import IntArray, LogprobArray, TopLogprobs
from raylight.weights.client import GRACE_S, call_until_answered, wait_for_turn
from raylight.weights.executor import OrderExecutor
from raylight.weights.starts import derive_seed

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 5.0
"""Longest time that a closing replica waits for its last records to be stored."""
INTERVAL_S = 1.0
READ_UNIT = 2**20
"""Bytes that must be read for it to count as progress: a process that waits reads a little, too."""


@dataclass(frozen=True)
class ReplicaSettings:
    """Constructor argument of a replica, sent to it once."""

    app_name: str
    model_path: str
    """Local folder of the model; empty if the model is not local."""
    model: str
    """Name under which the model is served."""
    config: EngineConfig
    secret: str | None
    """The run's key, from which the keys of attempts are derived; None disables authentication."""
    seed: int
    """Seed of the deployment, from which each replica derives its own."""
    store: StoreClient | None
    """Store for captured calls; None disables recording."""
    coordinator: Any
    """Handle of the `CoordinatorActor` that issues this replica's orders."""
    training_temperature: float | None = None
    """Temperature of all calls of training rollouts; None leaves the sampling to the agents."""
    run: str | None = None
    """Name of the run in metrics; None: `app_name`."""
    route: str | None = None
    """Path at which Serve mounts the application; None: `/{app_name}`."""
    sessions: SessionRules | None = None
    """Rules of the sessions of agents outside the run; None: there are none."""

    @property
    def prefix(self) -> str:
        """Path at which Serve mounts the application."""
        return self.route or f"/{self.app_name}"


class ScoredRow(NamedTuple):
    """Tokens of which a replica computes log-probs."""

    ids: IntArray
    start: int
    """Index of the first token that is scored, at least 1."""
    temperature: float = 1.0
    """Sampling temperature of the scored tokens."""


def close_pickle_port() -> None:
    """Keep Serve from opening a replica's port for calls of other deployments.

    It listens on all interfaces, has no key, and unpickles what it receives, so that any client can execute
    code. Serve uses it only with RAY_SERVE_USE_GRPC_BY_DEFAULT; otherwise deployments call actors.
    """
    if not serve_constants.RAY_SERVE_USE_GRPC_BY_DEFAULT:
        serve_replica.add_port_to_grpc_server = lambda server, address: 0


def add_replica_header(app: ASGIApp, replica: str) -> ASGIApp:
    """Wrap an application so that each response names its replica in the header `x-raylight-replica`."""
    header = (b"x-raylight-replica", replica.encode())

    async def with_header(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await app(scope, receive, send_with_header)

    return with_header


@serve.ingress()
class EngineReplica:
    """An engine of the registry, or of the user's own, behind HTTP.

    It executes the coordinator's orders, records calls, and deletes its own Serve application when the
    coordinator's actor is gone, and with it the run.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        close_pickle_port()  # Serve opens it after the constructor
        self._settings = settings
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._starting = StartReporter(settings.coordinator, self._replica)
        self._engine: Engine | None = None
        self._engine_app: ASGIApp | None = None
        self._executor: OrderExecutor | None = None
        self._recorder: Recorder | None = None
        self._metrics: MetricReporter | None = None
        self._scorer: ConversationScorer | None = None
        self._following: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        try:
            load_factory(self._settings.config.kind)  # imports what the engine needs, before its turn
            await self._enter()
            self._engine = await build_engine(engine_settings(self._settings, await self._seed()))
            self._engine_app = await self._engine.app()
        except Exception as error:
            await self._report_start_failure(error)
            raise
        self._starting.close()  # it has its memory; new weights may have to wait for the learners
        return await self._start(self._engine, self._engine_app)

    async def _seed(self) -> int:
        """Return the seed of this start of a replica. The first replica of a run has the run's own seed.

        Raises:
            CoordinatorLostError, CoordinatorUnavailableError: the coordinator did not respond.
        """
        settings = self._settings
        stream = await call_until_answered(
            settings.coordinator, "sampling_stream", self._replica, within=settings.config.start_timeout_s
        )
        return derive_seed(settings.seed, stream)

    async def _enter(self) -> None:
        """Wait until the replica may take device memory: learners on the same GPUs hold still."""
        note_stage("waiting for its turn")
        limit = self._settings.config.start_timeout_s
        await wait_for_turn(self._settings.coordinator, "enter_start", self._replica, limit)
        self._starting.entered = True
        note_stage("loading the engine")

    async def _report_start_failure(self, error: Exception) -> None:
        """Report an error to the coordinator, so that the run fails instead of Serve retrying forever."""
        self._starting.close()
        broken = find_broken(error)
        cause = broken.error() if broken else error
        reason = f"{type(cause).__name__}: {cause}"
        await call_until_answered(self._settings.coordinator, "report_start_failure", reason, within=GRACE_S)

    async def _start(self, engine: Engine, engine_app: ASGIApp) -> ASGIApp:
        """Apply all current orders to the engine, and build the application that agents call.

        Once the replica has subscribed, the run counts it as started.
        """
        settings = self._settings
        metrics = Metrics()
        self._executor = OrderExecutor(
            self._replica,
            engine,
            settings.coordinator,
            self._delete_application,
            measure=lambda: replace(engine.load(), idle_s=metrics.idle_s),
            call_forever=lambda: [settings.coordinator.wait_forever.remote()],
            # as bytes: the coordinator would import Serve to read it, which takes half a second
            handle=ray.cloudpickle.dumps(ray.get_runtime_context().current_actor),
            node=ray.util.get_node_ip_address(),
        )
        executor = self._executor
        await executor.catch_up()
        metrics.watch("replica_weight_version", lambda: executor.version)
        self._following = asyncio.create_task(executor.run())
        store = settings.store
        if store is not None:
            self._recorder = Recorder(
                functools.partial(store.capture, recorder=self._replica), write_images=store.write_images
            )
        gateway = build_gateway(
            engine_app,
            engine,
            settings.secret,
            self._recorder,
            store,
            settings.config,
            training_temperature=settings.training_temperature,
            metrics=metrics,
            sessions=self._session_service(),
        )
        run = settings.run or settings.app_name
        self._metrics = MetricReporter(metrics.collect, run, replica=self._replica).start()
        collect_less_often()
        return add_replica_header(gateway, self._replica)

    def _session_service(self) -> SessionService | None:
        settings = self._settings
        if settings.sessions is None:
            return None
        assert settings.store is not None, "a run with sessions has a store"
        assert settings.secret is not None, "a run has a secret"
        return SessionService(settings.store, settings.sessions, settings.secret, settings.model)

    async def score_conversations(
        self, conversations: list[RewardModelInput], truncate: bool
    ) -> list[ScoredConversation]:
        """Return the scores of conversations, by the engine of a reward model; see `ConversationScorer`."""
        if self._scorer is None:
            engine: Any = self._engine
            self._scorer = ConversationScorer(engine)
        return await self._scorer.score(conversations, truncate)

    async def token_logprobs(self, rows: list[ScoredRow]) -> list[LogprobArray]:
        """Return each row's log-probs at its temperature from its start on, shape (scored tokens,).

        Raises:
            WeightSyncError: the engine cannot compute them.
        """
        assert self._engine is not None, "the replica has started"
        found = await asyncio.gather(
            *(self._engine.logprobs(row.ids.tolist(), temperature=row.temperature) for row in rows)
        )
        return [
            np.asarray(logprobs[row.start - 1 :], np.float32)
            for row, logprobs in zip(rows, found, strict=True)
        ]

    async def top_logprobs(self, rows: list[ScoredRow], k: int) -> list[TopLogprobs]:
        """Return the k most probable tokens, at the row's temperature, in the place of each token of a row
        from its start on.

        Raises:
            WeightSyncError: the engine cannot compute them.
        """
        assert self._engine is not None, "the replica has started"
        found = await asyncio.gather(
            *(self._engine.top_logprobs(row.ids.tolist(), k, row.temperature) for row in rows)
        )
        return [
            TopLogprobs(top.ids[row.start - 1 :], top.logprobs[row.start - 1 :])
            for row, top in zip(rows, found, strict=True)
        ]

    async def render_chats(self, requests: list[str]) -> list[list[int]]:
        """Return the tokens into which the engine renders the messages of chat requests.

        Args:
            requests: fields of the requests that the chat template reads, as JSON.

        Raises:
            TeacherPromptError: the engine cannot render them.
        """
        assert self._engine is not None, "the replica has started"
        assert self._engine_app is not None, "the replica has started"
        transport, model = httpx2.ASGITransport(self._engine_app), self._engine.model
        async with httpx2.AsyncClient(transport=transport, base_url="http://engine") as client:
            answers = [
                await client.post("/tokenize", json=json.loads(request) | {"model": model})
                for request in requests
            ]
        for answer in answers:
            if answer.is_error:
                raise TeacherPromptError(
                    "the engine cannot render the messages of the teacher's prompt function (status "
                    f"{answer.status_code}): {answer.text:.500}"
                )
        return [answer.json()["tokens"] for answer in answers]

    async def check_health(self) -> None:
        """Raise if the engine failed or no longer executes orders; Serve then replaces the replica."""
        if self._engine is not None and self._executor is not None:
            await self._engine.check_health()
            self._executor.check_health()

    async def __del__(self) -> None:
        """Stop computing, flush the last records to the store, and unsubscribe from the coordinator.

        Serve awaits it when the replica stops.
        """
        self._starting.close()
        if self._metrics is not None:
            self._metrics.stop()
        if self._engine is not None:
            self._engine.close()
        if self._recorder is not None:
            await self._recorder.aclose(FLUSH_TIMEOUT_S)
        if self._executor is not None:
            await self._executor.close()

    async def _delete_application(self) -> None:
        name = self._settings.app_name
        logger.warning(
            "the run that started the Serve application %s is gone; deleting the application", name
        )
        await asyncio.to_thread(serve.delete, name, _blocking=False)


def engine_settings(settings: ReplicaSettings, seed: int) -> EngineSettings:
    """Return the engine's part of a replica's settings, with the replica's own seed."""
    on_gpu = settings.config.num_gpus > 0 and bool(ray.get_gpu_ids())
    return EngineSettings(
        settings.model_path, settings.model, settings.config, seed, "cuda" if on_gpu else "cpu"
    )


class StartReporter:
    """Tells the coordinator every second how far a replica's start has come, until it is closed.

    Args:
        coordinator: handle of the coordinator's actor.
        replica: the replica's name.
    """

    def __init__(self, coordinator: Any, replica: str) -> None:
        self._coordinator, self._replica = coordinator, replica
        self._stages = StartStages()
        self.entered = False
        """True once the replica may take device memory, see `weights.starts`."""
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            stage, read = self._stages.read()
            stage = stage or "importing the engine"
            if not self._closed.is_set():
                self._coordinator.report_start.remote(self._replica, stage, read // READ_UNIT, self.entered)

    def close(self) -> None:
        """End the reports: the replica is up, or has failed."""
        if not self._closed.is_set():
            self._closed.set()
            self._coordinator.end_start.remote(self._replica)
