"""Settings that follow the hardware, where the user has set none. An explicit setting always wins."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray

from raylight.base_config import Config
from raylight.config import EngineConfig, LearnerConfig
from raylight.engines.registry import choose_engine
from raylight.engines.vllm.args import asked_gpus, most_workers
from raylight.errors import ConfigError
from raylight.trainer.engine_nodes import ask_nodes
from raylight.trainer.settings import ResolvedSettings

SHARES = (0.6, 0.4)
"""GPU fractions of a learner and of an engine's worker that share a GPU. Two of the smaller kind would fit on
one too, so the kind with more processes gets the larger one."""
MAX_CONTEXT = 16_384
"""Longest default of `engine.max_model_len` on a GPU."""
C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Hardware:
    """Hardware of a cluster on which defaults depend."""

    gpus: float
    """GPUs on nodes whose torch can use them."""
    flash_attention: bool = False
    """True if flash-attn is installed on every node with GPUs."""


@dataclass(frozen=True)
class HardwareChoice:
    """Settings with the defaults for the hardware, and messages for the user."""

    engine: EngineConfig
    learner: LearnerConfig | None
    notes: tuple[str, ...] = ()


def settings_for_hardware(
    settings: ResolvedSettings, requested: EngineConfig
) -> tuple[ResolvedSettings, tuple[str, ...]]:
    """Return a run's settings with the defaults for the cluster's hardware, and messages for the user.

    Args:
        requested: the user's settings of the engine, whose kind may be "auto".

    Raises:
        ConfigError: learners and engines do not fit on the GPUs, or a node with GPUs cannot load raylight.
    """
    serving, training, supervised = settings.serving, settings.training, settings.supervised
    if supervised is not None:
        learner = learner_alone(_cluster_hardware(), supervised.learner)
        return replace(settings, supervised=replace(supervised, learner=learner)), ()
    if serving is None or serving.engine.kind == "upstream":
        return settings, ()
    own_kind = serving.engine.kind
    on_gpu = requested.model_copy(update={"num_gpus": 1})
    hardware = _cluster_hardware()
    scoring = sum(asked_gpus(model.engine) for model in settings.scoring_models)
    hardware = replace(hardware, gpus=max(hardware.gpus - scoring, 0))
    kind = choose_engine(on_gpu) if requested.kind == "auto" and hardware.gpus else own_kind
    choice = choose(
        hardware,
        serving.engine.model_copy(update={"kind": kind}),
        training.learner if training is not None and training.learner.kind == "ranks" else None,
        longest_sequence(Path(serving.model_path)),
    )
    engine = choice.engine if choice.engine.num_gpus else choice.engine.model_copy(update={"kind": own_kind})
    settings = settings.with_engine(engine)
    if choice.learner is not None:
        settings = settings.with_training(learner=choice.learner)
    return settings, choice.notes


def choose(
    hardware: Hardware, engine: EngineConfig, learner: LearnerConfig | None, context: int | None
) -> HardwareChoice:
    """Return the settings with the defaults for the hardware. Nothing changes without GPUs.

    Args:
        engine: its kind is the one that it has on a GPU.
        learner: None for a run without learners.
        context: tokens of the model's longest sequence; None if unknown.

    Raises:
        ConfigError: learners and engines do not fit on the GPUs together, not even if they share them.
    """
    engine, learner, notes = _assign_gpus(hardware, engine, learner)
    if learner is not None:
        learner = _learner_on_gpu(hardware, learner)
    if engine.num_gpus:
        engine = engine_on_gpu(engine, learner, context)
    return HardwareChoice(engine, learner, (*notes, *_summary(hardware, engine, learner)))


def learner_alone(hardware: Hardware, learner: LearnerConfig) -> LearnerConfig:
    """Return the settings of learners in a run without engines: each has a GPU if there are enough."""
    if hardware.gpus >= learner.n:
        learner = _with_defaults(learner, num_gpus=1)
    return _learner_on_gpu(hardware, learner)


def _learner_on_gpu(hardware: Hardware, learner: LearnerConfig) -> LearnerConfig:
    if not learner.num_gpus:
        return learner
    learner = _with_defaults(learner, dtype="bf16", gradient_checkpointing=True)
    flash = learner.dtype == "bf16" and learner.attention in ("auto", "flash_attention_2")
    return _with_defaults(learner, packed=hardware.flash_attention and flash)


def _assign_gpus(
    hardware: Hardware, engine: EngineConfig, learner: LearnerConfig | None
) -> tuple[EngineConfig, LearnerConfig | None, list[str]]:
    """Give GPUs to learners and engines without a setting: each its own if there are enough, else shares."""
    ranks = 0 if learner is None else learner.n
    workers = most_workers(engine)
    free = hardware.gpus
    open_learner = learner is not None and "num_gpus" not in learner.model_fields_set
    open_engine = "num_gpus" not in engine.model_fields_set and engine.kind in ("transformers", "vllm")
    if not free or not (open_learner or open_engine):
        return engine, learner, []
    if open_engine and learner is not None and open_learner:
        if ranks + workers <= free:
            return _with_defaults(engine, num_gpus=1), _with_defaults(learner, num_gpus=1), []
        if max(ranks, workers) <= free and (ranks >= workers or ranks == 1):
            return _share(engine, learner, workers)
        raise ConfigError(
            f"{ranks} learner(s) (learner.n) and {workers} engine worker(s) (engine.replicas x "
            f"engine.args.tensor_parallel_size) do not fit on {free:g} GPU(s), not even in pairs of one "
            "learner and one worker. Lower them, add GPUs, have as many learners as workers, or set "
            "learner.num_gpus and engine.num_gpus"
        )
    if open_engine:
        if workers <= free - (ranks * learner.num_gpus if learner is not None else 0):
            return _with_defaults(engine, num_gpus=1), learner, []
        note = "the engine computes on a CPU, because the learners take the GPUs: give learner.num_gpus=0.6"
        return engine, learner, [f"{note} and engine.num_gpus=0.4 to share them"]
    assert learner is not None
    if ranks <= free - workers * engine.num_gpus:
        return engine, _with_defaults(learner, num_gpus=1), []
    note = "the learners compute on CPUs, because the engines take the GPUs: give engine.num_gpus=0.4"
    return engine, learner, [f"{note} and learner.num_gpus=0.6 to share them"]


def _share(
    engine: EngineConfig, learner: LearnerConfig, workers: int
) -> tuple[EngineConfig, LearnerConfig | None, list[str]]:
    """Put one learner and one engine worker on each GPU. They take turns, and free its memory meanwhile."""
    learner_share, engine_share = SHARES if learner.n >= workers else SHARES[::-1]
    shared = _with_defaults(engine, num_gpus=engine_share, sleep_while_learning=engine.kind == "vllm")
    offloading = _with_defaults(learner, num_gpus=learner_share, param_offload=True, optimizer_offload=True)
    return shared, offloading, ["learners and engines share GPUs, because there are too few for both"]


def engine_on_gpu(engine: EngineConfig, learner: LearnerConfig | None, context: int | None) -> EngineConfig:
    """Return the settings of an engine with the defaults for a GPU; the arguments are as for `choose`."""
    longest = min(context or MAX_CONTEXT, MAX_CONTEXT)
    if learner is not None:
        longest = min(longest, learner.row_limit)
    engine = _with_defaults(engine, dtype="bfloat16", max_model_len=max(longest, 8))
    if engine.kind != "vllm" or engine.num_gpus >= 1:
        return engine
    args: dict[str, Any] = {"gpu_memory_utilization": engine.num_gpus}
    if engine.sleep_while_learning:
        args["enable_sleep_mode"] = True
    return engine.model_copy(update={"args": args | engine.args})


def _summary(hardware: Hardware, engine: EngineConfig, learner: LearnerConfig | None) -> list[str]:
    """Return a line on what the GPUs are used for."""
    if not hardware.gpus:
        return []
    roles = []
    if learner is not None and learner.num_gpus:
        names = {"gradient_checkpointing": "gradient checkpointing", "packed": "packed rows"}
        details = [learner.dtype, *(text for name, text in names.items() if getattr(learner, name))]
        roles.append(f"{learner.num_gpus:g} for each learner ({', '.join(details)})")
    if engine.num_gpus:
        details = [engine.dtype, f"{engine.max_model_len} tokens"]
        roles.append(f"{engine.num_gpus:g} for each engine worker ({', '.join(details)})")
    return [f"GPUs: {hardware.gpus:g} in the cluster; {', '.join(roles)}"] if roles else []


def _with_defaults(config: C, **defaults: Any) -> C:
    """Return settings with other defaults: those that the user has not set."""
    return config.model_copy(
        update={name: value for name, value in defaults.items() if name not in config.model_fields_set}
    )


def _cluster_hardware() -> Hardware:
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
    if not nodes or not all(ask_nodes(addresses, torch_uses_gpus).values()):
        return Hardware(0.0)
    gpus = sum(node["Resources"]["GPU"] for node in nodes)
    return Hardware(gpus, all(ask_nodes(addresses, has_flash_attention).values()))


def torch_uses_gpus() -> bool:
    """True if the installed torch is not a build for CPUs only."""
    return not importlib.metadata.version("torch").endswith("+cpu")


def has_flash_attention() -> bool:
    """True if the package flash-attn is installed."""
    return importlib.util.find_spec("flash_attn") is not None


def longest_sequence(folder: Path) -> int | None:
    """Return the tokens of the longest sequence of a model; None if its configuration does not say."""
    file = folder / "config.json"
    if not file.is_file():  # the model of an engine of the user's own
        return None
    config = json.loads(file.read_text())
    longest = (config | config.get("text_config", {})).get("max_position_embeddings")
    return longest if isinstance(longest, int) and longest > 0 else None
