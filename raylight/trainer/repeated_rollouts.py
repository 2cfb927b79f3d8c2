"""Rollouts of a resumed run that run again when their step is replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from raylight.store.client import StoreClient
from raylight.trainer.resume import ResumePoint
from raylight.types import FINISHED, EnqueueRolloutRequest, RolloutStatus


class RepeatedRollouts:
    """The rollouts that were left undecided, and those that the infrastructure failed in a step that was not
    completed.

    Args:
        start: the position at which the run starts.
    """

    def __init__(self, start: ResumePoint, show_stage: Callable[[str], None]) -> None:
        self._start, self._show_stage = start, show_stage
        self._ids: set[str] = set()

    async def find(self, store: StoreClient) -> None:
        """Find the rollouts in the store of the resumed run.

        Those without a decision are cancelled: the engines do not have the model for them until the steps
        since the training state are replayed.
        """
        undecided = [status for status in get_args(RolloutStatus) if status not in FINISHED]
        for lineage in self._lineages:
            left = await store.query_rollouts(rollout_id_contains=lineage, status_in=undecided)
            await store.cancel_rollouts([rollout.rollout_id for rollout in left])
        await self.find_cancelled(store)
        await self._find_lost(store)

    async def find_cancelled(self, store: StoreClient) -> None:
        """Find the rollouts that were cancelled."""
        for lineage in self._lineages:
            cancelled = await store.query_rollouts(rollout_id_contains=lineage, status_in=["cancelled"])
            self._ids |= {rollout.rollout_id for rollout in cancelled}

    async def _find_lost(self, store: StoreClient) -> None:
        """Find the rollouts that the infrastructure failed in the phase in which the resumed run ended.

        A phase is the training or an evaluation of a step. Each begins after the one before it, so the last
        one in the store is the only one that may not be completed. Completed phases are replayed as they
        were.
        """
        lineage = self._start.lineage
        last = await store.query_rollouts(
            rollout_id_contains=f"{lineage}-", sort_by="start_time", sort_order="desc", limit=1
        )
        if not last:
            return
        mode, step = last[0].rollout_id.removeprefix(f"{lineage}-").split("-")[:2]
        if 0 < int(step) <= self._start.completed_step:  # step 0 is reported again in any case
            return
        failed = await store.query_rollouts(
            rollout_id_contains=f"{lineage}-{mode}-{step}-", status_in=["failed"]
        )
        lost = {
            rollout.rollout_id
            for rollout in failed
            if rollout.attempt
            and rollout.attempt.failure
            and rollout.attempt.failure.kind == "infrastructure"
        }
        if lost:
            self._show_stage(f"{len(lost)} rollouts of step {step} that the infrastructure failed run again")
            self._ids |= lost

    def includes_any(self, ids: list[str]) -> bool:
        """Return True if one of the rollouts runs again."""
        return not self._ids.isdisjoint(ids)

    async def requeue(self, store: StoreClient, requests: list[EnqueueRolloutRequest]) -> None:
        """Requeue those of the requested rollouts that run again, with the requested or the latest
        resources."""
        for request in requests:
            if request.rollout_id in self._ids:
                resources_id = request.resources_id or await _latest_resources_id(store)
                await store.update_rollout(request.rollout_id, status="requeuing", resources_id=resources_id)
                self._ids.discard(request.rollout_id)

    @property
    def _lineages(self) -> list[str]:
        return [lineage for lineage in (self._start.lineage, self._start.parent_lineage) if lineage]


async def _latest_resources_id(store: StoreClient) -> str:
    latest = await store.get_latest_resources()
    assert latest is not None, "the resources were published"
    return latest.resources_id
