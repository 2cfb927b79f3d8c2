"""Publication of the learners' weights to the engines, and to replicas that join later."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import NoReturn

from raylight.aio import cancel_all
from raylight.config import EngineConfig
from raylight.errors import LearnerError, LearnerLostError, WeightSyncError
from raylight.learner.group import LearnerGroup
from raylight.trainer.served_adapter import export_adapter
from raylight.weight_sync.actor import RunningCoordinator
from raylight.weight_sync.sender_client import PublicationSettings

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 15.0
"""Time in which the learners must end their part of a publication that failed."""


class Publications:
    """Publishes versions, one at a time, while the learners do nothing else.

    Args:
        timeout_s: time that a version may take to reach all replicas.
    """

    def __init__(
        self, learners: LearnerGroup, running: RunningCoordinator, engine: EngineConfig, timeout_s: float
    ) -> None:
        self._learners, self._keeper = learners, running.keeper
        self._replicas, self._engine = running.client, engine
        self._settings = PublicationSettings(
            transport=engine.weight_transfer,
            dtype=engine.dtype,
            names="checkpoint" if engine.kind == "vllm" else "module",
            timeout_s=timeout_s,
            replacement_timeout_s=engine.start_timeout_s,
            coordinator=running.handle,
        )
        self.published = 0
        """Last version that was published."""
        self.learners_busy = asyncio.Lock()
        """Held while the learners' weights change, or must not."""
        self._failure: LearnerError | None = None
        """Failure of the learners that was found when a replica had joined."""

    async def publish(self, version: int, adapter: str | None = None) -> None:
        """Send the learners' weights to all replicas. `learners_busy` must be held.

        Args:
            adapter: name under which the learners' adapter is served; None sends all weights.

        Raises:
            WeightSyncError: the weights did not reach enough replicas in time.
            LearnerLostError: the learners were lost meanwhile.
        """
        if adapter is None:
            await self._send(version)
        else:
            await self._publish_adapter(version, adapter)
        self.published = version

    async def _publish_adapter(self, version: int, adapter: str) -> None:
        timeout = self._settings.timeout_s
        try:
            async with asyncio.timeout(timeout):
                exported, payload_refs = await export_adapter(self._learners)
        except TimeoutError:
            raise WeightSyncError(
                f"the learners did not export their adapter within {timeout:g} s; raise sync_timeout_s"
            ) from None
        mode = self._engine.update_mode
        await self._replicas.publish(exported, payload_refs, timeout, mode, adapter)

    async def _send(self, version: int) -> None:
        """Publish a version of the weights, and have the learners send it."""
        token, settings = uuid.uuid4().hex, self._settings
        publishing = asyncio.ensure_future(
            self._replicas.publish(version, None, settings.timeout_s, self._engine.update_mode, token=token)
        )
        sending = asyncio.ensure_future(self._learners.publish_weights(version, token, settings))
        try:
            await asyncio.wait([publishing, sending], return_when=asyncio.FIRST_EXCEPTION)
            if sending.done() and (failure := sending.exception()) is not None:
                if not publishing.done():
                    await self._replicas.fail_publication(token, str(failure))
                await asyncio.wait([publishing])
            elif not sending.done():
                await self._await_end(sending, publishing.exception())
            if publishing.done() and publishing.exception() is None:
                self.published = version
            if sending.exception() is not None and not isinstance(sending.exception(), WeightSyncError):
                sending.result()
            publishing.result()
        finally:
            await cancel_all([publishing, sending])

    async def _await_end(self, sending: asyncio.Future[None], failure: BaseException | None) -> None:
        """Wait until the learners have noticed that a publication failed.

        Raises:
            LearnerLostError: they hang.
        """
        await asyncio.wait([sending], timeout=END_TIMEOUT_S)
        if not sending.done():
            raise LearnerLostError(
                f"the learners did not end their part of a failed publication within {END_TIMEOUT_S:g} s: "
                f"{failure}"
            )

    def notice_version(self) -> None:
        """Notice that the learners work, and may hold a version that joined replicas lack."""
        self._failure = None
        self._keeper.changed.notify_all()

    async def wait_for_failure(self) -> NoReturn:
        """Wait until a replica that joined cannot be served, because the learners have failed.

        If no other replica serves, nothing else calls the learners.

        Raises:
            LearnerError: the failure.
        """
        await self._keeper.changed.wait_for(lambda: self._failure is not None)
        assert self._failure is not None
        raise self._failure

    async def serve_joined(self, held: Callable[[], int]) -> None:
        """Send the current version to replicas that join, whenever the learners hold it.

        While they hold another one, the replicas wait for the next publication, or for the learners' return
        to the current one.

        Args:
            held: returns the version that the learners hold.
        """
        unreachable: frozenset[str] = frozenset()

        def is_due() -> bool:
            joined = bool(self._keeper.lacking - unreachable)
            return joined and self._failure is None and 0 < held() == self.published

        while True:
            await self._keeper.changed.wait_for(is_due)
            async with self.learners_busy:
                if not is_due():
                    continue
                joined = self._keeper.lacking
                try:
                    await self._learners.publish_weights(self.published, "", self._settings)
                except LearnerError as error:
                    self._failure = error
                    self._keeper.changed.notify_all()
                    continue
                except WeightSyncError as error:  # the next publication includes them
                    logger.warning("replicas that joined did not receive the weights: %s", error)
                    unreachable |= joined
