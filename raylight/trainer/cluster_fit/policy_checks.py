"""Checks and defaults of a run that trains a policy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from raylight.agent.litagent import LitAgent
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.config import EngineConfig, LearnerConfig, LoraConfig
from raylight.engines.registry import ENGINES, choose_engine, engine_traits
from raylight.engines.vllm.args import RANK_REMEDY, most_workers, rank_limit
from raylight.errors import ConfigError
from raylight.experience.settings.correction_settings import default_limit
from raylight.traces.trained_agents import AgentFilter
from raylight.trainer.cluster_fit.hardware import pack_gpus
from raylight.trainer.spec.settings import ServingSettings
from raylight.types import JsonObject
from raylight.weights.peft_files import ADAPTER_FILES, missing_files
from raylight.weights.transports import choose_transport, find_transport

LOCAL_ENGINE = frozenset(
    (
        *("kind", "args", "dtype", "max_model_len", "max_concurrent", "max_waiting", "token_in"),
        *("tolerate_rewrites", "max_body_bytes", "ignore_fields", "host", "port", "weight_transfer"),
        *("fetch_images", "max_image_bytes", "max_image_pixels", "max_images"),
    )
)
"""Settings of an engine that are read with a local learner; the transport is written to config.yaml."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that the configurations of mixtures of experts have for the number of experts."""


def resolve_state_url(path: str) -> str:
    """Return an absolute path, or a URL unchanged."""
    return path if "://" in path else str(Path(path).expanduser().absolute())


def check_lengths(engine: EngineConfig, learner: LearnerConfig) -> None:
    """Raise a ConfigError if a rollout may be longer than a learner's micro-batch."""
    if engine.max_model_len > learner.max_tokens_per_micro_batch:
        raise ConfigError(
            f"a rollout may have {engine.max_model_len} tokens (engine.max_model_len), more than a "
            "micro-batch of a learner "
            f"(learner.max_tokens_per_micro_batch={learner.max_tokens_per_micro_batch}); lower the "
            "first or raise the second"
        )


def check_models(algorithm: PolicyAlgorithm, learner: LearnerConfig) -> None:
    """Check that the learners can train several models, or keep older versions of one as opponents.

    Raises:
        ConfigError: engines cannot serve them, or an initial adapter is not an adapter.
    """
    if not algorithm.served_models:
        return
    lora = learner.lora
    if learner.kind != "ranks" or lora is None or lora.serve != "adapter":
        raise ConfigError(
            "several models, and opponents, are LoRA adapters of one base, which learner ranks train and "
            "engines serve; set learner={'lora': {'rank': 8}} (with kind='ranks' and serve='adapter', the "
            "defaults), or train one model without opponents"
        )
    for name, model in algorithm.models.items():
        folder = model.adapter and Path(model.adapter)
        if not folder or not missing_files(folder):
            continue
        if (folder / "config.json").is_file():
            raise ConfigError(
                f"models: {name!r} is a full model, {folder}, and the models of a run are LoRA "
                "adapters of one base; give the folder of an adapter, or serve that model elsewhere as a "
                "fixed one: LLM(endpoint=..., traced=True)"
            )
        raise ConfigError(
            f"models: {name!r} has no LoRA adapter in peft's format in {folder}; it needs "
            f"{' and '.join(ADAPTER_FILES)}"
        )


def trainable_engine(engine: EngineConfig, learner: LearnerConfig) -> EngineConfig:
    """Return the settings of the engine that samples from the policy, with its kind resolved.

    Raises:
        ConfigError: the engine takes no weights, is not installed, or does not fit the learner; or there is
            no such transport.
    """
    if engine.args.get("speculative_config") is not None:
        # vLLM 0.29 for CPU with n-gram drafts: log-probs off by 0.2 to 1.7, or NaN, at temperatures above 0
        raise ConfigError(
            "engine.args has speculative_config, with which vLLM's log-probs of sampled tokens were seen to "
            "differ from the policy's; leave it out to train"
        )
    kind = choose_engine(engine)
    if learner.kind == "local":
        _check_local_engine(engine, learner)
        kind = "transformers"
    if kind == "upstream":
        raise ConfigError(
            "an upstream model cannot be trained, because its weights are not in this run; leave engine.url "
            "out, and pass a fixed model to the agent as a resource: LLM(endpoint=..., traced=True)"
        )
    if engine.weight_transfer != "auto":
        find_transport(engine.weight_transfer)
    return engine.model_copy(update={"kind": kind})


