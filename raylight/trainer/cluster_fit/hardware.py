"""Settings that follow the hardware, where the user has set none. An explicit setting always wins."""

from __future__ import annotations

import importlib.metadata
import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import ray

from raylight._utils.machine import available_cpus
from raylight.base_config import Config
from raylight.config import EngineConfig, LearnerConfig, RunnerConfig
from raylight.engines.registry import choose_engine, engine_traits
from raylight.engines.vllm.args import most_workers
from raylight.errors import ConfigError
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.model.packing import PACKED_VISION_MODELS, can_pack, keeps_state
from raylight.trainer.cluster_fit.cluster_shape import ClusterShape, pack_shares, this_machine
from raylight.trainer.cluster_fit.engine_nodes import ask_nodes, check_image_scaling, engine_on_nodes
from raylight.trainer.spec.settings import ServingSettings
from raylight.types import JsonObject

SHARES = (0.6, 0.4)
"""GPU fractions of a learner and of an engine's worker that share a GPU. Two of the smaller kind would fit on
one too, so the kind with more processes gets the larger one."""
KEPT_BYTES = 16
"""Bytes that a learner keeps of a trained parameter: its float32 weight, gradient and two moments."""
FROZEN_BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes that it keeps of a parameter of a frozen model, the reference or the base of an adapter, by dtype."""
RESERVE = 4 * 2**30
"""Device memory for the contexts of both processes, and for the buffers of a publication."""
MAX_CONTEXT = 16_384
"""Longest default of `engine.max_model_len` on a GPU."""
MAX_THREADS = 8
"""Largest default of the host threads of a process with a GPU."""
THREADED_PARAMETERS = 10_000_000
"""Parameters of a model from which several threads compute faster than one."""
MAX_IN_FLIGHT: dict[type[Config], int] = {EngineConfig: 1024, RunnerConfig: 256}
"""Largest default of the sequences of a replica on a GPU, and of the rollouts of a runner."""
C = TypeVar("C", bound=Config)
Part = TypeVar("Part", EngineConfig, LearnerConfig)
InFlight = TypeVar("InFlight", EngineConfig, RunnerConfig)


@dataclass(frozen=True)
class Hardware:
    """Hardware of a cluster on which defaults depend."""

    gpus: float
    """GPUs on nodes whose torch can use them."""
    gpu_memory: int = 0
    """Bytes of the smallest GPU; 0 if unknown."""
    cpus: int = 1
    """CPUs for each GPU, on the node with the fewest."""

    def without(self, *parts: EngineConfig | LearnerConfig) -> Hardware:
        """Return the hardware that other parts of a run leave: whole GPUs, or the largest rest of one."""
        left = pack_gpus(*parts)
        rest = max(left, default=0.0) if len(left) == self.gpus else 0.0
        return replace(self, gpus=max(self.gpus - len(left), rest))


@dataclass(frozen=True)
class Workload:
    """The parts of a run on which defaults depend."""

    context: int | None = None
    """Tokens of the model's longest sequence; None if unknown."""
    kept_bytes: int | None = None
    """Bytes that the learners keep between updates, all ranks together; None if unknown."""
    overlaps: bool = False
    """True if engines sample while the learners update."""
    packs: bool = False
    """True if rows of the model can be packed without a mask."""
    keeps_state: bool = False
    """True if rows of the model cannot be packed at all."""


@dataclass(frozen=True)
class HardwareChoice:
    """Settings with the defaults for the hardware, and messages for the user."""

    engine: EngineConfig
    learner: LearnerConfig | None
    notes: tuple[str, ...] = ()


def fit_engine(
    hardware: Hardware,
    serving: ServingSettings,
    requested: EngineConfig,
    learner: LearnerConfig | None = None,
    policy: PolicySettings | None = None,
) -> HardwareChoice:
    """Return the settings of a served model's engine, and of the learners that train it, for the hardware.

    Args:
        hardware: the part of the cluster that no teacher or reward model takes.
        requested: the user's settings of the engine, whose kind may be "auto"; else it is the one on GPUs.
        learner, policy: None for a fixed model.

    Raises:
        ConfigError: learners and engines do not fit on the GPUs.
    """
    kind = own_kind = serving.engine.kind
    if hardware.gpus and requested.kind != "auto":
        kind = requested.kind
    elif hardware.gpus and "num_gpus" not in requested.model_fields_set:
        kind = choose_engine(requested.model_copy(update={"num_gpus": 1}))
    choice = choose(
        hardware,
        serving.engine.model_copy(update={"kind": kind}),
        learner if learner is not None and learner.kind == "ranks" else None,
        workload(Path(serving.model_path), policy, learner),
    )
    if choice.engine.num_gpus:
        return choice
    return replace(choice, engine=choice.engine.model_copy(update={"kind": own_kind}))


