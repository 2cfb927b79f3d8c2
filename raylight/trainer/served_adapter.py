"""The learners' LoRA adapter, served by the engines under the name of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray

from raylight.errors import EngineStartError, WeightSyncError
from raylight.learner.group import LearnerGroup
from raylight.trainer.plan import MODEL_NAME, PolicyPlan
from raylight.weight_sync.client import CoordinatorClient


def with_adapter(plan: PolicyPlan) -> PolicyPlan:
    """Return the plan with an engine that has room for two versions of the learners' adapter.

    vLLM is told the adapted layers: on a CPU it cannot compute the log-probs of prompts beside other requests
    if the output layer may be adapted too.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    lora, engine = plan.learner.lora, plan.engine
    if lora is None or not plan.serves_adapter:
        return plan
    update: dict[str, Any] = {"max_adapters": max(engine.max_adapters, 1)}
    if engine.kind == "vllm":
        from raylight.learner.adapter import adapted_layers

        layers = adapted_layers(plan.model_path, lora)
        update["args"] = {"max_lora_rank": lora.rank, "lora_target_modules": layers} | engine.args
    return replace(plan, engine=engine.model_copy(update=update))


async def export_adapter(learners: LearnerGroup) -> tuple[int, list[Any]]:
    """Return the current version and a list with the object reference of the adapter.

    This process owns the object, so that it outlives the learners.
    """
    version, adapter = await learners.export_adapter()
    return version, [ray.put(adapter)]


async def publish_initial(learners: LearnerGroup, replicas: CoordinatorClient, timeout: float) -> None:
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
