"""The learners' LoRA adapter, served by the engines under the name of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from raylight.errors import EngineStartError, WeightSyncError
from raylight.learner.protocol import Learner
from raylight.trainer.spec.settings import MODEL_NAME
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