def _check_local_engine(engine: EngineConfig, learner: LearnerConfig) -> None:
    """Raise a ConfigError for an engine that a local learner cannot train in place."""
    if engine.kind not in ("auto", "transformers"):
        raise ConfigError(
            f"a local learner trains in the transformers engine, and engine.kind is {engine.kind!r}; "
            "leave it out, or use learner={'kind': 'ranks'}"
        )
    unread = [
        name
        for name, field in EngineConfig.model_fields.items()
        if name not in LOCAL_ENGINE and getattr(engine, name) != field.get_default(call_default_factory=True)
    ]
    if unread:
        raise ConfigError(
            f"nothing reads engine.{', engine.'.join(unread)}: with learner.kind='local' the driver's "
            "process is the engine; leave it out"
        )
    if learner.lora is None and engine.dtype != "float32":
        raise ConfigError(
            f"a local learner trains all weights in float32 only, and engine.dtype is {engine.dtype!r}; "
            "leave it out, or train an adapter with learner.lora"
        )


def engine_with_transport(engine: EngineConfig, learner: LearnerConfig, overlaps: bool) -> EngineConfig:
    """Return the settings of an engine with the transport of weights, which depends on who has GPUs.

    Args:
        overlaps: True if engines sample while the learners update.

    Raises:
        ConfigError: the transport does not fit engine or learners, or the engines sleep when they should
            receive weights.
    """
    if overlaps and engine.sleep_while_learning:
        raise ConfigError(
            "max_staleness above 0 has engines sample while the learners update, and "
            "engine.sleep_while_learning lends their GPUs to the learners; set max_staleness=0, or give both "
            "dedicated GPUs"
        )
    vllm_transfer = engine_traits(engine.kind).vllm_transfer
    transport = choose_transport(engine, learner, most_workers(engine), vllm_transfer, overlaps)
    return engine.model_copy(update={"weight_transfer": transport})


def engine_with_room(engine: EngineConfig, adapters: int, rank: int, remedy: str) -> EngineConfig:
    """Return the settings of an engine with room for adapters, two versions of each.

    Args:
        adapters: number of adapters that are served at a time, pinned versions included.
        rank: highest rank of an adapter.
        remedy: end of the error: what to do about a rank that is too high.

    Raises:
        ConfigError: the engine serves no adapters of this rank.
    """
    update: JsonObject = {"max_adapters": max(engine.max_adapters, adapters)}
    if engine_traits(engine.kind).vllm_lora:
        rank_limit(rank, remedy)
        update["args"] = {"max_lora_rank": rank} | engine.args
    return engine.model_copy(update=update)


def engine_with_adapter(
    engine: EngineConfig, model_path: str, lora: LoraConfig, adapters: int, remedy: str = RANK_REMEDY
) -> EngineConfig:
    """Return the settings of an engine with room for the learners' adapters, as `engine_with_room`.

    vLLM is told the adapted layers: on a CPU it cannot compute a prompt's log-probs in a batch with others
    if the output layer may be adapted too.

    Raises:
        ConfigError: the adapter does not fit the model or the engine.
    """
    engine = engine_with_room(engine, adapters, lora.rank, remedy)
    if engine_traits(engine.kind).vllm_lora:
        from raylight.learner.model.adapter import adapted_layers

        layers = {"lora_target_modules": adapted_layers(model_path, lora)}
        engine = engine.model_copy(update={"args": layers | engine.args})
    return engine


def engine_with_routes(engine: EngineConfig, model_path: str) -> EngineConfig:
    """Return the settings of an engine that records the experts of each token, for router replay.

    Raises:
        ConfigError: it cannot, or the model is not a mixture of experts.
    """
    traits = engine_traits(engine.kind)
    if (records := traits.routes_arg) is None:
        able = " or ".join(repr(name) for name, traits in ENGINES.items() if traits.routes_arg)
        raise ConfigError(
            f"learner.router_replay=True: an engine of kind {engine.kind!r} does not record the experts of "
            f"each token; set engine.kind to {able}, or leave router_replay out"
        )
    if not _has_experts(model_path):
        raise ConfigError(
            f"learner.router_replay=True: {model_path} is not a mixture of experts; leave the setting out"
        )
    for name in traits.routeless_args:
        if engine.args.get(name) not in (None, 1):
            raise ConfigError(
                f"learner.router_replay=True: {engine.kind} does not return the experts of each token with "
                f"{name}; leave {name} out of engine.args, or router_replay"
            )
    if engine.args.get(records, True) is not True:
        raise ConfigError(
            f"learner.router_replay=True: {records}={engine.args[records]!r} in engine.args records no "
            f"experts; leave {records} out"
        )
    return engine.model_copy(update={"args": engine.args | {records: True}})


