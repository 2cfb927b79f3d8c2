"""Publication of the learners' weights to the engines, and to replicas that join later."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn, TypeAlias

import ray

from raylight._utils.aio import cancel_all, task_group
from raylight.config import EngineConfig
from raylight.engines.registry import engine_traits
from raylight.errors import EngineStartError, LearnerError, LearnerLostError, WeightSyncError
from raylight.learner.protocol import Learner
from raylight.trainer.components.parity import Parity, ParityMonitor
from raylight.weights.client import CoordinatorClient
from raylight.weights.protocol import LoraAdapter
from raylight.weights.sender import PublicationSettings

logger = logging.getLogger(__name__)

AdapterRefs: TypeAlias = "dict[str, ray.ObjectRef[LoraAdapter]]"
ReplicaLogprobs: TypeAlias = dict[str, list[float] | None]
"""Log-probs of the probe by replica; None if it has computed none."""
END_TIMEOUT_S = 15.0
"""Time in which the learners must end their part of a publication that failed."""


@dataclass(frozen=True)
class PinnedAdapter:
    """A version of the learners' adapters that the engines serve under separate names until its release.

    Attributes:
        names: the pinned name of each adapter, by the name under which its current version is served.
        payload_refs: object reference of each adapter, by the learners' model.
    """

    names: dict[str, str]
    version: int
    payload_refs: AdapterRefs


class Publications:
    """Publishes versions, one at a time.

    The learners' weights do not change while they are read. They are read until all replicas have them, or
    during updates until the learners have a snapshot, which is sent.

    Args:
        timeout_s: time that a version may take to reach all replicas.
        adapters: the learners' models, whose adapters are served, by the names under which they are; the
            only model of a run has an empty name. Empty: all weights are published.
        fixed: adapters that are published at the start only.
        probe: token ids whose log-probs are compared; empty if the learners do not own the weights.
        tolerance: limit of the mean difference of log-probs.
        during_updates: updates may begin while weights are sent.
    """

    def __init__(
        self,
        learners: Learner,
        replicas: CoordinatorClient,
        engine: EngineConfig,
        timeout_s: float,
        *,
        adapters: Mapping[str, str] = MappingProxyType({}),
        fixed: Collection[str] = (),
        probe: Sequence[int],
        tolerance: float,
        during_updates: bool = False,
    ) -> None:
        self._learners, self._replicas, self._engine = learners, replicas, engine
        self._adapters, self._fixed, self._probe = adapters, frozenset(fixed), list(probe)
        self._parity = {name: ParityMonitor(tolerance) for name in adapters or ("",)}
        self._settings = PublicationSettings(
            transport=engine.weight_transfer,
            dtype=engine.dtype,
            names=engine_traits(engine.kind).weight_names,
            timeout_s=timeout_s,
            replacement_timeout_s=engine.start_timeout_s,
            coordinator=replicas.handle,
            during_updates=during_updates,
        )
        self.published = 0
        """Last version that was published."""
        self.learners_busy = asyncio.Lock()
        """Held while the learners' weights change, or must not."""
        self._sending = asyncio.Lock()
        """Held while the learners send weights. It is acquired after `learners_busy`, if both are."""
        self._snapshot = 0
        """Version of the learners' snapshot; 0 if they have none."""
        self._payload_refs: AdapterRefs = {}
        """Reference to the published version of each adapter, by the name under which it is served."""
        self._order: asyncio.Task[ReplicaLogprobs] | None = None
        """The last order that published a version. It may go on after `publish` was cancelled."""
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
        async with contextlib.AsyncExitStack() as learners:
            await learners.enter_async_context(self.learners_busy)
            async with self._sending:
                await self._await_order()
                if version < self.published:
                    return None
                payload_refs, logprobs = await self._read(version)
                if self._settings.during_updates:
                    await learners.aclose()
                probed: dict[str, dict[str, list[float]]] = {}
                if version > self.published:
                    probed, logprobs = await self._send(version, payload_refs, logprobs)
            self._replicas.changed.notify_all()
            return await self.check_parity(version, self._settings.timeout_s, probed, logprobs)

    async def check_parity(
        self,
        version: int,
        timeout: float,
        probed: Mapping[str, Mapping[str, Sequence[float]]] = MappingProxyType({}),
        logprobs: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ) -> Parity:
        """Compare the log-probs of all replicas and the learners on the probe, for each adapter.

        Args:
            timeout: seconds that the replicas have.
            probed: by adapter, log-probs by replica; the replicas are asked for the others.
            logprobs: the learners' by adapter; they still hold the version of the others.

        Returns:
            The worst; a parity of no tokens without a probe.

        Raises:
            MismatchError: a replica's differ from the learners'.
        """
        worst = Parity(0.0, 0.0, 0)
        for name, monitor in self._parity.items():
            if not self._probe or (version and name in self._fixed):
                continue
            async with task_group() as tasks:
                own = logprobs.get(name)
                if not own:
                    computing = tasks.create_task(self._learners_logprobs(name))
                found = probed.get(name) or await self._replicas.probe(self._probe, timeout, name or None)
            parity = monitor.check(version, found, own or computing.result())
            worst = max(worst, parity, key=lambda one: (one.mean_abs, one.tokens))
        return worst

    async def _learners_logprobs(self, name: str) -> list[float]:
        """Return the learners' log-probs of the probe, with the adapter that is served under a name."""
        return await self._learners.logprobs(self._probe, self._adapters.get(name, ""))

    @property
    def _published_adapters(self) -> list[str]:
        """Names of the adapters that are published with each version."""
        return [name for name in self._adapters if name not in self._fixed]

    async def _read(self, version: int) -> tuple[AdapterRefs, dict[str, list[float]]]:
        """Read what is sent later: the adapters, or a snapshot. Return references to the adapters, and the
        learners' log-probs of the probe if an update may begin before the comparison."""
        during, timeout = self._settings.during_updates, self._settings.timeout_s
        if not self._adapters:
            if not during:
                return {}, {}
            self._snapshot = 0
            logprobs = await self._learners.take_snapshot(self._probe, self._settings)
            self._snapshot = version
            return {}, {"": logprobs or []}
        names = self._published_adapters
        try:
            async with asyncio.timeout(timeout):
                payload_refs = await self._export_adapters(names)
        except TimeoutError:
            raise WeightSyncError(
                f"the learners did not export their adapter within {timeout:g} s; raise sync_timeout_s"
            ) from None
        return payload_refs, {name: await self._learners_logprobs(name) for name in names if during}

    async def _send(
        self, version: int, payload_refs: AdapterRefs, logprobs: dict[str, list[float]]
    ) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[float]]]:
        """Have all replicas load a version; return, by adapter, the log-probs of the probe by replica, and of
        the learners.

        Args:
            logprobs: the learners'; none if they still hold the version. They then compute them while
                the replicas prepare.
        """
        name = next(reversed(payload_refs), "")
        async with task_group() as tasks:
            own = None
            if self._probe and not logprobs:
                own = tasks.create_task(self._learners_logprobs(name))
            if not self._adapters:
                found = await self._send_weights(version)
            else:
                order = self._send_adapters(version, payload_refs, self._settings.timeout_s)
                found = await asyncio.shield(self._begin(version, order, payload_refs))
        probed = {replica: values for replica, values in found.items() if values is not None}
        return {name: probed} if probed else {}, {name: own.result()} if own else logprobs

    def _begin(
        self, version: int, order: Awaitable[ReplicaLogprobs], payload_refs: AdapterRefs
    ) -> asyncio.Task[ReplicaLogprobs]:
        """Begin an order that publishes a version, and note the version when it has ended.

        It goes on if its caller is cancelled, as it does at the coordinator, which takes no version twice.
        """

        async def note() -> ReplicaLogprobs:
            found = await order
            self.published = version
            self._payload_refs |= payload_refs
            return found

        self._order = asyncio.create_task(note())
        self._order.add_done_callback(
            lambda order: order.cancelled() or order.exception()
        )  # else asyncio logs it
        return self._order

    async def _await_order(self) -> None:
        """Wait until the last order has ended.

        Raises:
            WeightSyncError: it failed. Only weights that no replica has received can be published again.
        """
        if self._order is not None:
            await asyncio.wait([self._order])
            if self._adapters:
                self._order.result()

    async def _send_adapters(
        self, version: int, payload_refs: AdapterRefs, timeout: float
    ) -> ReplicaLogprobs:
        """Publish a version of adapters; return the replicas' log-probs of the probe with the last one."""
        *others, last = payload_refs
        mode = self._engine.update_mode
        for name in others:
            await self._replicas.pin(name, version, [payload_refs[name]], timeout, mode)
        return await self._replicas.publish(
            version, [payload_refs[last]], timeout, mode, last, probe=self._probe
        )

    async def _export_adapters(self, names: Iterable[str]) -> AdapterRefs:
        """Return the object reference of each adapter, which this process owns, so that it outlives the
        learners."""
        exported = {}
        for name in names:
            _, adapter = await self._learners.export_adapter(self._adapters[name])
            exported[name] = ray.put(adapter)
        return exported

    async def publish_initial(self, version: int, timeout: float) -> None:
        """Serve the model with the initial adapters, so that an engine that cannot serve them fails at the
        start.

        Raises:
            EngineStartError: no engine can serve them.
        """
        self._payload_refs = await self._export_adapters(self._adapters)
        try:
            await self._send_adapters(version, self._payload_refs, timeout)
        except WeightSyncError as error:
            raise EngineStartError(
                f"the engine cannot serve the learners' adapter: {error}. Adapt other layers "
                "(lora.target_modules, lora.exclude_modules), or set learner.lora.serve='merged': it then "
                "receives the whole model after every update"
            ) from error

    async def pin(self, step: int) -> PinnedAdapter:
        """Have all replicas serve the published version of the adapters under other names too, until
        `release`.

        Raises:
            WeightSyncError: not enough replicas served it in time.
        """
        names = {name: f"{name}@step-{step}" for name in self._published_adapters}
        for name, pinned_name in names.items():
            refs = [self._payload_refs[name]]
            await self._replicas.pin(pinned_name, self.published, refs, self._settings.timeout_s)
        payload_refs = {self._adapters[name]: self._payload_refs[name] for name in names}
        return PinnedAdapter(names, self.published, payload_refs)

    async def release(self, pinned: PinnedAdapter) -> None:
        """Have the replicas drop a pinned version.

        Raises:
            WeightSyncError: no replica did so in time.
        """
        for name in pinned.names.values():
            await self.stop_serving(name)

    async def published_adapter(self) -> LoraAdapter:
        """Return the published version of the only adapter."""
        (payload_ref,) = self._payload_refs.values()
        return await payload_ref

    async def pin_adapter(self, name: str, version: int, adapter: LoraAdapter) -> None:
        """Have all replicas serve an adapter under a separate name, until `stop_serving`.

        Raises:
            WeightSyncError: not enough replicas served it in time.
        """
        await self._replicas.pin(name, version, [ray.put(adapter)], self._settings.timeout_s)

    async def stop_serving(self, name: str) -> None:
        """Have the replicas drop an adapter of `pin_adapter`.

        Raises:
            WeightSyncError: no replica did so in time.
        """
        await self._replicas.release(name, self._settings.timeout_s)

    async def _send_weights(self, version: int) -> ReplicaLogprobs:
        """Publish a version of the weights, and have the learners send it. Return the replicas' log-probs of
        the probe."""
        token, settings, mode = uuid.uuid4().hex, self._settings, self._engine.update_mode
        order = self._replicas.publish(
            version, None, settings.timeout_s, mode, token=token, probe=self._probe
        )
        publishing = self._begin(version, order, {})
        sending = asyncio.ensure_future(self._learners.publish_weights(version, token, settings))
        try:
            await asyncio.wait([publishing, sending], return_when=asyncio.FIRST_EXCEPTION)
            if sending.done() and (failure := sending.exception()) is not None:
                if not publishing.done():
                    await self._replicas.fail_publication(token, str(failure))
                await asyncio.wait([publishing])
            elif not sending.done():
                await self._await_end(sending, publishing.exception())
            if sending.exception() is not None and not isinstance(sending.exception(), WeightSyncError):
                sending.result()
            return publishing.result()
        finally:
            if not publishing.done():  # cancelled; the replicas must not wait for a sender
                with contextlib.suppress(WeightSyncError):  # no coordinator, no replicas
                    await self._replicas.fail_publication(token, "the publication was cancelled")
            await cancel_all([sending])

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
        raise await self._replicas.changed.wait_for(lambda: self._failure)

    async def serve_joined(self, held: Callable[[], int]) -> None:
        """Send the published version to replicas that join, whenever the learners or their snapshot have it.

        While these have another one, the replicas wait for the next publication, or for the return of
        restarted learners to the published version.

        Args:
            held: returns the version that the learners hold.
        """
        unreachable: frozenset[str] = frozenset()
        during = self._settings.during_updates

        def is_due() -> bool:
            joined = bool(self._replicas.lacking - unreachable)
            sendable = self._snapshot if during else held()
            return joined and self._failure is None and 0 < sendable == self.published

        while True:
            await self._replicas.changed.wait_for(is_due)
            async with contextlib.nullcontext() if during else self.learners_busy, self._sending:
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
