"""Settings of a run that follow from the connected cluster."""

from __future__ import annotations

import ray

from raylight.algorithms.policy import RunSettings
from raylight.trainer.engine_nodes import settings_for_nodes
from raylight.trainer.hardware import settings_for_hardware
from raylight.trainer.memory_check import check_memory
from raylight.trainer.policy_checks import idle_hardware, with_mismatch_limit, with_transport
from raylight.trainer.served_adapter import with_adapter
from raylight.trainer.settings import ResolvedSettings


def settings_for_cluster(
    settings: ResolvedSettings, requested: RunSettings
) -> tuple[ResolvedSettings, tuple[str, ...]]:
    """Return a run's settings with what depends on the connected cluster, and messages for the user.

    Args:
        requested: those of the Trainer, as the algorithm adjusts them.

    Raises:
        ConfigError: the run cannot work on this cluster.
    """
    resources = ray.cluster_resources()
    settings, notes = with_cpu_fallback(settings, requested, resources.get("GPU", 0))
    settings, hardware_notes = settings_for_hardware(settings, requested.engine)
    settings = settings_for_nodes(settings, requested.engine)
    check_memory(settings)
    settings = finalize_settings(settings)
    if settings.training is not None and settings.serving is not None:
        notes += tuple(idle_hardware(settings.serving.engine, settings.training.learner, resources))
    return settings, notes + hardware_notes


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


def finalize_settings(settings: ResolvedSettings) -> ResolvedSettings:
    """Return the settings with those that depend on the settings for the hardware.

    Raises:
        ConfigError: the transport, the limit of mismatches or the adapter does not fit.
    """
    return with_adapter(with_mismatch_limit(with_transport(settings)))
