"""Weights on their way from the learners to every engine replica.

Replicas subscribe and long-poll; the learners publish. `publish` returns only when every subscriber has acknowledged the
version, and a replica that starts later takes the current version before it serves. Arrays travel through Ray's object store:
shared memory on one node, a copy to each other node.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray.exceptions import RayActorError

from raylight.errors import EngineStartError, WeightSyncError

logger = logging.getLogger(__name__)

WEIGHTS_NAME = "weights"
POLL_TIMEOUT_S = 30.0


class WeightBoard:
    """Who has which version. Versions are immutable and increase; 0 is the model as it was loaded."""

    def __init__(self) -> None:
        self._version = 0
        self._box: list[Any] | None = None
        self._acknowledged: dict[str, int] = {}
        self._failures: dict[str, str] = {}
        self._broken: str | None = None
        self._handles: dict[str, Any] = {}
        self._changed = asyncio.Condition()

    async def subscribe(self, replica: str, handle: Any = None) -> tuple[int, list[Any] | None]:
        """Join; returns the current version and, if it is not 0, the box with its weights.

        Args:
            handle: the replica's actor, by which it is noticed that it died.
        """
        async with self._changed:
            self._acknowledged[replica] = self._version
            self._handles[replica] = handle
            self._changed.notify_all()
        return self._version, self._box

    async def cannot_start(self, why: str) -> None:
        """A replica failed before it could subscribe."""
        async with self._changed:
            self._broken = why
            self._changed.notify_all()

    async def wait_for_subscribers(self, count: int) -> None:
        """Wait until so many replicas are up.

        Raises:
            EngineStartError: one of them cannot start.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._broken or len(self._acknowledged) >= count)
            if self._broken:
                raise EngineStartError(f"an engine replica failed to start: {self._broken}")

    async def next(self, replica: str, have: int, timeout: float) -> tuple[int, list[Any]] | None:
        """The version after `have`, as soon as there is one; None after `timeout` seconds."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._version > have), timeout)
            except TimeoutError:
                return None
            assert self._box is not None
            return self._version, self._box

    async def acknowledge(self, replica: str, version: int, failure: str | None) -> None:
        """A replica has loaded a version, or failed to."""
        async with self._changed:
            if version < self._version:
                return  # it tells of an older version, whose publisher has given up
            self._acknowledged[replica] = version
            if failure:
                self._failures[replica] = failure
            self._changed.notify_all()

    async def publish(self, version: int, box: list[Any], timeout: float) -> int:
        """Give a version to all subscribers; returns how many took it, once all have.

        Raises:
            WeightSyncError: the version is not new, nobody subscribes, a replica failed, or time ran out.
        """
        async with self._changed:
            if version <= self._version:
                raise WeightSyncError(f"version {version} is not newer than {self._version}; versions are never reused")
            if not self._acknowledged:
                raise WeightSyncError("no engine replica has subscribed to weights; is the serving deployment up?")
            self._version, self._box = version, box
            self._failures.clear()
            self._changed.notify_all()
        dropping = asyncio.create_task(self._drop_the_dead())  # beside the waiting, which has the deadline
        try:
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait_for(self._settled), timeout)
                except TimeoutError:
                    late = sorted(r for r, v in self._acknowledged.items() if v < version) or ["a replica in place of the dead"]
                    raise WeightSyncError(f"version {version} did not reach {', '.join(late)} within {timeout:g} s") from None
                if self._failures:
                    raise WeightSyncError("; ".join(f"{r}: {why}" for r, why in self._failures.items()))
                return len(self._acknowledged)
        finally:
            dropping.cancel()

    async def _drop_the_dead(self) -> None:
        """Wait no longer for replicas whose actor died; Serve starts others, which subscribe anew."""
        asked = {name: handle.__ray_ready__.remote() for name, handle in self._handles.items() if handle is not None}
        answers = await asyncio.gather(*asked.values(), return_exceptions=True)
        async with self._changed:
            for name, answer in zip(asked, answers, strict=True):
                if isinstance(answer, RayActorError):
                    logger.warning("engine replica %s died: %s", name, str(answer).splitlines()[0])
                    del self._acknowledged[name], self._handles[name]
            self._changed.notify_all()

    def _settled(self) -> bool:
        if self._failures:
            return True
        return bool(self._acknowledged) and all(v >= self._version for v in self._acknowledged.values())


class WeightsActor(WeightBoard):
    """The board as a Ray actor."""


def start_weights(namespace: str) -> Any:
    """Start the run's weight board and return its actor handle."""
    return ray.remote(WeightsActor).options(name=WEIGHTS_NAME, namespace=namespace, num_cpus=0, max_concurrency=1000).remote()