def engine_on_device(engine: EngineConfig, learner: LearnerConfig) -> EngineConfig:
    """Return the settings of the engine of a local learner, with the data type for its device.

    Raises:
        ConfigError: torch has no such device.
    """
    from raylight.learner.model.local_device import select_device

    on_gpu = select_device(learner.device).type == "cuda"
    if on_gpu and learner.lora is not None and "dtype" not in engine.model_fields_set:
        return engine.model_copy(update={"dtype": "bfloat16"})
    return engine


def with_mismatch_limit(
    algorithm: PolicyAlgorithm, engine: EngineConfig, learner: LearnerConfig, model_path: str
) -> PolicyAlgorithm:
    """Return an algorithm with the limit of the mean difference of log-probs filled in, whose default depends
    on the precision.

    Raises:
        ConfigError: the run would fail at the limit before it warns.
    """
    exact = engine.dtype == "float32" and learner.dtype == "float32"
    limit = algorithm.max_logprob_mismatch or default_limit(exact, _has_experts(model_path))
    warns_at = algorithm.warn_logprob_mismatch
    if warns_at > limit and not algorithm.tolerates_mismatch:
        raise ConfigError(
            f"warn_logprob_mismatch={warns_at:g} is above the limit at which the run fails, {limit:g} for "
            "these dtypes; lower it, or set max_logprob_mismatch"
        )
    return algorithm.model_copy(update={"max_logprob_mismatch": limit})


def _has_experts(model_path: str) -> bool:
    """Return True if the model of a folder is a mixture of experts."""
    config = json.loads(Path(model_path, "config.json").read_text())
    fields = config | config.get("text_config", {})
    return any(isinstance(fields.get(name), int) and fields[name] > 1 for name in EXPERT_COUNTS)


def idle_hardware(
    engine: EngineConfig,
    learner: LearnerConfig,
    resources: Mapping[str, float],
    scoring: Sequence[ServingSettings] = (),
) -> list[str]:
    """Return notes on GPUs of the cluster that a run leaves idle.

    Args:
        resources: total resources of the cluster, as Ray names them.
        scoring: the teacher and the reward models.
    """
    gpus = resources.get("GPU", 0)
    used = len(pack_gpus(learner, engine, *(model.engine for model in scoring)))
    notes = [
        f"the cluster has {gpus:g} GPUs, and the {model.name} computes on CPUs: set its num_gpus to 1"
        for model in scoring
        if gpus and not model.engine.num_gpus
    ]
    if gpus and not learner.num_gpus:
        notes.append(
            f"the cluster has {gpus:g} GPUs, and the learners compute on CPUs: set learner={{'num_gpus': 1}}"
        )
    elif gpus - used >= 1:
        notes.append(
            f"{gpus - used:g} of {gpus:g} GPUs of the cluster are idle: learners and engines take "
            f"{used}; raise learner.n or engine.replicas"
        )
    return notes


def trained_agents_pattern(agent: LitAgent, adapter: object, algorithm: PolicyAlgorithm) -> str | None:
    """Return the pattern of the trained agents, from the agent or the adapter.

    Raises:
        ConfigError: agent and adapter differ, the pattern is not a regular expression, or the adapter has no
            `agent_match`.
    """
    agent_pattern, adapter_pattern = agent.trained_agents, getattr(adapter, "agent_match", None)
    if adapter is not None and adapter_pattern is None:
        raise ConfigError(
            f"nothing reads the adapter: {type(algorithm).__name__} trains on the tokens that the "
            "engine recorded; give an adapter with agent_match, or none"
        )
    if agent_pattern is not None and adapter_pattern is not None and agent_pattern != adapter_pattern:
        raise ConfigError(
            f"the agent has trained_agents={agent_pattern!r} and the adapter "
            f"agent_match={adapter_pattern!r}; give one of them"
        )
    pattern = agent_pattern if agent_pattern is not None else adapter_pattern
    AgentFilter(pattern)
    return pattern
