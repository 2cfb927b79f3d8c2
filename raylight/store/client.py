"""The store's client: the same methods whether the store is an actor or an object in this process."""

from __future__ import annotations

from typing import Any

from raylight.errors import StoreLostError
from raylight.store.service import StoreService
from raylight.types import (
    AttemptStatus,
    CallKey,
    Failure,
    FinishedRollout,
    Generation,
    Rollout,
    RolloutRequest,
    Span,
)

SETTLE_TIMEOUT_S = 30.0
"""How long a finishing attempt waits for the records of its calls."""


class StoreClient:
    """Methods of the store; all are asynchronous and raise its typed errors.

    Args:
        target: a StoreActor's handle, or a StoreService in this process.
    """

    def __init__(self, target: Any) -> None:
        self._target = target

    async def enqueue(self, requests: list[RolloutRequest]) -> list[Rollout]:
        """Queue rollouts; returns them with ids, in the order given."""
        return await self._call("enqueue", requests)

    async def dequeue(self, worker_id: str, limit: int, timeout: float) -> list[Rollout]:
        """Take up to `limit` rollouts, waiting up to `timeout` seconds for the first; empty if none came."""
        return await self._call("dequeue", worker_id, limit, timeout)

    async def finish_attempt(
        self,
        attempt_of: Rollout,
        status: AttemptStatus,
        failure: Failure | None = None,
        spans: list[Span] | None = None,
        timeout: float = SETTLE_TIMEOUT_S,
    ) -> Rollout:
        """Decide the rollout's attempt once all its calls are recorded; its last spans are stored in the same step.

        An attempt whose calls are not all recorded within `timeout` seconds is a failure of the infrastructure.
        """
        attempt = attempt_of.attempt
        assert attempt is not None, "only a dequeued rollout has an attempt to finish"
        return await self._call(
            "finish_attempt", attempt.rollout_id, attempt.attempt_id, status, failure, spans or [], timeout
        )  # fmt: skip

    async def release_worker(self, worker_id: str, why: str) -> int:
        """Give back everything that a lost worker had; returns how many attempts that were."""
        return await self._call("release_worker", worker_id, why)

    async def cancel(self, rollout_ids: list[str]) -> None:
        """Cancel the undecided among these rollouts."""
        await self._call("cancel", rollout_ids)

    async def capture(self, opened: list[CallKey], closed: list[tuple[CallKey, Generation | None]]) -> None:
        """Record that calls to the engine began and ended."""
        await self._call("capture", opened, closed)

    async def wait_for_rollouts(
        self, rollout_ids: list[str], at_least: int | None = None, timeout: float | None = None
    ) -> list[Rollout]:
        """The decided among these rollouts, once there are `at_least` of them (default: all) or the time is over."""
        return await self._call("wait_for_rollouts", rollout_ids, at_least, timeout)

    async def collect(self, rollout_ids: list[str]) -> list[FinishedRollout]:
        """Rewards and generations of each rollout's latest attempt."""
        return await self._call("collect", rollout_ids)

    async def add_resources(self, resources: dict[str, Any]) -> str:
        """Store a new version of the named resources; returns its id."""
        return await self._call("add_resources", resources)

    async def get_resources(self, resources_id: str) -> dict[str, Any]:
        """The named resources of this version."""
        return await self._call("get_resources", resources_id)

    async def statistics(self) -> dict[str, int]:
        """Counts by status, and of what was retried, late or lost."""
        return await self._call("statistics")

    async def _call(self, method: str, *args: Any) -> Any:
        if isinstance(self._target, StoreService):
            return await getattr(self._target, method)(*args)
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await getattr(self._target, method).remote(*args)
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise StoreLostError(f"the store actor is gone: {str(error).splitlines()[0]}. Start the run again") from None
