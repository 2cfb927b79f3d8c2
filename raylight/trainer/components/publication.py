"""Publication of the learners' weights to the engines, and to replicas that join later."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ray

from raylight._utils.aio import cancel_all, task_group
from raylight.config import EngineConfig
from raylight.errors import EngineStartError, LearnerError, LearnerLostError, WeightSyncError
from raylight.learner.protocol import Learner
from raylight.trainer.components.parity import Parity, ParityMonitor
from raylight.weights.client import CoordinatorClient
from raylight.weights.sender import PublicationSettings

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 15.0
"""Time in which the learners must end their part of a publication that failed."""


@dataclass(frozen=True)
class PinnedAdapter:
    """A version of the learners' adapter that the engines serve under a name of its own until its release.

    Attributes:
        payload_refs: list with the object reference of the adapter.
    """

    name: str
    version: int
    payload_refs: list[Any]


class Publications:
    """Publishes versions, one at a time.

    The learners' weights do not change while they are read. They are read until all replicas have them, or
    beside updates until the learners have a snapshot, which is sent.

    Args:
        timeout_s: time that a version may take to reach all replicas.
        adapter: name under which the learners' adapter is served; None publishes all weights.
        probe: token ids whose log-probs are compared; empty if the learners have no weights of their own.
        tolerance: limit of the mean difference of log-probs.
        beside_updates: updates may begin while weights are sent.
    """

    def __init__(
        self,
        learners: Learner,
        replicas: CoordinatorClient,
        engine: EngineConfig,
        timeout_s: float,
        *,
        adapter: str | None = None,
        probe: Sequence[int],
        tolerance: float,
        beside_updates: bool = False,
    ) -> None:
        self._learners, self._replicas, self._engine = learners, replicas, engine
        self._adapter, self._probe, self._parity = adapter, list(probe), ParityMonitor(tolerance)
        self._settings = PublicationSettings(
            transport=engine.weight_transfer,
            dtype=engine.dtype,
            names="checkpoint" if engine.kind == "vllm" else "module",
            timeout_s=timeout_s,
            replacement_timeout_s=engine.start_timeout_s,
            coordinator=replicas.handle,
            beside_updates=beside_updates,
        )
        self.published = 0
        """Last version that was published."""
        self.learners_busy = asyncio.Lock()
        """Held while the learners' weights change, or must not."""
        self._sending = asyncio.Lock()
        """Held while the learners send weights. It is acquired after `learners_busy`, if both are."""
        self._snapshot = 0
        """Version of the learners' snapshot; 0 if they have none."""
        self._payload_refs: list[Any] = []
        """Reference to the published version of the adapter."""
        self._failure: LearnerError | None = None
        """Failure of the learners that was found when a replica had joined."""

    async def publish(self, version: int) -> Parity | None:
        """Send the learners' weights to all replicas, unless these have them; return how well both agree.

        Agents sample from this version from then on. An update that begins after this call waits for the
        weights to be read.

        Args:
            version: the version that the learners hold. After a restart, it may have been published before.

        Returns:
            None if the replicas have a later version.

        Raises:
            WeightSyncError: the weights did not reach enough replicas in time.
            MismatchError: a replica's log-probs differ from the learners'.
            LearnerLostError: the learners were lost meanwhile.
        """
        if version < self.published:
            return None
        async with contextlib.AsyncExitStack() as learners:
            await learners.enter_async_context(self.learners_busy)
            async with self._sending:
                adapter, logprobs = await self._read(version)
                if self._settings.beside_updates:
                    await learners.aclose()
                probed: dict[str, list[float]] = {}
                if version > self.published:
                    probed, logprobs = await self._send(version, adapter, logprobs)
                self._payload_refs = adapter or []
            self._replicas.changed.notify_all()
            return await self.check_parity(version, self._settings.timeout_s, probed, logprobs)

    async def check_parity(
        self,
        version: int,
        timeout: float,
        probed: Mapping[str, Sequence[float]] | None = None,
        logprobs: Sequence[float] | None = None,
    ) -> Parity:
        """Compare the log-probs of all replicas and the learners on the probe.

        Args:
            timeout: seconds that the replicas have.
            probed: log-probs by replica; empty or None if the replicas are to be asked.
            logprobs: those of the learners; None if they still hold the version.

        Returns:
            A parity of no tokens if there is no probe.

        Raises:
            MismatchError: a replica's differ from the learners'.
        """
        if not self._probe:
            return Parity(0.0, 0.0, 0)
        async with task_group() as tasks:
            if not logprobs:
                own = tasks.create_task(self._learners.logprobs(self._probe))
            found = probed or await self._replicas.probe(self._probe, timeout, self._adapter)
        return self._parity.check(version, found, logprobs or own.result())

    async def _read(self, version: int) -> tuple[list[Any] | None, list[float] | None]:
        """Read what is sent later: the adapter, or a snapshot. Return a reference to the adapter, and the
        learners' log-probs of the probe if an update may begin before the comparison."""
        beside, timeout = self._settings.beside_updates, self._settings.timeout_s
        if self._adapter is None:
            if not beside:
                return None, None
            self._snapshot = 0
            logprobs = await self._learners.take_snapshot(self._probe, self._settings)
            self._snapshot = version
            return None, logprobs
        try:
            async with asyncio.timeout(timeout):
                payload_refs = await self._export_adapter()
        except TimeoutError:
            raise WeightSyncError(
                f"the learners did not export their adapter within {timeout:g} s; raise sync_timeout_s"
            ) from None
        return payload_refs, await self._learners.logprobs(self._probe) if beside else None

    async def _send(
        self, version: int, adapter: list[Any] | None, logprobs: list[float] | None
    ) -> tuple[dict[str, list[float]], list[float] | None]:
        """Have all replicas load a version; return the log-probs of the probe, by replica and of the
        learners.

        Args:
            logprobs: those of the learners; None if they still hold the version. They then compute them while
                the replicas prepare.
        """
        async with task_group() as tasks:
            own = None
            if self._probe and not logprobs:
                own = tasks.create_task(self._learners.logprobs(self._probe))
            if self._adapter is None:
                found = await self._send_weights(version)
            else:
                timeout, mode = self._settings.timeout_s, self._engine.update_mode
                found = await self._replicas.publish(
                    version, adapter, timeout, mode, self._adapter, probe=self._probe
                )
                self.published = version
        probed = {replica: values for replica, values in found.items() if values is not None}
        return probed, own.result() if own else logprobs

    async def _export_adapter(self) -> list[Any]:
        """Return a list with the object reference of the adapter, which this process owns, so that it
        outlives the learners."""
        _, adapter = await self._learners.export_adapter()
        return [ray.put(adapter)]

    async def publish_initial(self, version: int, timeout: float) -> None:
        """Serve the model with the new adapter, which does not change it, so that an engine that cannot serve
        it fails at the start.

        Raises:
            EngineStartError: no engine can serve it.
        """
        payload_refs = await self._export_adapter()
        try:
            await self._replicas.publish(version, payload_refs, timeout, adapter=self._adapter)
        except WeightSyncError as error:
            raise EngineStartError(
                f"the engine cannot serve the learners' adapter: {error}. Adapt other layers "
                "(lora.target_modules, lora.exclude_modules), or set learner.lora.serve='merged': it then "
                "receives the whole model after every update"
            ) from error

    async def pin(self, step: int) -> PinnedAdapter:
        """Have all replicas serve the published version of the adapter under another name too, until
        `release`.

        Raises:
            WeightSyncError: not enough replicas served it in time.
        """
        pinned = PinnedAdapter(f"{self._adapter}@step-{step}", self.published, self._payload_refs)
        timeout = self._settings.timeout_s
        await self._replicas.pin(pinned.name, pinned.version, pinned.payload_refs, timeout)
        return pinned

    async def release(self, pinned: PinnedAdapter) -> None:
        """Have the replicas drop a pinned version.

        Raises:
            WeightSyncError: no replica did so in time.
        """
        await self._replicas.release(pinned.name, self._settings.timeout_s)

    async def _send_weights(self, version: int) -> dict[str, list[float] | None]:
        """Publish a version of the weights, and have the learners send it. Return the replicas' log-probs of
        the probe."""
        token, settings, mode = uuid.uuid4().hex, self._settings, self._engine.update_mode
        publishing = asyncio.ensure_future(
            self._replicas.publish(version, None, settings.timeout_s, mode, token=token, probe=self._probe)
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
            return publishing.result()
        finally:
            if not publishing.done():  # cancelled; the replicas must not wait for a sender
                with contextlib.suppress(WeightSyncError):  # no coordinator, no replicas
                    await self._replicas.fail_publication(token, "the publication was cancelled")
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
        """Notice that restarted learners work. They have no snapshot, but may hold a version that joined
        replicas lack."""
        self._failure, self._snapshot = None, 0
        self._replicas.changed.notify_all()

    async def wait_for_failure(self) -> NoReturn:
        """Wait until a replica that joined cannot be served, because the learners have failed.

        If no other replica serves, nothing else calls the learners.

        Raises:
            LearnerError: the failure.
        """
        await self._replicas.changed.wait_for(lambda: self._failure is not None)
        assert self._failure is not None
        raise self._failure

    async def serve_joined(self, held: Callable[[], int]) -> None:
        """Send the published version to replicas that join, whenever the learners or their snapshot have it.

        While these have another one, the replicas wait for the next publication, or for the return of
        restarted learners to the published version.

        Args:
            held: returns the version that the learners hold.
        """
        unreachable: frozenset[str] = frozenset()
        beside = self._settings.beside_updates

        def is_due() -> bool:
            joined = bool(self._replicas.lacking - unreachable)
            sendable = self._snapshot if beside else held()
            return joined and self._failure is None and 0 < sendable == self.published

        while True:
            await self._replicas.changed.wait_for(is_due)
            async with contextlib.nullcontext() if beside else self.learners_busy, self._sending:
                if not is_due():
                    continue
                joined = self._replicas.lacking
                try:
                    await self._learners.publish_weights(self.published, "", self._settings)
                except LearnerError as error:
                    self._failure = error
                    self._replicas.changed.notify_all()
                    continue
                except WeightSyncError as error:  # the next publication includes them
                    logger.warning("replicas that joined did not receive the weights: %s", error)
                    unreachable |= joined
