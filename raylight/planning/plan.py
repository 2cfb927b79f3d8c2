"""Plan of a run's memory: what each role needs, what the cluster has, and what to change if it does not
fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from raylight.config import EngineConfig, LearnerConfig, LoraConfig, RunnerConfig
from raylight.experience.settings import PolicySettings
from raylight.planning.cluster_shape import ClusterShape
from raylight.planning.fit import Shortage, find_shortages
from raylight.planning.memory import RoleMemory
from raylight.planning.model_shape import ModelShape, read_shape
from raylight.planning.roles import context_length, engine_memory, learner_memory, other_memory

LORA_RANK = 16
"""Rank of the adapter that a remedy proposes."""


@dataclass(frozen=True)
class PlannedRun:
    """The settings that a run's memory depends on.

    Attributes:
        model_path: folder of the model.
        kind: the engine, "vllm" or "transformers".
    """

    model_path: str
    kind: str
    engine: EngineConfig
    learner: LearnerConfig
    runner: RunnerConfig
    settings: PolicySettings


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run on a cluster.

    Attributes:
        shortages: what the cluster lacks; empty if the run fits.
        remedies: changes of settings that together make the run fit; empty if it fits, or if none do.
    """

    shape: ModelShape
    cluster: ClusterShape
    roles: tuple[RoleMemory, ...]
    shortages: tuple[Shortage, ...]
    remedies: tuple[str, ...]


def make_plan(run: PlannedRun, cluster: ClusterShape, *, at_peak: bool = True) -> MemoryPlan:
    """Return the plan of a run on a cluster.

    Args:
        at_peak: the run shall fit with full micro-batches and a full cache; else with the shortest rollouts.

    Raises:
        ConfigError: transformers has no causal language model of the architecture.
    """
    shape = read_shape(run.model_path)
    roles = _roles(run, shape, cluster)
    shortages = _shortages(roles, run, shape, cluster, at_peak)
    remedies = _remedies(run, shape, cluster, at_peak) if shortages else ()
    return MemoryPlan(shape, cluster, tuple(roles), tuple(shortages), remedies)


def _roles(run: PlannedRun, shape: ModelShape, cluster: ClusterShape) -> list[RoleMemory]:
    return [
        learner_memory(run.model_path, shape, run.learner, run.settings),
        engine_memory(shape, run.kind, run.engine, cluster.gpu_memory),
        *other_memory(run.runner),
    ]


def _shortages(
    roles: list[RoleMemory], run: PlannedRun, shape: ModelShape, cluster: ClusterShape, at_peak: bool
) -> list[Shortage]:
    found = find_shortages(roles, cluster, at_peak=at_peak, take_turns=run.engine.sleep_while_learning)
    cache = next(item.size for item in roles[1].items if item.name == "key-value cache")
    length = context_length(shape, run.engine)
    engine_weights = next(item.size for item in roles[1].items if item.name == "weights")
    per_token = engine_weights * shape.cache_per_token // shape.parameters
    if cache < per_token * length:
        found.append(
            Shortage(
                "key-value cache",
                f"engine: no room for one sequence of {length:,} tokens beside the weights; give it more "
                "memory (engine.args.gpu_memory_utilization), more GPUs (engine.args.tensor_parallel_size), "
                "or lower engine.max_model_len",
            )
        )
    return found


def _remedies(run: PlannedRun, shape: ModelShape, cluster: ClusterShape, at_peak: bool) -> tuple[str, ...]:
    """Apply changes one after the other until the run fits; return those that were needed."""
    applied: list[tuple[str, Callable[[LearnerConfig], LearnerConfig]]] = []
    changed = run
    for name, learner in _changes(run, cluster):
        previous = changed
        changed = _with_learner(changed, learner)
        if changed == previous:
            continue
        applied.append((name, learner))
        if not _shortages(_roles(changed, shape, cluster), changed, shape, cluster, at_peak):
            return _needed(run, applied, shape, cluster, at_peak)
    return ()


def _needed(
    run: PlannedRun,
    applied: list[tuple[str, Callable[[LearnerConfig], LearnerConfig]]],
    shape: ModelShape,
    cluster: ClusterShape,
    at_peak: bool,
) -> tuple[str, ...]:
    """Leave out each change without which the run still fits."""
    for change in list(applied):
        fewer = [other for other in applied if other is not change]
        changed = run
        for _, learner in fewer:
            changed = _with_learner(changed, learner)
        if fewer and not _shortages(_roles(changed, shape, cluster), changed, shape, cluster, at_peak):
            applied = fewer
    return tuple(name for name, _ in applied)


def _with_learner(run: PlannedRun, change: Callable[[LearnerConfig], LearnerConfig]) -> PlannedRun:
    return PlannedRun(run.model_path, run.kind, run.engine, change(run.learner), run.runner, run.settings)


def _changes(
    run: PlannedRun, cluster: ClusterShape
) -> Iterator[tuple[str, Callable[[LearnerConfig], LearnerConfig]]]:
    """Yield changes of the learner's settings that save memory, those that cost least first."""

    def change(**values: object) -> Callable[[LearnerConfig], LearnerConfig]:
        return lambda config: config.model_copy(update=values)

    yield "learner.gradient_checkpointing=true", change(gradient_checkpointing=True)
    tokens = run.learner.max_tokens_per_micro_batch
    while tokens > run.learner.row_limit or (run.learner.max_row_tokens is None and tokens > 2048):
        tokens = max(tokens // 2, run.learner.max_row_tokens or 1)
        yield f"learner.max_tokens_per_micro_batch={tokens}", change(max_tokens_per_micro_batch=tokens)
    if run.learner.num_gpus:
        free = cluster.gpus - run.engine.num_gpus * run.engine.replicas
        if free > run.learner.n:
            yield f"learner.n={int(free)}", change(n=int(free))
        yield "learner.optimizer_offload=true", change(optimizer_offload=True)
        yield "learner.param_offload=true", change(param_offload=True)
    if run.learner.lora is None:
        yield f"learner.lora.rank={LORA_RANK}", change(lora=LoraConfig(rank=LORA_RANK))
