"""The learner group as the driver sees it: ranks in a placement group, called together."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylight.config import LearnerConfig
from raylight.errors import LearnerError, RaylightError
from raylight.learner.actor import LearnerActor
from raylight.learner.batch import TrainBatch
from raylight.learner.settings import PolicySettings

logger = logging.getLogger(__name__)


def bundles(config: LearnerConfig) -> list[dict[str, float]]:
    """What each rank asks of the cluster, for a placement group."""
    one = {"CPU": config.num_cpus, "GPU": config.num_gpus}
    return [{name: amount for name, amount in one.items() if amount} for _ in range(config.n)]


class LearnerGroup:
    """Starts, calls and stops the ranks.

    Args:
        placement: a placed group with one bundle per rank.
    """

    def __init__(self, namespace: str, config: LearnerConfig, placement: PlacementGroup) -> None:
        self._config = config
        cls = ray.remote(LearnerActor)
        self._actors: list[Any] = [
            cls.options(
                name=f"learner-{rank}",
                namespace=namespace,
                num_cpus=config.num_cpus,
                num_gpus=config.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank),
            ).remote(rank, config.n, config)
            for rank in range(config.n)
        ]

    async def setup(self, model_path: str, settings: PolicySettings, total_steps: int, seed: int) -> None:
        """Bring all ranks up in parallel.

        Raises:
            LearnerError: they were not up within `start_timeout_s`, or one died.
        """
        limit = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                address = await self._one(self._actors[0].open_rendezvous.remote())
                await self._all("setup", address, model_path, settings, total_steps, seed)
        except TimeoutError:
            raise LearnerError(f"{self._config.n} learners were not up within {limit:g} s (start_timeout_s)") from None

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """One update of the policy; returns metrics."""
        return (await self._all("update", ray.put(batch)))[0]

    async def logprobs(self, ids: list[int]) -> list[float]:
        """The policy's log-probs at temperature 1 of `ids[1:]`, to be compared with the engines'."""
        return (await self._all("logprobs", ids))[0]

    async def export(self) -> tuple[int, list[Any]]:
        """The current version and a box with the object reference of its weights."""
        return (await self._all("export"))[0]

    async def save(self, folder: str) -> None:
        """Write the model in Hugging Face format to a folder that the ranks can reach."""
        await self._all("save", folder)

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank. The first failure ends the call: the other ranks may wait for the failed one forever."""
        return await asyncio.gather(*(self._one(getattr(actor, method).remote(*args)) for actor in self._actors))

    async def _one(self, ref: Any) -> Any:
        try:
            return await ref
        except RayActorError as error:
            raise LearnerError(f"a learner died: {str(error).splitlines()[0]}. See its log with `ray logs actor`") from error
        except RayTaskError as error:
            if isinstance(error.cause, RaylightError):
                raise error.cause from None
            logger.error("%s", error)
            raise LearnerError(f"a learner failed: {error.cause!r}; the whole traceback is in the driver's log") from error
