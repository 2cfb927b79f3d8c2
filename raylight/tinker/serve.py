"""`raylight tinker`: the engines, the trainer and the HTTP server around a TinkerService."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import uvicorn
from pydantic import Field, field_validator

from raylight._utils.bounds import MAX_PROCESSES, MAX_SECONDS
from raylight._utils.no_proxy import LOOPBACK
from raylight.base_config import Config
from raylight.config import EngineConfig, LearnerConfig, LoraConfig
from raylight.engines.vllm.args import most_workers
from raylight.errors import ConfigError, EngineStartError, LearnerLostError
from raylight.http.slow_clients import ImpatientProtocol
from raylight.serving.local_endpoint import ThreadServer, listen
from raylight.tinker.tinker_losses import SUBSTITUTES
from raylight.trainer.cluster_fit.hardware import (
    SHARES,
    ClusterFacts,
    count_parameters,
    fit_engine,
    is_open,
    pack_gpus,
    share_cores,
)
from raylight.trainer.cluster_fit.policy_checks import engine_with_adapter
from raylight.trainer.components.served_model import ServedModel, ServingContext
from raylight.trainer.ray_session.blocking import run_blocking
from raylight.trainer.ray_session.cluster_monitor import component_stack, until_lost, watch_loss
from raylight.trainer.ray_session.connection import ray_session
from raylight.trainer.spec.inputs import fixed_model
from raylight.trainer.spec.settings import ServingSettings
from raylight.weights.orders import BoxedRef

KEY_PREFIX = "tml-"
"""Beginning of the keys that the SDK sends."""
UPSTREAM = "an upstream model cannot be trained; choose the engine transformers or vllm"
MODEL = "base"
"""Name under which the engines serve the model without an adapter."""


class TinkerConfig(Config):
    """Settings of a server of the Tinker API."""

    host: str = "127.0.0.1"
    """Address that HTTP listens on."""
    port: int = Field(default=8080, ge=0, le=65535)
    """HTTP port; 0: any free one."""
    api_key: str | None = None
    """Key that clients must send. None: none on loopback, and a new one, which is shown, elsewhere."""
    output_dir: str = "outputs/tinker"
    """Folder of the checkpoints."""
    max_models: int = Field(default=8, ge=1, le=MAX_PROCESSES)
    """Adapters that may be in training at a time."""
    max_samplers: int = Field(default=8, ge=1, le=MAX_PROCESSES)
    """Adapters that the engines have at a time."""
    max_rank: int = Field(default=128, ge=1, le=1024)
    """Highest rank of an adapter."""
    session_timeout_s: float = Field(default=300.0, gt=0, le=MAX_SECONDS)
    """Seconds without a heartbeat after which a session ends."""
    learner_cpus: float = Field(default=0.5, gt=0, le=MAX_PROCESSES)
    """CPUs of the trainer, which computes with as many threads, at least one. If not set: it shares the cores
    with the engines."""
    learner_gpus: float = Field(default=0.0, ge=0, le=1)
    """GPUs of the trainer. If not set: a GPU, or a part of one, if the cluster has GPUs."""
    max_tokens_per_micro_batch: int = Field(default=8192, ge=1, le=2**24)
    """Tokens of one pass of the trainer, padding included; a longer example is a separate pass."""
    stable_reinforce: str | None = None
    """Loss that trains requests for `stable_reinforce`, which only Tinker's own service defines. None: they
    are rejected."""

    @field_validator("api_key")
    @classmethod
    def _check_key(cls, key: str | None) -> str | None:
        if key is not None and not key.startswith(KEY_PREFIX):
            raise ValueError(f"the SDK sends only keys that begin with {KEY_PREFIX}; choose such a key")
        return key

    @field_validator("stable_reinforce")
    @classmethod
    def _check_substitute(cls, loss: str | None) -> str | None:
        if loss is not None and loss not in SUBSTITUTES:
            raise ValueError(f"this loss cannot stand in for it; choose {', '.join(SUBSTITUTES)}")
        return loss


def serve_tinker(
    model: str,
    engine: EngineConfig,
    config: TinkerConfig,
    *,
    name: str | None = None,
    address: str | None = None,
    show: Callable[[str], None] = print,
) -> None:
    """Serve the Tinker API until Ctrl-C or SIGTERM, then stop everything that was started.

    Args:
        model: folder, or name in the local Hugging Face cache.
        name: model name that clients ask for; by default `model`.
        show: receives messages for the user.

    Raises:
        ConfigError: the SDK is not installed, or the settings are wrong.
        EngineStartError: the replicas or the trainer did not start.
        LearnerLostError: the trainer has died.
    """
    try:
        import tinker.proto  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the Tinker API needs the messages of the SDK ({error}): pip install 'raylight[tinker]'"
        ) from None
    serving = fixed_model(model, engine)
    if not serving.model_path:
        raise ConfigError(UPSTREAM)
    key = config.api_key
    if key is None and config.host not in LOOPBACK:
        key = f"{KEY_PREFIX}{secrets.token_hex(20)}"
        show(f"the API key is {key}")
    remedy = "choose another --port, or 0 for a free one"
    listener = listen(config.host, config.port, "the Tinker API", remedy)
    with listener, ray_session(address, False, engine.start_timeout_s) as connection:
        connection.announce(show, show)
        own = serving.engine.model_copy(update={"host": engine.host or "127.0.0.1"})
        serving, learner, notes = fit_trainer(
            replace(serving, engine=own, name=MODEL), engine, config, ClusterFacts()
        )
        for note in notes:
            show(note)
        serving = with_adapters(serving, config)
        work = _serve(serving, config, learner, name or model, key, listener, connection.owns_cluster, show)
        run_blocking(until_lost(work, "Start the command again"), watch_loss("Start the command again"))


def fit_trainer(
    serving: ServingSettings, requested: EngineConfig, config: TinkerConfig, facts: ClusterFacts
) -> tuple[ServingSettings, LearnerConfig, tuple[str, ...]]:
    """Return the settings of the engines and of the trainer for the cluster, and messages for the user.

    Clients sample and train at any time: an engine and the trainer that share a GPU keep their memory.

    Args:
        requested: the user's settings of the engine, whose kind may be "auto".

    Raises:
        ConfigError: engines and trainer do not fit on the GPUs, or a node cannot run the engine.
    """
    gpus, workers = facts.hardware.gpus, most_workers(serving.engine)
    open_engine = is_open(serving.engine)
    trainer = config.learner_gpus
    if "learner_gpus" not in config.model_fields_set:
        least = serving.engine.model_copy(update={"num_gpus": 1}) if open_engine else serving.engine
        left = gpus - len(pack_gpus(least))
        shares = open_engine and workers == 1 and gpus >= 1
        trainer = 1.0 if left >= 1 else SHARES[0] if shares else 0.0
    if open_engine and workers == 1 and 0 < gpus - trainer < 1:
        part = serving.engine.model_copy(update={"num_gpus": round(gpus - trainer, 2)})
        serving = replace(serving, engine=part)
    learner = LearnerConfig(num_gpus=trainer)
    choice = fit_engine(facts.hardware.without(learner), serving, requested)
    engine = facts.engine_on_nodes(requested, choice.engine)
    if "learner_cpus" in config.model_fields_set:
        learner = learner.model_copy(update={"num_cpus": config.learner_cpus})
    parameters = count_parameters(Path(serving.model_path)) or 0
    engine, learner = share_cores(facts.cores, parameters, engine, learner, overlaps=True)
    notes = [] if engine.num_gpus else [*choice.notes]
    if engine.num_gpus or trainer:
        notes += [
            f"GPUs: {gpus:g} in the cluster; {engine.num_gpus:g} for each engine, {trainer:g} for the trainer"
        ]
    return replace(serving, engine=engine), learner, tuple(notes)


def with_adapters(serving: ServingSettings, config: TinkerConfig) -> ServingSettings:
    """Return settings of an engine that has room for adapters.

    Raises:
        ConfigError: the engine serves no adapters of the highest rank.
    """
    lora, remedy = LoraConfig(rank=config.max_rank), "choose a lower --max-rank, or --engine transformers"
    engine = engine_with_adapter(serving.engine, serving.model_path, lora, config.max_samplers, remedy)
    return replace(serving, engine=engine)


async def _serve(
    model: ServingSettings,
    config: TinkerConfig,
    learner: LearnerConfig,
    name: str,
    key: str | None,
    listener: socket.socket,
    owns_cluster: bool,
    show: Callable[[str], None],
) -> None:
    from raylight.tinker.app import build_app
    from raylight.tinker.checkpoints import CheckpointPath, Checkpoints
    from raylight.tinker.sampling import Samplers
    from raylight.tinker.service import TinkerService
    from raylight.tinker.trainer_actor import TrainerClient, start_trainer

    folder = Path(config.output_dir)
    run, secret = f"tinker-{secrets.token_hex(4)}", secrets.token_hex(20)
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(error: LearnerLostError) -> None:
        if not lost.done():
            lost.set_exception(error)

    async with component_stack() as stack:
        served = ServedModel(ServingContext(run, secret, show, owns_cluster), model)
        await served.open(stack)
        served.prepare(seed=0)
        limit = model.engine.start_timeout_s
        actor = start_trainer(
            run,
            model.model_path,
            "float32" if model.engine.num_gpus and not learner.num_gpus else model.engine.dtype,
            config.max_tokens_per_micro_batch,
            learner,
        )
        trainer = TrainerClient(actor, limit)
        stack.callback(trainer.stop)
        show(f"starting the {model.engine.kind} engine and the trainer")
        url, _ = await asyncio.gather(served.start(), trainer.wait_ready())
        checkpoints = Checkpoints(folder)

        async def fetch(path: str) -> BoxedRef:
            adapter = await asyncio.to_thread(checkpoints.load, CheckpointPath.parse(path))
            return [ray.put(adapter)]

        samplers = Samplers(
            url,
            secret,
            MODEL,
            served.coordinator,
            fetch,
            config.max_samplers,
            limit,
        )
        stack.push_async_callback(samplers.close)
        settings = await asyncio.to_thread(_describe, model, config, name)
        service = TinkerService(settings, trainer, samplers, checkpoints, end)
        stack.push_async_callback(service.close)
        app = build_app(service, key)
        server = ThreadServer(
            uvicorn.Config(app, log_level="warning", lifespan="off", http=ImpatientProtocol)
        )
        listening = asyncio.create_task(server.serve(sockets=[listener]))
        stack.push_async_callback(_stop, server, listening)
        host, port = listener.getsockname()[:2]
        show(f"{name} is served at http://{host}:{port} (Tinker API); press Ctrl-C to stop")
        await asyncio.wait([listening, lost], return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            lost.result()
        raise EngineStartError("the HTTP server has stopped unexpectedly") from listening.exception()


def _describe(model: ServingSettings, config: TinkerConfig, name: str) -> Any:
    """Return the settings of a service, with the limits of its model."""
    from transformers import AutoConfig

    from raylight.tinker.settings import TinkerSettings

    text = AutoConfig.from_pretrained(model.model_path).get_text_config()
    longest = min(model.engine.max_model_len, getattr(text, "max_position_embeddings", 2**31))
    return TinkerSettings(
        base_model=name,
        vocabulary=text.vocab_size,
        max_model_len=longest,
        max_rank=config.max_rank,
        max_models=config.max_models,
        lease_s=config.session_timeout_s,
        stable_reinforce=config.stable_reinforce,
    )


async def _stop(server: uvicorn.Server, listening: asyncio.Task[None]) -> None:
    server.should_exit = True
    await asyncio.wait([listening])
