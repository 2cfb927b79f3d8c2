"""Enqueueing of rollouts by the driver, and waiting until they are decided."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from raylight.errors import InvalidTransitionError, StoreError
from raylight.store.client import StoreClient
from raylight.trainer.components.run_components import RolloutComponents
from raylight.trainer.ray_session.cluster_monitor import is_cluster_lost
from raylight.types import FINISHED, EnqueueRolloutRequest, FinishedRollout

CANCEL_TIMEOUT_S = 5.0
Progress = Callable[[int, int], None]
"""Receives the number of decided rollouts, and of all."""


async def run_rollouts(
    run: RolloutComponents, requests: list[EnqueueRolloutRequest], progress: Progress
) -> list[str]:
    """Enqueue rollouts, and wait until all are decided by a model that was in reach; return their ids."""
    ids = [rollout.rollout_id for rollout in await run.store.enqueue_many_rollouts(requests)]
    await wait_for_sound(run, ids, progress)
    return ids


async def wait_for_sound(run: RolloutComponents, ids: Sequence[str], progress: Progress) -> None:
    """Wait until rollouts that were just enqueued are decided by a model that was in reach.

    An outage returns rollouts to the queue that were decided while it was not yet known.
    """
    outages = run.endpoints.outages
    try:
        while True:
            await wait_for_rollouts(run, ids, progress)
            confirmed = await run.endpoints.confirm()
            if confirmed == outages:
                return
            outages = confirmed
    except asyncio.CancelledError:
        await cancel_rollouts(run.store, ids)
        raise


async def wait_for_rollouts(run: RolloutComponents, ids: Sequence[str], progress: Progress) -> None:
    """Wait until rollouts are decided."""
    done = 0
    while done < len(ids):
        at_least = min(done + max(len(ids) // 20, 1), len(ids))
        done = len(await run.store.wait_until_decided(rollout_ids=ids, at_least=at_least))
        progress(done, len(ids))


async def end_unresponsive(store: StoreClient, rollouts: list[FinishedRollout]) -> bool:
    """End attempts that failed their rollouts because they did not respond. Return True if there are none,
    and all rollouts are decided.

    Such an attempt could respond again, and revive its rollout. The end of one that has just done so may
    return the rollout to the queue.
    """
    is_final = all(item.rollout.status in FINISHED for item in rollouts)
    for rollout in (item.rollout for item in rollouts):
        attempt = rollout.attempt
        if rollout.status == "failed" and attempt is not None and attempt.status == "unresponsive":
            is_final = False
            with contextlib.suppress(InvalidTransitionError):  # it has ended meanwhile
                await store.update_attempt(
                    rollout.rollout_id, attempt.attempt_id, status="failed", failure=attempt.failure
                )
    return is_final


async def cancel_rollouts(store: StoreClient, ids: Sequence[str]) -> None:
    """Cancel rollouts that nothing waits for any more, so that no runner goes on with them."""
    if ids and not is_cluster_lost():
        with contextlib.suppress(TimeoutError, StoreError):  # the run ends in any case
            await asyncio.wait_for(store.cancel_rollouts(list(ids)), CANCEL_TIMEOUT_S)