def choose(
    hardware: Hardware, engine: EngineConfig, learner: LearnerConfig | None, work: Workload
) -> HardwareChoice:
    """Return the settings with the defaults for the hardware. Nothing changes without GPUs.

    Args:
        engine: its kind is the one that it has on a GPU.
        learner: None for a run without learners.

    Raises:
        ConfigError: learners and engines do not fit on the GPUs together, not even if they share them.
    """
    if learner is None:
        engine, notes = _engine_alone(hardware, engine)
    else:
        engine, learner, notes = _assign_gpus(hardware, engine, learner, work)
        learner = _learner_on_gpu(hardware, learner, work)
    if engine.num_gpus:
        engine = engine_on_gpu(engine, learner, work.context)
        if engine.kind == "transformers":
            engine = _with_defaults(engine, num_threads=_host_threads(hardware))
    return HardwareChoice(engine, learner, (*notes, *_summary(hardware, engine, learner)))


def learner_alone(hardware: Hardware, learner: LearnerConfig, work: Workload) -> LearnerConfig:
    """Return the settings of learners in a run without engines: each has a GPU if there are enough."""
    if hardware.gpus >= learner.n:
        learner = _with_defaults(learner, num_gpus=1)
    return _learner_on_gpu(hardware, learner, work)


def _learner_on_gpu(hardware: Hardware, learner: LearnerConfig, work: Workload) -> LearnerConfig:
    if not learner.num_gpus:
        return learner
    threads = max(int(learner.num_cpus), _host_threads(hardware))
    learner = _with_defaults(learner, dtype="bfloat16", gradient_checkpointing=True, num_threads=threads)
    flash = learner.attention == "flash_attention_2" and not work.keeps_state
    kernel = (learner.attention == "auto" and work.packs) or flash
    return _with_defaults(learner, packed=learner.dtype == "bfloat16" and kernel)


