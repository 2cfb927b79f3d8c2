"""A replica's part in transfers: it executes their phases on its engine until it has the ordered weights."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from raylight.engines.protocol import Engine, UpdateMode
from raylight.errors import WeightSyncError
from raylight.weight_sync.client import ReplicaClient
from raylight.weight_sync.orders import Order
from raylight.weight_sync.transfers import FINAL, Phase

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 30.0
"""Longest time that a poll waits for a phase."""


class Retry(Protocol):
    """Repeats a call while the coordinator does not respond; None when the replica closes."""

    def __call__(self, call: Callable[[], Awaitable[Any]], /) -> Awaitable[Any]: ...


class TransferFollower:
    """Executes the phases of transfers.

    Args:
        retry: calls the coordinator.
    """

    def __init__(self, engine: Engine, client: ReplicaClient, retry: Retry) -> None:
        self._engine, self._client, self._retry = engine, client, retry
        self._executed = 0
        """Number of the last phase that was executed, successfully or not."""
        self._closed = False

    def close(self) -> None:
        """Take part in no further phase."""
        self._closed = True

    def reset(self) -> None:
        """Forget the phases so far: the coordinator may have been restarted, and numbers them again."""
        self._executed = 0

    async def receive(self, order: Order) -> int:
        """Take part in transfers until the engine has the ordered version or a later one; return it.

        Raises:
            WeightSyncError: the engine failed, or the order was withdrawn.
        """
        finished = False
        try:
            while not self._closed:
                phase = await self._retry(
                    lambda: self._client.next_phase(self._executed, order.version, POLL_TIMEOUT_S)
                )
                if phase is None:
                    continue
                if phase.kind == "withdrawn":
                    raise WeightSyncError(f"the publication of {order} has failed")
                self._executed = phase.number
                finished = await self._execute(phase, order.mode) and phase.kind in FINAL
                if finished:
                    return phase.version
            raise WeightSyncError(f"the replica closes; it has not received {order}")
        finally:
            if not finished:  # in any case: another update must be able to begin
                with contextlib.suppress(WeightSyncError):  # the engine closes, and is replaced
                    await self._engine.abort_weight_update()

    async def _execute(self, phase: Phase, mode: UpdateMode) -> bool:
        """Execute a phase and acknowledge it. If another process was lost, abort, and return False.

        Raises:
            Exception: the engine failed for a reason of its own.
        """
        failure: str | None = None
        error: Exception | None = None
        try:
            await self._call_engine(phase, mode)
        except ConnectionError as lost:
            logger.warning("version %d did not arrive completely: %s", phase.version, lost)
            failure = str(lost)
            await self._engine.abort_weight_update()
        except Exception as own:  # of any kind: the sender must receive it
            failure, error = str(own) or type(own).__name__, own
        await self._retry(lambda: self._client.acknowledge_phase(phase.number, failure, error is None))
        if error is not None:
            raise error
        return failure is None

    async def _call_engine(self, phase: Phase, mode: UpdateMode) -> None:
        engine = self._engine
        info: Any = None if phase.info is None else pickle.loads(phase.info)
        match phase.kind:
            case "init":
                await engine.init_weight_transfer_engine(info)
            case "start":
                await engine.start_weight_update(mode)
            case "update":
                await engine.update_weights(info)
            case "finish":
                await engine.finish_weight_update(phase.version)
            case "send":
                await engine.start_weight_update(mode)
                await engine.update_weights(info)
                await engine.finish_weight_update(phase.version)
            case "abort":
                await engine.abort_weight_update()
