"""The coordinator as the driver's process uses it: orders, a mirror of its state, and its restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from raylight._utils.aio import BroadcastCondition, pause
from raylight.errors import CoordinatorLostError, CoordinatorUnavailableError, summarize_ray_error
from raylight.weights.coordinator import ReplicaCoordinator
from raylight.weights.orders import BoxedRef, Order, Snapshot
from raylight.weights.protocol import EngineLoad, UpdateMode

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""Time that a caller waits for a response beyond the coordinator's own timeout."""
LOADS_TIMEOUT_S = 2.0
"""Time that replicas have to report their loads."""
HOLD_INTERVAL_S = 5.0
"""Seconds after which a coordinator that holds starts looks again whether those under way are lost."""
RETRY_DELAY_S = 0.5
"""Delay between two calls to a coordinator that does not respond."""
WATCH_TIMEOUT_S = 10.0
"""Longest time that the coordinator takes for a response without news."""
PATIENCE_S = 40.0
"""Time without a response after which a coordinator counts as hanging. It doubles with each restart that did
not help: on a busy machine the new process takes long to start."""


async def call_coordinator(coordinator: object, method: str, *args: object, within: float = 0.0) -> Any:
    """Call a method that itself takes up to `within` seconds.

    Args:
        coordinator: the actor's handle, or a `ReplicaCoordinator` in this process.

    Raises:
        CoordinatorLostError: the coordinator's actor is gone for good.
        CoordinatorUnavailableError: it did not respond; it is unknown if the call took effect.
    """
    limit = within + GRACE_S
    target = getattr(coordinator, method)
    try:
        async with asyncio.timeout(limit):
            if isinstance(coordinator, ReplicaCoordinator):
                return await target(*args)
            return await target.remote(*args)
    except TimeoutError:
        raise CoordinatorUnavailableError(
            f"the replica coordinator did not respond to `{method}` within {round(limit, 2):g} s"
        ) from None
    except RayTaskError as error:
        raise error.cause from None
    except ActorUnavailableError as error:
        raise CoordinatorUnavailableError(
            f"the replica coordinator cannot be reached for `{method}`: {summarize_ray_error(error)}"
        ) from None
    except RayActorError as error:
        raise CoordinatorLostError(
            f"the replica coordinator's actor is gone: {summarize_ray_error(error)}. Start the run again"
        ) from None


async def call_until_answered(coordinator: object, method: str, *args: object, within: float = 0.0) -> Any:
    """Call a method, and repeat the call while the coordinator restarts.

    Raises:
        CoordinatorLostError, CoordinatorUnavailableError: as for `call_coordinator`, the latter after
            `within` seconds.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + within
    while True:
        try:
            remaining = max(deadline - clock(), 0.0)
            return await call_coordinator(coordinator, method, *args, within=remaining)
        except CoordinatorUnavailableError:
            if clock() >= deadline:
                raise
            await pause(RETRY_DELAY_S)


async def wait_for_turn(coordinator: object, method: str, name: str, limit: float) -> None:
    """Call `enter_start` or `hold_starts` until it grants a turn.

    Args:
        limit: seconds for which the coordinator may be away.
    """
    while not await call_until_answered(coordinator, method, name, HOLD_INTERVAL_S, within=limit):
        pass


def order_limit(timeout: float, replacement_timeout_s: float) -> float:
    """Return the longest time of an order, with its extensions and one restart of the coordinator.

    A restarted coordinator gives an order its full time again.
    """
    return 2 * (2 * timeout + replacement_timeout_s)


def restart_actor(coordinator: Any) -> None:
    """Kill the coordinator's process; Ray starts it again."""
    ray.kill(coordinator, no_restart=False)


