"""Memory of the processes of a run that trains a policy, by role."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from raylight.config import EngineConfig, LearnerConfig, RunnerConfig
from raylight.engines.registry import engine_traits
from raylight.engines.transformers.prefixes import count_kept_sequences
from raylight.engines.transformers.worker import PREFILL_TOKENS
from raylight.engines.vllm.args import most_workers, workers_per_replica
from raylight.experience.settings.policy_settings import OptimizerSettings, PolicySettings
from raylight.learner.model.vision import FEATURE_BYTES
from raylight.learner.tokens.micro_batch import host_tokens
from raylight.learner.tokens.token_logprobs import BLOCK_LOGITS, CHUNK_LOGITS
from raylight.trainer.cluster_fit.cluster_shape import GIB, MIB
from raylight.trainer.cluster_fit.model_shape import (
    ModelShape,
    adapter_parameters,
    count,
    measure_activations,
    measure_prefill,
    read_config,
    read_shape,
)
from raylight.trainer.cluster_fit.role_memory import EngineMemory, Item, RoleMemory
from raylight.trainer.spec.settings import ServingSettings
from raylight.types import JsonObject

FLOAT32 = 4
"""Bytes of a float32."""
INT64 = 8
"""Bytes of an index of torch."""
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Data types by the names that settings use."""
LEARNER_PROCESS = 740 * MIB
RUNNER_PROCESS = 160 * MIB
DRIVER_PROCESSES = 2 * GIB
"""Host memory of processes without a model, as measured: Python and libraries. The driver's processes are the
driver, the store, the coordinator, Serve's controller and proxies, and Ray itself."""
GPU_CONTEXT = 700 * MIB
"""Device memory of a CUDA context and of NCCL's communicators."""
VLLM_MEMORY_SHARE = 0.92
"""vLLM's default of `gpu_memory_utilization`."""
VLLM_GRAPHS = GIB
"""Device memory of vLLM's CUDA graphs, which it reports in its log. It grows with the model and the number of
concurrent sequences; this is an upper bound for models of a few billion parameters."""
VLLM_BATCHES = ((160 * GIB, 16_384), (70 * GIB, 8192), (0, 2048))
"""vLLM's default of `max_num_batched_tokens`, by the least memory of the GPU."""
TRANSFER_BUFFER = GIB
"""Buffer in which weights are sent to engines on GPUs; one tensor that is larger has a larger one."""
LOGIT_COPIES = 3
"""Float32 copies of logits at the peak of the log-probs: of a block in learners, of all in engines."""


def _with_gaps(items: Iterable[Item], on_gpu: bool) -> Iterator[Item]:
    """Yield tensors that come and go, and on a CPU the gaps that the C library leaves between them.

    glibc's aligned allocation asks for a little more than a tensor takes, so the block of a freed tensor does
    not hold another one of its size. In measured updates the gaps are about as large as these tensors.
    """
    passing = list(items)
    yield from passing
    if not on_gpu:
        yield Item("gaps between tensors", sum(item.size for item in passing), grows=True)


def learner_memory(
    path: str,
    shape: ModelShape,
    config: LearnerConfig,
    settings: PolicySettings,
    sent: str = "bfloat16",
    longest: int | None = None,
    adapters: int = 1,
    rollouts: int | None = None,
) -> RoleMemory:
    """Return the memory of one learner rank at the peak of an update.

    The peak is in a backward pass, when gradients and optimizer states of earlier updates exist.

    Args:
        sent: the engines' data type.
        longest: tokens of the longest row, if it is known to be below the learners' own limit.
        adapters: models that share the base.
        rollouts: of an update, if they are known.
    """
    items = [Item("Python and libraries", LEARNER_PROCESS, "host")]
    if config.num_gpus:
        items.append(Item("CUDA context", GPU_CONTEXT, stays=True))
    frozen = replace(shape, parameters=shape.parameters - shape.vision)
    teachers = [read_shape(teacher) for teacher in settings.local_teachers]
    models = (not config.train_vision) + (settings.needs_reference and not config.lora)
    tokens = None if rollouts is None or longest is None else rollouts * longest
    items += _frozen_vision([shape] * models + teachers, config, tokens)
    if not config.train_vision:
        shape = frozen
    if shape.pixel_bytes:
        items.append(Item("pixels", config.max_tokens_per_micro_batch * shape.pixel_bytes, grows=True))
    trained = adapter_parameters(path, config.lora) if config.lora else shape.parameters
    moments = _moments(settings, shape, trained)
    items += _states("policy", shape, config, trained, moments, computes=True)
    if settings.needs_reference and not config.lora:
        items += _states("reference", frozen, config, 0, 0)
    for teacher in teachers:
        items += _local_teacher(teacher, config)
    if settings.critic is not None:
        of_critic = _moments(settings.critic, shape, trained)
        items += _states("critic", shape, config, trained, of_critic)
        moments += trained + of_critic
    others = (adapters - 1) * 3 * trained  # weights and two moments of each
    if others:
        size = others * FLOAT32 // shards_of(config)
        items.append(Item("adapters of other models", size, stays=True))
    copied = (trained + moments + others) * FLOAT32 // shards_of(config)
    items.append(Item("copy of the training state", copied, "host"))
    if settings.max_staleness:
        items.append(Item("snapshot of the weights", _snapshot(shape, config, trained, sent), "host"))
    if config.num_gpus and config.lora is None:
        largest = shape.vocabulary * shape.hidden * DTYPES[sent].itemsize
        items.append(Item("transfer buffer", max(TRANSFER_BUFFER, largest), stays=True))
    if config.router_replay:
        routes = config.max_tokens_per_micro_batch * shape.route_bytes * INT64
        items.append(Item("routes of a pass", routes, grows=True))
    items += _with_gaps(_pass(path, shape, config, trained, longest), bool(config.num_gpus))
    return RoleMemory("learner", config.n, config.num_gpus, tuple(items), group=config.n)


