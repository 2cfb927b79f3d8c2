"""The learners' LoRA adapter, served by the engines under the name of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from raylight.errors import EngineStartError, WeightSyncError
from raylight.learner.protocol import Learner
from raylight.trainer.settings import MODEL_NAME, ResolvedSettings
from raylight.weights.client import CoordinatorClient


@dataclass(frozen=True)
class PinnedAdapter:
    """A version of the learners' adapter that the engines serve under a name of its own until its release.

    Attributes:
        payload_refs: list with the object reference of the adapter.
    """

    name: str
    version: int
    payload_refs: list[Any]


def with_adapter(settings: ResolvedSettings) -> ResolvedSettings:
    """Return a run's settings with an engine that has room for two versions of the learners' adapter, and for
    one that is pinned beside updates.

    vLLM is told the adapted layers: on a CPU it cannot compute the log-probs of prompts beside other requests
    if the output layer may be adapted too.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    serving, training = settings.serving, settings.training
    if serving is None or training is None or not training.serves_adapter:
        return settings
    lora, engine = training.learner.lora, serving.engine
    assert lora is not None, "the engines serve an adapter"
    names = 2 if training.algorithm.max_staleness > 0 else 1
    update: dict[str, Any] = {"max_adapters": max(engine.max_adapters, names)}
    if engine.kind == "vllm":
        from raylight.learner.adapter import adapted_layers

        layers = adapted_layers(serving.model_path, lora)
        update["args"] = {"max_lora_rank": lora.rank, "lora_target_modules": layers} | engine.args
    return settings.with_engine(engine.model_copy(update=update))


async def export_adapter(learners: Learner) -> tuple[int, list[Any]]:
    """Return the current version and a list with the object reference of the adapter.

    This process owns the object, so that it outlives the learners.
    """
    version, adapter = await learners.export_adapter()
    return version, [ray.put(adapter)]


async def publish_initial(learners: Learner, replicas: CoordinatorClient, timeout: float) -> None:
    """Serve the model with the new adapter, which does not change it, so that an engine that cannot serve it
    fails at the start.

    Raises:
        EngineStartError: no engine can serve it.
    """
    version, payload_refs = await export_adapter(learners)
    try:
        await replicas.publish(version, payload_refs, timeout, adapter=MODEL_NAME)
    except WeightSyncError as error:
        raise EngineStartError(
            f"the engine cannot serve the learners' adapter: {error}. Adapt other layers "
            "(lora.target_modules, lora.exclude_modules), or set learner.lora.serve='merged': it then "
            "receives the whole model after every update"
        ) from error