class CoordinatorClient:
    """All replicas of an engine as one.

    It mirrors the coordinator's state, and restores a coordinator that was restarted. A call that the restart
    interrupts is repeated. The references to the current payloads stay alive with it. The methods raise the
    errors of `ReplicaCoordinator.issue` and `call_coordinator`.

    Args:
        handle: the actor's handle, or a `ReplicaCoordinator` in this process.
        replacement_timeout_s: time that an order may wait for the replacement of lost replicas.
        report: receives messages for the user.
        restart: kills the process of a coordinator that hangs.
    """

    def __init__(
        self,
        handle: object,
        replacement_timeout_s: float = 0.0,
        report: Callable[[str], None] = logger.warning,
        restart: Callable[[Any], None] = restart_actor,
    ) -> None:
        self.handle = handle
        self._replacement_timeout_s = replacement_timeout_s
        self._report, self._restart = report, restart
        self._state = Snapshot()
        self._patience_s, self._misses, self._responded = PATIENCE_S, 0, 0.0
        self.changed = BroadcastCondition()
        """Notified when the state has changed."""
        self.restarts = 0
        """Number of times that the coordinator was restored."""

    @property
    def evictions(self) -> int:
        """Number of replicas that were evicted."""
        return len(self._state.evicted)

    @property
    def lacking(self) -> frozenset[str]:
        """Replicas that joined and lack the current weights."""
        return self._state.lacking

    @property
    def live_replicas(self) -> int | None:
        """Number of live replicas; None if it is not known yet."""
        return len(self._state.replicas) if self._state.generation else None

    # orders

    async def publish(
        self,
        version: int,
        payload_ref: BoxedRef | None,
        timeout: float,
        mode: UpdateMode = "keep",
        adapter: str | None = None,
        token: str = "",
        probe: list[int] | None = None,
    ) -> dict[str, list[float] | None]:
        """Publish new weights, or a new version of an adapter, to all replicas.

        Args:
            payload_ref: one-element list holding a reference to the `LoraAdapter`; None for weights, whose
                sender calls `begin_transfer`.
            adapter: name of the adapter; None publishes weights.
            token: identifies the publication for the sender of the weights.
            probe: token ids of a prompt, of which each replica computes log-probs with what it has loaded.

        Returns:
            By replica that loaded them: the log-probs of `probe[1:]` at temperature 1, or None.
        """
        kind: Any = "weights" if adapter is None else "adapter"
        ids = tuple(probe or ())
        return await self._issue(
            Order(kind, timeout, version, adapter, payload_ref, mode, ids=ids, token=token)
        )

    async def pin(
        self, name: str, version: int, payload_ref: BoxedRef, timeout: float, mode: UpdateMode = "keep"
    ) -> None:
        """Serve an adapter under a name, until `release`. Its version need not be new: it is published under
        another name too, or together with another adapter."""
        await self._issue(Order("adapter", timeout, version, name, payload_ref, mode, pinned=True))

    async def release(self, name: str, timeout: float) -> None:
        """Serve an adapter no longer; requests in flight go on with it. Unknown names are ignored."""
        await self._issue(Order("release", timeout, adapter=name))

    async def sleep(self, timeout: float, level: int = 1) -> dict[str, str | None]:
        """Free the device memory of all engines.

        Returns:
            By replica, the reason why nothing was freed, or None if memory was freed.
        """
        return await self._issue(Order("sleep", timeout, level=level))

    async def wake(self, timeout: float) -> None:
        """Resume all engines after `sleep`."""
        await self._issue(Order("wake", timeout))

    async def probe(
        self, ids: list[int], timeout: float, adapter: str | None = None
    ) -> dict[str, list[float]]:
        """Return, by replica, the log-probs of `ids[1:]` at temperature 1."""
        return await self._issue(Order("probe", timeout, adapter=adapter, ids=tuple(ids)))

    async def fail_publication(self, token: str, reason: str) -> None:
        """End a publication, because its sender failed."""
        await call_until_answered(self.handle, "fail_publication", token, reason, within=GRACE_S)

    @contextlib.asynccontextmanager
    async def starts_held(self) -> AsyncIterator[None]:
        """Let no replica that starts take device memory meanwhile; see `Starts`.

        No order may be issued meanwhile: one that waits for a replacement would wait forever.
        """
        token, limit = uuid.uuid4().hex, max(self._replacement_timeout_s, GRACE_S)
        try:
            await wait_for_turn(self.handle, "hold_starts", token, limit)
            yield
        finally:
            await call_until_answered(self.handle, "release_starts", token, within=limit)

    async def loads(self, timeout: float = LOADS_TIMEOUT_S) -> dict[str, EngineLoad]:
        """Return the loads of the replicas that report within `timeout` seconds.

        Empty while the coordinator restarts: a load that is read again later is useless.
        """
        try:
            loads: dict[str, EngineLoad] = await call_coordinator(
                self.handle, "loads", timeout, within=timeout
            )
        except CoordinatorUnavailableError:
            return {}
        return loads

    async def _issue(self, order: Order) -> Any:
        within = order_limit(order.timeout, self._replacement_timeout_s)
        result, state = await call_until_answered(
            self.handle, "issue", uuid.uuid4().hex, order, within=within
        )
        self.update(state)
        return result

    # the mirror

    def update(self, state: Snapshot) -> None:
        """Take over a newer state; report replicas that were evicted."""
        if state.generation < self._state.generation:
            return
        for replica in state.evicted.keys() - self._state.evicted.keys():
            self._report(f"engine replica {replica} was evicted and is replaced: {state.evicted[replica]}")
        self._state = state
        self.changed.notify_all()

    async def keep(self) -> None:
        """Follow the coordinator until its actor is gone for good.

        One that was restarted is restored; one that hangs is restarted.
        """
        self._responded = asyncio.get_running_loop().time()
        try:
            while True:
                try:
                    await self._follow()
                    self._patience_s, self._misses = PATIENCE_S, 0
                    self._responded = asyncio.get_running_loop().time()
                except CoordinatorUnavailableError as error:
                    await self._handle_miss(error)
        except CoordinatorLostError as error:
            logger.info("the coordinator is no longer followed: %s", error)
        except Exception:  # no one awaits this task
            logger.exception("the coordinator is no longer followed; it cannot be restored after a restart")

    async def _follow(self) -> None:
        """Wait for the next state, or restore a restarted coordinator."""
        known, limit = self._state.generation, WATCH_TIMEOUT_S
        state = await call_coordinator(self.handle, "next_snapshot", known, limit, within=limit)
        if state is not None:
            self.update(state)
            return
        await call_coordinator(self.handle, "restore", self._state)
        self.restarts += 1
        self._report("the replica coordinator was restarted and restored")

    async def _handle_miss(self, error: CoordinatorUnavailableError) -> None:
        """Restart a coordinator that hangs.

        One miss is not enough: after this process was suspended, its deadlines expire before it reads the
        response.
        """
        self._misses += 1
        silence = asyncio.get_running_loop().time() - self._responded
        logger.info("%s", error)
        if self._misses > 1 and silence >= self._patience_s:
            self._report(f"the replica coordinator did not respond for {silence:.0f} s and is restarted")
            self._patience_s *= 2
            self._responded = asyncio.get_running_loop().time()
            self._restart(self.handle)
        else:
            await pause(RETRY_DELAY_S)