def _frozen_vision(shapes: list[ModelShape], config: LearnerConfig, tokens: int | None) -> Iterator[Item]:
    """Yield what a rank keeps of the frozen vision parts of models, which are whole on each rank.

    Args:
        tokens: of an update, if they are known.
    """
    size = sum(shape.vision for shape in shapes) * DTYPES[config.dtype].itemsize
    if size:
        yield Item("frozen vision part", size, stays=True)
        features = sum(_features(shape, config, tokens) for shape in shapes)
        yield Item("features of images", features, grows=True)


def _features(shape: ModelShape, config: LearnerConfig, tokens: int | None) -> int:
    """Return the bytes of the features that a frozen vision part keeps, and of a pass's features.

    Args:
        tokens: of an update, if they are known.
    """
    size = shape.features * DTYPES[config.dtype].itemsize
    if not size:  # a teacher that reads text alone
        return 0
    kept = FEATURE_BYTES if tokens is None else min(FEATURE_BYTES, tokens * size)
    return kept + config.max_tokens_per_micro_batch * size


def _snapshot(shape: ModelShape, config: LearnerConfig, trained: int, sent: str) -> int:
    """Return the bytes of a rank's copy of the weights, from which they are sent during updates.

    Engines that serve the adapter receive nothing else. An adapter is merged in the model's own type; what it
    does not change is copied from a GPU only.
    """
    if config.lora is None:
        return trained * DTYPES[sent].itemsize // shards_of(config)
    if config.lora.serve == "adapter":
        return 0
    frozen = shape.parameters * DTYPES[config.dtype].itemsize if config.num_gpus else 0
    return (frozen + trained * FLOAT32) // shards_of(config)


def _moments(settings: OptimizerSettings, shape: ModelShape, trained: int) -> int:
    """Return the number of moments of a model's optimizer: two of a parameter, or one with Muon."""
    return 2 * trained - (shape.matrices if settings.optimizer == "muon" else 0)


