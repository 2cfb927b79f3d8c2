"""Plan of a run's memory: what each role needs, what the cluster has, and what to change if it does not
fit."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from raylight.config import EngineConfig, LearnerConfig, LoraConfig, RunnerConfig
from raylight.engines.registry import engine_traits
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.trainer.cluster_fit.cluster_shape import ClusterShape
from raylight.trainer.cluster_fit.hardware import pack_gpus
from raylight.trainer.cluster_fit.model_shape import ModelShape, read_shape
from raylight.trainer.cluster_fit.role_memory import EngineMemory, Item, RoleMemory
from raylight.trainer.cluster_fit.role_needs import (
    FLOAT32,
    LOGIT_COPIES,
    engine_memory,
    learner_memory,
    other_memory,
    reward_model_memory,
)
from raylight.trainer.cluster_fit.shortages import Shortage, find_shortages
from raylight.trainer.spec.settings import ServingSettings, TrainedSettings
from raylight.types import JsonObject

LORA_RANK = 16
"""Rank of the adapter that a remedy proposes."""
FEW_SEQUENCES, SHORT_ROW = 8, 2048
"""Concurrent sequences of an engine, and tokens of a micro-batch, below which no remedy goes."""


@dataclass(frozen=True)
class PlannedRun:
    """The settings that a run's memory depends on.

    Attributes:
        model_path: folder of the model.
        teachers: those with dedicated engines.
        reward_models: those that the group reward calls.
    """

    model_path: str
    engine: EngineConfig
    learner: LearnerConfig
    runner: RunnerConfig
    settings: PolicySettings
    teachers: tuple[ServingSettings, ...] = ()
    reward_models: tuple[ServingSettings, ...] = ()
    models: int = 1
    """Models that the learners train on one base."""
    rollouts: int | None = None
    """Rollouts of an update; None if unknown."""

    @classmethod
    def of(cls, settings: TrainedSettings) -> Self:
        serving, training = settings.serving, settings.training
        return cls(
            serving.model_path,
            serving.engine,
            training.learner,
            settings.runner,
            training.algorithm.policy_settings(),
            tuple(one.serving for one in training.served_teachers),
            tuple(one.serving for one in settings.reward_models),
            max(len(training.algorithm.models), 1),
            training.algorithm.tasks_per_step * training.algorithm.group_size,
        )


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
    shortages = _shortages(run, shape, cluster, at_peak)
    remedies = _remedies(run, shape, cluster, at_peak) if shortages else ()
    return MemoryPlan(shape, cluster, tuple(_roles(run, shape, cluster)), tuple(shortages), remedies)


def _roles(run: PlannedRun, shape: ModelShape, cluster: ClusterShape) -> list[RoleMemory]:
    return [
        learner_memory(
            run.model_path,
            shape,
            run.learner,
            run.settings,
            run.engine.dtype,
            run.engine.max_model_len,
            run.models,
            run.rollouts,
        ),
        engine_memory(run.model_path, shape, run.engine, cluster.gpu_memory),
        *(_teacher(teacher, cluster) for teacher in run.teachers),
        *map(reward_model_memory, run.reward_models),
        *other_memory(run.runner),
    ]


def _teacher(teacher: ServingSettings, cluster: ClusterShape) -> EngineMemory:
    path, engine, shape = teacher.model_path, teacher.engine, read_shape(teacher.model_path)
    memory = engine_memory(path, shape, engine, cluster.gpu_memory)
    items = memory.items
    if not engine_traits(engine.kind).scores_by_sampling:
        logits = LOGIT_COPIES * FLOAT32 * memory.context * shape.vocabulary
        items += (Item("logits of a row", logits, grows=True, stays=True),)
    return replace(memory, role="teacher", items=items)


def _shortages(run: PlannedRun, shape: ModelShape, cluster: ClusterShape, at_peak: bool) -> list[Shortage]:
    roles = _roles(run, shape, cluster)
    found = find_shortages(roles, cluster, at_peak=at_peak, take_turns=run.engine.sleep_while_learning)
    for role in roles:
        if isinstance(role, EngineMemory) and role.room is not None and role.room < role.context:
            args = "engine.args" if role.role == "engine" else "args of its TeacherConfig"
            found.append(
                Shortage(
                    "key-value cache",
                    f"{role.role}: no room for one sequence of {role.context:,} tokens after the weights; "
                    f"give it more memory (gpu_memory_utilization in {args}), more GPUs "
                    f"(tensor_parallel_size in {args}), or lower engine.max_model_len",
                )
            )
    return list(dict.fromkeys(found))


def _remedies(run: PlannedRun, shape: ModelShape, cluster: ClusterShape, at_peak: bool) -> tuple[str, ...]:
    """Apply changes one after the other until the run fits; return those that were needed."""
    applied: list[_Change] = []
    changed = run
    for change in _changes(run, cluster):
        previous, changed = changed, change.apply(changed)
        if changed == previous:
            continue
        applied.append(change)
        if not _shortages(changed, shape, cluster, at_peak):
            return _needed(run, applied, shape, cluster, at_peak)
    return ()


def _needed(
    run: PlannedRun, applied: list[_Change], shape: ModelShape, cluster: ClusterShape, at_peak: bool
) -> tuple[str, ...]:
    """Leave out each change without which the run still fits, and of two of the same settings the first."""
    for change in list(applied):
        fewer = [other for other in applied if other is not change]
        changed = functools.reduce(lambda found, other: other.apply(found), fewer, run)
        if fewer and not _shortages(changed, shape, cluster, at_peak):
            applied = fewer
    return tuple(f"{name}={json.dumps(value)}" for change in applied for name, value in change.values.items())


@dataclass(frozen=True)
class _Change:
    """A change of settings that saves memory.

    Attributes:
        values: new value of each setting, by dotted name.
    """

    values: JsonObject

    def apply(self, run: PlannedRun) -> PlannedRun:
        for name, value in self.values.items():
            section, field = name.split(".", 1)
            if name == "learner.lora.rank":
                field, value = "lora", LoraConfig(rank=value)
            changed = getattr(run, section).model_copy(update={field: value})
            run = replace(run, **{section: changed})
        return run


def _changes(run: PlannedRun, cluster: ClusterShape) -> Iterator[_Change]:
    """Yield changes that save memory, those that cost least first."""
    yield _Change({"learner.gradient_checkpointing": True})
    sequences = run.engine.max_concurrent
    while engine_traits(run.engine.kind).memory_arg is None and sequences > FEW_SEQUENCES:
        sequences = max(sequences // 2, FEW_SEQUENCES)
        yield _Change({"engine.max_concurrent": sequences})
    tokens, least = run.learner.max_tokens_per_micro_batch, run.learner.max_row_tokens or SHORT_ROW
    while tokens > least:
        tokens = max(tokens // 2, least)
        shorter = {"engine.max_model_len": tokens} if tokens < run.engine.max_model_len else {}
        yield _Change(shorter | {"learner.max_tokens_per_micro_batch": tokens})
    if run.learner.num_gpus:
        ranks = _most_ranks(run, cluster)
        if ranks > run.learner.n:
            yield _Change({"learner.n": ranks})
        yield _Change({"learner.optimizer_offload": True})
        yield _Change({"learner.param_offload": True})
    full_only = run.learner.train_vision or run.settings.optimizer == "muon"
    if run.learner.lora is None and not full_only:
        yield _Change({"learner.lora.rank": LORA_RANK})


def _most_ranks(run: PlannedRun, cluster: ClusterShape) -> int:
    """Return the number of learners for which all engines leave GPUs. It keeps groups of ranks whole."""
    group = math.lcm(run.learner.fsdp_size or 1, run.learner.ulysses)
    engines = run.engine, *(model.engine for model in (*run.teachers, *run.reward_models))
    for ranks in range(cluster.gpus // group * group, 0, -group):
        learner = run.learner.model_copy(update={"n": ranks})
        if len(pack_gpus(learner, *engines)) <= cluster.gpus:
            return ranks
    return 0
