"""`RunStore`: starts the actor of a run's store, or connects to a given one, and restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, get_args

import ray
from ray.exceptions import RayActorError, RayTaskError

from raylight.config import StoreConfig
from raylight.errors import ConfigError, summarize_ray_error
from raylight.store.actor import StoreWatch, start_store
from raylight.store.client import StoreClient
from raylight.store.service import image_folder
from raylight.store.tables.journal import Journal
from raylight.trainer.spec.resume import ResumePoint, wait_for_store
from raylight.trainer.spec.settings import RolloutSettings
from raylight.types import FINISHED, RolloutStatus

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class RunStore:
    """The run's own StoreActor, or a store that the user passed in.

    Args:
        reopens: True if the file in the run directory is the store of the run that is resumed.
        show_stage: shows what the run is doing now.
    """

    def __init__(self, settings: RolloutSettings, reopens: bool, show_stage: Callable[[str], None]) -> None:
        self._settings, self._reopens, self._show_stage = settings, reopens, show_stage

    async def open(self, stack: contextlib.AsyncExitStack) -> StoreClient:
        """Start the run's own store, or use the one that the user passed in. A reopened
        one expires nothing before `continue_time`.

        Raises:
            ConfigError: the store's path belongs to an existing file.
        """
        config, path = self._settings.store, self._settings.store_path
        if isinstance(config, StoreClient):
            self.client = config
            self._watch = StoreWatch(config.lease_s, None, logger.warning)
            return config
        if self._reopens:
            await wait_for_store(Path(path))
            self._show_stage("reopening the store")
        self._start(config, path, stack)
        if self._reopens:
            await self.client.stop_time()
        return self.client

    def _start(self, config: StoreConfig, path: str, stack: contextlib.AsyncExitStack) -> None:
        if not self._reopens and config.path is None:
            Journal.discard(Path(path))  # left by an earlier run in this directory
            image_folder(Path(path)).clear()
        elif not self._reopens and os.path.exists(path):
            raise ConfigError(f"store.path {path} already exists; choose another path, or remove the file")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        actor = start_store(self._settings.name, path, config)
        stack.push_async_callback(_close, actor)
        self.client = StoreClient(actor)
        restart = functools.partial(ray.kill, actor, no_restart=False)
        self._watch = StoreWatch(self.client.lease_s, restart, logger.warning)

    def watches(self) -> list[Coroutine[object, object, object]]:
        """Return a coroutine that restarts the run's own store while it does not respond, and fails if the
        user's does not."""
        return [self._watch.run()]

    async def counts(self) -> dict[str, int]:
        """Return the counters of the store that are not 0."""
        statistics = await self.client.statistics()
        return {key: n for key, n in statistics.items() if n and key not in ("name", "uptime")}


async def _close(actor: Any) -> None:
    """Close the store's file, so that the next process can open it, and kill the actor."""
    try:
        await asyncio.wait_for(actor.close.remote(), CLOSE_TIMEOUT_S)
    except (TimeoutError, RayActorError, RayTaskError) as error:
        logger.warning("the store actor did not close its file: %s", summarize_ray_error(error))
    finally:
        ray.kill(actor)


async def cancel_undecided(store: StoreClient, start: ResumePoint, keeps: bool = False) -> None:
    """Cancel the rollouts that an earlier process of the run left undecided, before a runner can take them:
    the engines may not have the weights for them.

    Args:
        keeps: keep the rollouts of the lineage that goes on: agents outside the run may execute them.
    """
    undecided = [status for status in get_args(RolloutStatus) if status not in FINISHED]
    for lineage in filter(None, (None if keeps else start.lineage, start.parent_lineage)):
        left = await store.query_rollouts(rollout_id_contains=lineage, status_in=undecided)
        await store.cancel_rollouts([rollout.rollout_id for rollout in left])
