"""Rollouts that a run enqueues itself, and waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from raylight.aio import cancel_all
from raylight.errors import StoreLostError
from raylight.trainer.cluster_monitor import is_cluster_lost
from raylight.trainer.run import Run
from raylight.types import EnqueueRolloutRequest

CANCEL_TIMEOUT_S = 5.0
Progress = Callable[[int, int], None]
"""Receives the number of decided rollouts, and of all."""


async def run_rollouts(
    run: Run,
    requests: list[EnqueueRolloutRequest],
    progress: Progress,
    wait_for_failure: Callable[[], Awaitable[Any]] | None = None,
) -> list[str]:
    """Enqueue rollouts, and wait until all are decided by a model that was in reach; return their ids.

    Args:
        wait_for_failure: raises if the rollouts would wait forever.
    """
    outages = run.serving.outages
    ids = [rollout.rollout_id for rollout in await run.store.enqueue_many_rollouts(requests)]
    try:
        while True:
            await _until(_wait(run, ids, progress), wait_for_failure)
            confirmed = await run.serving.confirm()
            if confirmed == outages:
                return ids
            outages = confirmed
    except asyncio.CancelledError:
        if is_cluster_lost():
            raise
        with contextlib.suppress(TimeoutError, StoreLostError):  # the run ends in any case
            await asyncio.wait_for(run.store.cancel_rollouts(ids), CANCEL_TIMEOUT_S)
        raise


async def _wait(run: Run, ids: list[str], progress: Progress) -> None:
    done = 0
    while done < len(ids):
        at_least = min(done + max(len(ids) // 20, 1), len(ids))
        done = len(await run.store.wait_for_rollouts(rollout_ids=ids, at_least=at_least))
        progress(done, len(ids))


async def _until(work: Awaitable[None], wait_for_failure: Callable[[], Awaitable[Any]] | None) -> None:
    """Await work, unless it fails before it ends."""
    tasks = [asyncio.ensure_future(work)]
    if wait_for_failure is not None:
        tasks.append(asyncio.ensure_future(wait_for_failure()))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()
    finally:
        await cancel_all(tasks)