def _host_threads(hardware: Hardware) -> int:
    """Return the host threads of a process with a GPU, for loading and casting; half of the CPUs are left."""
    return max(min(hardware.cpus // 2, MAX_THREADS), 1)


def share_cores(
    cores: int, parameters: int, engine: EngineConfig, learner: LearnerConfig, overlaps: bool
) -> tuple[EngineConfig, LearnerConfig]:
    """Return the settings with the threads of processes that compute on CPUs.

    Learners and engines that take turns use all cores in their turn; if they overlap, they share the cores.

    Args:
        cores: CPUs of a node, on which all of the processes may be.
        parameters: number of the model's.
        overlaps: engines sample while the learners update.
    """
    workers, ranks = (_count(part) * overlaps * _computes_on_cpus(part) for part in (engine, learner))
    return on_cores(cores, parameters, engine, ranks), on_cores(cores, parameters, learner, workers)


def _count(part: EngineConfig | LearnerConfig) -> int:
    """Return the number of workers of all replicas, or of ranks."""
    return part.n if isinstance(part, LearnerConfig) else most_workers(part)


def _computes_on_cpus(part: EngineConfig | LearnerConfig) -> bool:
    if isinstance(part, LearnerConfig):
        return part.kind == "ranks" and not part.num_gpus
    return engine_traits(part.kind).loads_model and not part.num_gpus


def on_cores(cores: int, parameters: int, part: Part, others: int = 0) -> Part:
    """Return the settings of engines or learners with the threads of each process that computes on CPUs.

    Args:
        cores, parameters: as for `share_cores`.
        others: further processes that compute at the same time.
    """
    if not _computes_on_cpus(part) or parameters < THREADED_PARAMETERS or "num_cpus" in part.model_fields_set:
        return part
    return _with_defaults(part, num_threads=max(cores // (_count(part) + others), 1))


def is_open(engine: EngineConfig) -> bool:
    """Return True for an engine that can compute on GPUs, without a setting of their number."""
    return "num_gpus" not in engine.model_fields_set and engine_traits(engine.kind).loads_model


def _engine_alone(hardware: Hardware, engine: EngineConfig) -> tuple[EngineConfig, list[str]]:
    """Give a GPU to each worker of engines without a setting, if there are enough and no learners."""
    if not hardware.gpus or not is_open(engine):
        return engine, []
    if (workers := most_workers(engine)) <= hardware.gpus:
        return _with_defaults(engine, num_gpus=1), []
    note = f"the engine computes on a CPU: its {workers} worker(s) have {hardware.gpus:g} GPU(s)"
    return engine, [f"{note}; lower engine.replicas or engine.max_replicas, or set engine.num_gpus"]


def pack_gpus(*parts: EngineConfig | LearnerConfig) -> list[float]:
    """Return what engines and learners leave of each GPU that they take."""
    return pack_shares(*((_count(part), part.num_gpus) for part in parts))


def _assign_gpus(
    hardware: Hardware, engine: EngineConfig, learner: LearnerConfig, work: Workload
) -> tuple[EngineConfig, LearnerConfig, list[str]]:
    """Give GPUs to learners and engines without a setting: each its own if there are enough, else shares."""
    ranks, workers, free = learner.n, most_workers(engine), hardware.gpus
    open_learner, open_engine = "num_gpus" not in learner.model_fields_set, is_open(engine)
    if not free or not (open_learner or open_engine):
        return engine, learner, []
    rest = round(1 - (learner if open_engine else engine).num_gpus, 6)
    shares = rest, rest
    if open_engine and open_learner:
        shares = SHARES if ranks >= workers else SHARES[::-1]
    for on_rank, on_worker in ((1, 1), shares):
        ours = _with_defaults(learner, num_gpus=on_rank)
        theirs = _with_defaults(engine, num_gpus=on_worker) if open_engine else engine
        # two of at most half a GPU each might get the same one
        crowded = (ranks > 1 and 0 < ours.num_gpus <= 0.5) or (
            open_engine and workers > ranks and on_worker <= 0.5
        )
        if on_rank > 0 and not crowded and len(pack_gpus(ours, theirs)) <= free:
            return (theirs, ours, []) if on_rank == 1 else _share(hardware, theirs, ours, work)
    if open_engine and open_learner:
        raise ConfigError(
            f"{ranks} learner(s) (learner.n) and {workers} engine worker(s) (engine.replicas x "
            f"engine.args.tensor_parallel_size) do not fit on {free:g} GPU(s), not even in pairs of one "
            "learner and one worker. Lower them, add GPUs, have as many learners as workers, or set "
            "learner.num_gpus and engine.num_gpus"
        )
    if open_engine:
        note = "the engine computes on a CPU, because the learners take the GPUs: give learner.num_gpus=0.6"
        return engine, learner, [f"{note} and engine.num_gpus=0.4 to share them"]
    note = "the learners compute on CPUs, because the engines take the GPUs: give engine.num_gpus=0.4"
    return engine, learner, [f"{note} and learner.num_gpus=0.6 to share them"]


def _share(
    hardware: Hardware, engine: EngineConfig, learner: LearnerConfig, work: Workload
) -> tuple[EngineConfig, LearnerConfig, list[str]]:
    """Let one learner and one engine worker use the same GPU.

    They take turns, and the engine frees its memory meanwhile, unless the engine samples during updates.
    """
    sleeps = engine_traits(engine.kind).sleep_arg is not None and not work.overlaps
    shared = _with_defaults(engine, sleep_while_learning=sleeps)
    if not _keeps_states(hardware, shared, learner, work):
        learner = _with_defaults(learner, param_offload=True, optimizer_offload=True)
    return shared, learner, ["learners and engines share GPUs, because there are too few for both"]


def _keeps_states(hardware: Hardware, engine: EngineConfig, learner: LearnerConfig, work: Workload) -> bool:
    """Return True if the learner's weights and optimizer fit on a GPU with an engine that samples."""
    if not (hardware.gpu_memory and work.kept_bytes):
        return False
    kept = work.kept_bytes / (learner.fsdp_size or learner.n)
    engine_share = float(engine.args.get("gpu_memory_utilization", engine.num_gpus))
    return kept + RESERVE <= (1 - engine_share) * hardware.gpu_memory


def engine_on_gpu(engine: EngineConfig, learner: LearnerConfig | None, context: int | None) -> EngineConfig:
    """Return the settings of an engine with the defaults for a GPU.

    Args:
        context: tokens of the model's longest sequence; None if unknown.
    """
    longest = min(context or MAX_CONTEXT, MAX_CONTEXT)
    if learner is not None:
        longest = min(longest, learner.row_limit)
    engine = _with_defaults(engine, dtype="bfloat16", max_model_len=max(longest, 8))
    traits = engine_traits(engine.kind)
    if traits.memory_arg is None or engine.num_gpus >= 1:
        return engine
    args: JsonObject = {traits.memory_arg: engine.num_gpus}
    if engine.sleep_while_learning and traits.sleep_arg:
        args[traits.sleep_arg] = True
    return engine.model_copy(update={"args": args | engine.args})


def at_once(config: InFlight, rollouts: int, processes: int) -> InFlight:
    """Return the settings of engines or runners that have all rollouts of a step in flight at once.

    Args:
        processes: number of replicas or of runners.
    """
    default = type(config).model_fields["max_concurrent"].default
    each = min(max(-(-rollouts // processes), default), MAX_IN_FLIGHT[type(config)])
    return _with_defaults(config, max_concurrent=each)


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


def _with_defaults(config: C, **defaults: object) -> C:
    """Return settings with other defaults: those that the user has not set."""
    return config.model_copy(
        update={name: value for name, value in defaults.items() if name not in config.model_fields_set}
    )


def connected_hardware() -> Hardware:
    """Return the hardware of the connected cluster.

    Raises:
        ConfigError: a node with GPUs cannot load raylight, or does not respond.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
    if not nodes or not all(ask_nodes(addresses, torch_uses_gpus).values()):
        return Hardware(0.0)
    gpus = sum(node["Resources"]["GPU"] for node in nodes)
    memory = min(node.gpu_memory for node in ask_nodes(addresses, this_machine).values())
    shares = [node["Resources"].get("CPU", 0) / node["Resources"]["GPU"] for node in nodes]
    return Hardware(gpus, memory, int(min(shares)))


class ClusterFacts:
    """Facts of the connected cluster that settings of a run depend on, each read when first needed."""

    @cached_property
    def resources(self) -> dict[str, float]:
        """Total resources, as Ray names them."""
        return ray.cluster_resources()

    @cached_property
    def cores(self) -> int:
        """CPUs of the smallest node that has some, on which a process may run. A local cluster has more in
        Ray than the machine."""
        nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        cores = int(min(filter(None, nodes), default=0))
        return min(cores, available_cpus()) if len(nodes) == 1 else cores

    @cached_property
    def hardware(self) -> Hardware:
        """GPUs and CPUs; see `connected_hardware`."""
        return connected_hardware()

    def engine_on_nodes(self, requested: EngineConfig, engine: EngineConfig) -> EngineConfig:
        """Return the settings of an engine that the nodes can run; see the function of this name."""
        return engine_on_nodes(requested, engine)

    def check_image_scaling(self, model_path: str, *parts: EngineConfig | LearnerConfig) -> None:
        """Check that nodes scale images alike; see the function of this name."""
        check_image_scaling(model_path, *parts)


class PlannedFacts(ClusterFacts):
    """Facts of a cluster that is not connected, whose nodes can run the planned engine."""

    def __init__(self, cluster: ClusterShape) -> None:
        self.resources = {"GPU": float(cluster.gpus)}
        self.hardware = Hardware(cluster.gpus, cluster.gpu_memory)

    def engine_on_nodes(self, requested: EngineConfig, engine: EngineConfig) -> EngineConfig:
        return engine

    def check_image_scaling(self, model_path: str, *parts: EngineConfig | LearnerConfig) -> None: ...


def torch_uses_gpus() -> bool:
    """True if the installed torch is not a build for CPUs only."""
    return not importlib.metadata.version("torch").endswith("+cpu")


def workload(folder: Path, policy: PolicySettings | None, learner: LearnerConfig | None) -> Workload:
    """Return the workload of a run.

    Args:
        folder: the model's.
        policy, learner: None for a run without learners.
    """
    parameters, kept = count_parameters(folder), None
    if policy is not None and learner is not None and parameters is not None:
        dtype = learner.dtype if "dtype" in learner.model_fields_set else "bfloat16"  # the default on a GPU
        frozen, adapted = FROZEN_BYTES[dtype], learner.lora is not None
        models = 1 if policy.critic is None else 2
        reference = frozen if policy.needs_reference and not adapted else 0
        kept = (models * (frozen if adapted else KEPT_BYTES) + reference) * parameters
        for teacher in policy.local_teachers:
            others = count_parameters(Path(teacher))
            kept = None if kept is None or others is None else kept + frozen * others
    overlaps, config = policy is not None and policy.max_staleness > 0, _language_config(folder)
    packs = can_pack(config) and _packs_images(folder)
    return Workload(longest_sequence(folder), kept, overlaps, packs, keeps_state(config))


def _packs_images(folder: Path) -> bool:
    """Return False for a model whose rows cannot be packed with the images that it reads."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    if "vision_config" not in config or config.get("model_type") in PACKED_VISION_MODELS:
        return True
    from raylight.images.model_inputs import reads_images

    return not reads_images(str(folder))


def count_parameters(folder: Path) -> int | None:
    """Return the parameters in a model's safetensors files, read from their headers; None if it has none, or
    a file that only its loading reports as damaged."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, "numpy") as tensors:
                names = tensors.keys()
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
        except (OSError, SafetensorError):
            return None
    return total or None


def _language_config(folder: Path) -> JsonObject:
    """Return the configuration of a model's language part; an empty one for the model of an engine of the
    user's own, which may have no file."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    text = config.get("text_config") or {}
    if not text and config.get("model_type") in PACKED_VISION_MODELS:
        from transformers import AutoConfig  # published files of Qwen 2.5-VL have its settings at the top

        text = AutoConfig.from_pretrained(folder).get_text_config().to_dict()
    return config | text


def longest_sequence(folder: Path) -> int | None:
    """Return the tokens of the longest sequence of a model; None if its configuration does not say."""
    longest = _language_config(folder).get("max_position_embeddings")
    return longest if isinstance(longest, int) and longest > 0 else None
