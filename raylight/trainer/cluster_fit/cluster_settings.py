"""Settings of a run that follow from the connected cluster."""

from __future__ import annotations

import ray

from raylight.algorithms.policy import RunSettings
from raylight.trainer.cluster_fit.engine_nodes import settings_for_nodes
from raylight.trainer.cluster_fit.hardware import settings_for_hardware
from raylight.trainer.cluster_fit.memory_check import check_memory
from raylight.trainer.cluster_fit.policy_checks import idle_hardware, with_mismatch_limit, with_transport
from raylight.trainer.cluster_fit.reward_model_settings import with_reward_models
from raylight.trainer.cluster_fit.teacher_settings import with_teacher
from raylight.trainer.spec.served_adapter import with_adapter
from raylight.trainer.spec.settings import ResolvedSettings


def settings_for_cluster(
    settings: ResolvedSettings, requested: RunSettings
) -> tuple[ResolvedSettings, tuple[str, ...]]:
    """Return a run's settings with what depends on the connected cluster, and messages for the user.

    Args:
        requested: those of the Trainer, as the algorithm adjusts them.

    Raises:
        ConfigError: the run cannot work on this cluster.
    """
    if settings.training is not None and settings.training.learner.kind == "local":
        return finalize_settings(with_scoring_models(with_local_dtype(settings))), ()
    resources = ray.cluster_resources()
    settings, notes = with_cpu_fallback(settings, requested, resources.get("GPU", 0))
    settings, hardware_notes = settings_for_hardware(settings, requested.engine)
    settings = with_scoring_models(settings_for_nodes(settings, requested.engine))
    check_memory(settings)
    settings = finalize_settings(settings)
    training = settings.training
    if training is not None and settings.serving is not None and training.learner.kind == "ranks":
        scoring = settings.scoring_models
        notes += tuple(idle_hardware(settings.serving.engine, training.learner, resources, scoring))
    return settings, notes + hardware_notes


def with_scoring_models(settings: ResolvedSettings) -> ResolvedSettings:
    """Return the settings with those of the teacher and of the reward models for the cluster's hardware.

    Raises:
        ConfigError: the teacher does not take rows as long as the policy's.
    """
    return with_reward_models(with_teacher(settings))


def with_cpu_fallback(
    settings: ResolvedSettings, requested: RunSettings, gpus: float
) -> tuple[ResolvedSettings, tuple[str, ...]]:
    """Return the settings for a cluster without GPUs, if it has none, and messages for the user."""
    if settings.training is None or settings.serving is None:
        return settings, ()
    found = requested.for_hardware(gpus)
    if found is not requested:
        engine = found.engine.model_copy(update={"kind": settings.serving.engine.kind})
        settings = settings.with_engine(engine).with_training(learner=found.learner)
    return settings, found.notes


def with_local_dtype(settings: ResolvedSettings) -> ResolvedSettings:
    """Return the settings of a run with a local learner, with the data type for its device.

    Raises:
        ConfigError: torch has no such device.
    """
    assert settings.training is not None, "the run trains"
    assert settings.serving is not None, "the run serves a model"
    from raylight.learner.local_device import select_device

    learner, engine = settings.training.learner, settings.serving.engine
    on_gpu = select_device(learner.device).type == "cuda"
    if on_gpu and learner.lora is not None and "dtype" not in engine.model_fields_set:
        return settings.with_engine(engine.model_copy(update={"dtype": "bfloat16"}))
    return settings


def finalize_settings(settings: ResolvedSettings) -> ResolvedSettings:
    """Return the settings with those that depend on the settings for the hardware.

    Raises:
        ConfigError: the transport, the limit of mismatches or the adapter does not fit.
    """
    return with_adapter(with_mismatch_limit(with_transport(settings)))