def _states(
    name: str, shape: ModelShape, config: LearnerConfig, trained: int, moments: int, computes: bool = False
) -> Iterator[Item]:
    """Yield what a rank keeps of a model: its shards. Those that are offloaded are in host memory, and on the
    GPU while the model computes.

    Args:
        trained: number of trained parameters; an adapter's come in addition to the model's.
        moments: number of its optimizer's moments.
        computes: True for the model that computes at the peak.
    """
    shards, compute = shards_of(config), DTYPES[config.dtype].itemsize
    frozen = 0 if trained == shape.parameters else shape.parameters
    weights = trained * FLOAT32 + frozen * compute
    yield from _shards(f"{name} weights", weights // shards, config, config.param_offload, computes)
    if trained:
        if computes:  # another model's are freed after its update
            yield Item(f"{name} gradients", trained * FLOAT32 // shards)
        size = moments * FLOAT32 // shards
        yield from _shards(f"{name} optimizer", size, config, config.optimizer_offload, computes)


def _local_teacher(shape: ModelShape, config: LearnerConfig) -> Iterator[Item]:
    """Yield what a rank keeps of a teacher while it computes divergences: its shards, its whole output layer,
    and its logits of a chunk."""
    language = replace(shape, parameters=shape.parameters - shape.vision)
    yield from _states("teacher", language, config, 0, 0, computes=True)
    compute, device = DTYPES[config.dtype].itemsize, "cuda" if config.num_gpus else "cpu"
    if config.num_gpus or shards_of(config) > 1:
        outside = shape.root if shape.tied else shape.output
        yield Item("gathered output layer of the teacher", compute * outside)
    chunk = min(config.max_tokens_per_micro_batch * shape.vocabulary, CHUNK_LOGITS[device])
    logits = compute * chunk + LOGIT_COPIES * FLOAT32 * min(chunk, BLOCK_LOGITS[device])
    yield Item("logits of the teacher", logits, grows=True)


def _shards(name: str, size: int, config: LearnerConfig, offload: bool, computes: bool) -> Iterator[Item]:
    """Yield shards on the device, in host memory, or in both by turns. Without a GPU nothing is offloaded."""
    offload = offload and bool(config.num_gpus)
    if computes or not offload:
        yield Item(name, size, stays=not offload)
    if offload:
        yield Item(f"{name}, offloaded", size, "host")


def _pass(
    path: str, shape: ModelShape, config: LearnerConfig, trained: int, longest: int | None
) -> Iterator[Item]:
    """Yield what a forward and backward pass over one micro-batch adds, in its largest phase.

    FSDP2 gathers a layer while the next one is on its way, with a flat copy. Weights outside the layers are
    separate groups, but tied ones stay gathered for the whole pass. Gradients are copied to a flat
    float32 buffer to be reduced, which lasts until the next group's buffer; gloo copies it again.
    """
    compute, full = DTYPES[config.dtype].itemsize, trained == shape.parameters
    limit = config.max_tokens_per_micro_batch
    length = min(config.row_limit, longest or limit, limit)
    if not config.num_gpus and config.n == 1:
        limit = min(limit, host_tokens(shape.token_activations))
    rows = max(limit // length, 1)
    dtype, layers = DTYPES[config.dtype], shape.layers
    activations = measure_activations(path, rows, length, dtype, layers, config.gradient_checkpointing)
    device = "cuda" if config.num_gpus else "cpu"
    chunk = min(rows * length * shape.vocabulary, CHUNK_LOGITS[device])
    logits = compute * chunk + LOGIT_COPIES * FLOAT32 * min(chunk, BLOCK_LOGITS[device])
    outside = shape.root if shape.tied else shape.output
    copies = 1 if config.num_gpus or shards_of(config) == 1 else 2
    stays = compute * outside if shape.tied else 0

    def reduced(size: int) -> int:
        return int(full * FLOAT32 * size * (copies + 1 / shards_of(config)))

    output = _Phase(compute * outside, full * compute * outside, logits)
    layer = _Phase(
        stays + compute * 3 * shape.layer,
        full * (stays or FLOAT32 * outside) + full * compute * shape.layer + reduced(shape.layer),
    )
    largest = max(output, layer, key=_Phase.total)
    yield Item("gathered weights", largest.weights)
    if full:
        yield Item("gradients to reduce", largest.gradients)
    if config.no_sync and shards_of(config) > 1:
        yield Item("gradients of the whole model", FLOAT32 * trained)
    yield Item("activations", activations, grows=True)
    yield Item("logits", largest.logits, grows=True)


@dataclass(frozen=True)
class _Phase:
    """Bytes that a phase of a backward pass takes in addition to activations."""

    weights: int
    gradients: int
    logits: int = 0

    def total(self) -> int:
        return self.weights + self.gradients + self.logits


def shards_of(config: LearnerConfig) -> int:
    """Return the number of ranks among which a model is sharded."""
    return config.fsdp_size or config.n


def engine_memory(path: str, shape: ModelShape, config: EngineConfig, gpu_memory: int) -> EngineMemory:
    """Return the memory of one worker of an engine's replica.

    On a GPU vLLM fills its share of the device's memory with the key-value cache.

    Args:
        gpu_memory: bytes of a GPU.
    """
    size = DTYPES[config.dtype].itemsize
    workers = workers_per_replica(config.args)
    length = min(config.max_model_len, shape.context or config.max_model_len)
    weights = math.ceil(shape.parameters * size / workers)
    per_token = _cache_per_token(shape, config.args, size)
    traits = engine_traits(config.kind)
    sleeps = config.sleep_while_learning and traits.sleep_arg and config.args.get(traits.sleep_arg)
    items = [Item("Python and libraries", traits.process_bytes, "host"), Item("weights", weights)]
    if config.num_gpus:
        items.append(Item("CUDA context", GPU_CONTEXT, stays=True))
        if sleeps:
            items.append(Item("weights during sleep", weights, "host"))
    if traits.memory_arg and config.num_gpus:
        share = float(config.args.get(traits.memory_arg, VLLM_MEMORY_SHARE))
        step = _vllm_pass(path, shape, config, gpu_memory)
        items += step
        taken = weights + GPU_CONTEXT + sum(item.size for item in step)
        cache = max(int(share * gpu_memory) - taken, 0)
    elif traits.memory_arg:
        cache = GIB
    else:
        cache = config.max_concurrent * length * per_token
    items.append(Item("key-value cache", cache, grows=traits.memory_arg is None))
    room = routed = cache // per_token if per_token else None
    if traits.memory_arg is None:
        kept = count_kept_sequences(config.max_concurrent)
        items.append(Item("kept prefixes", kept * length * per_token, grows=True))
        routed = (config.max_concurrent + kept) * length
        rows = max(min(config.max_concurrent, PREFILL_TOKENS // length), 1)
        prefill = measure_prefill(path, rows, length, DTYPES[config.dtype])
        logits = LOGIT_COPIES * FLOAT32 * config.max_concurrent * shape.vocabulary
        passing = Item("prefill of prompts", prefill, grows=True), Item("logits", logits, grows=True)
        items += _with_gaps(passing, bool(config.num_gpus))
    if routed and traits.routes_arg and config.args.get(traits.routes_arg):
        token = shape.all_route_bytes if traits.routes_every_layer else shape.route_bytes
        items.append(Item(f"routes of experts, {token} bytes a token", routed * token // workers, "host"))
    held = tuple(items) if sleeps else _all_stay(items)
    return EngineMemory("engine", most_workers(config), config.num_gpus, held, workers, length, room)


def _all_stay(items: Iterable[Item]) -> tuple[Item, ...]:
    """Return the memory of a process that never frees it for another one on its GPU."""
    return tuple(replace(item, stays=True) for item in items)


def _cache_per_token(shape: ModelShape, args: JsonObject, size: int) -> int:
    """Return the bytes of a token in the key-value cache of one worker.

    Workers divide heads and layers; a head that is on several has a copy on each, unless they divide its
    tokens.

    Args:
        args: the engine's arguments.
        size: bytes of an element.
    """
    tensor, pipeline, context = (
        int(args.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline", "decode_context")
    )
    elements = shape.cache_per_token // shape.cache_heads * math.ceil(shape.cache_heads / tensor)
    layers = math.ceil(shape.layers / pipeline) / shape.layers
    return math.ceil(elements * layers * size / context)


def _vllm_pass(path: str, shape: ModelShape, config: EngineConfig, gpu_memory: int) -> list[Item]:
    """Return what a worker of vLLM takes in addition to weights and cache.

    It keeps the memory of a step with the largest batch free, which it measures when it starts.
    """
    default = next(tokens for least, tokens in VLLM_BATCHES if gpu_memory >= least)
    batch = int(config.args.get("max_num_batched_tokens") or default)
    activations = measure_prefill(path, 1, batch, DTYPES[config.dtype]) // workers_per_replica(config.args)
    logits = LOGIT_COPIES * FLOAT32 * config.max_concurrent * shape.vocabulary
    items = [Item("activations of a batch", activations), Item("logits", logits)]
    return items if config.args.get("enforce_eager") else [*items, Item("CUDA graphs", VLLM_GRAPHS)]


LAYER_COPIES = 6
"""Tensors of a layer of the size of its hidden states that exist at the peak of a forward pass."""


def reward_model_memory(model: ServingSettings) -> RoleMemory:
    engine, size = model.engine, DTYPES[model.engine.dtype].itemsize
    items = [
        Item("Python and libraries", engine_traits(engine.kind).process_bytes, "host"),
        Item("weights", _parameters(model.model_path) * size),
    ]
    if engine.num_gpus:
        items.append(Item("CUDA context", GPU_CONTEXT, stays=True))
    text = read_config(model.model_path).get_text_config()
    width = LAYER_COPIES * text.hidden_size + 3 * getattr(text, "intermediate_size", 4 * text.hidden_size)
    tokens = max(engine.args["max_batch_tokens"], engine.max_model_len)
    items.append(Item("activations of a batch", tokens * width * size, grows=True))
    return RoleMemory("reward model", engine.replicas, engine.num_gpus, _all_stay(items))


@functools.lru_cache(maxsize=8)
def _parameters(path: str) -> int:
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"):
        return count(AutoModelForSequenceClassification.from_config(read_config(path)))


def other_memory(config: RunnerConfig) -> list[RoleMemory]:
    """Return the memory of the runners, and of the driver with Ray's own processes."""
    return [
        RoleMemory("runner", config.n, 0, (Item("Python and libraries", RUNNER_PROCESS, "host"),)),
        RoleMemory(
            "driver, store, Serve, Ray", 1, 0, (Item("Python and libraries", DRIVER_PROCESSES, "host"),)
        ),
    ]
