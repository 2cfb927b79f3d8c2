"""The engine of this process, in place of a coordinator and its replicas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from raylight._utils.aio import BroadcastCondition
from raylight.weights.protocol import EngineLoad


class LocalReplica:
    """A single replica that cannot be lost. It has the methods of `CoordinatorClient` that the
    trainer uses.

    Its weights are those that are trained, so a publication has nothing to send.

    Args:
        logprobs: returns the engine's log-probs of a prompt.
        load: returns the engine's load.
    """

    handle = None
    evictions = restarts = 0
    live_replicas = 1
    lacking: frozenset[str] = frozenset()

    def __init__(
        self, logprobs: Callable[[list[int]], Awaitable[list[float]]], load: Callable[[], EngineLoad]
    ) -> None:
        self._logprobs, self._load = logprobs, load
        self.changed = BroadcastCondition()

    async def publish(self, version: int, *args: object, **kwargs: object) -> dict[str, list[float] | None]:
        """Return that the engine has the weights, without log-probs."""
        return {"local": None}

    async def fail_publication(self, token: str, reason: str) -> None:
        """Return: a publication has no parts that could fail."""

    async def sleep(self, timeout: float, level: int = 1) -> dict[str, str | None]:
        """Return the reason why no memory is freed."""
        return {"local": "the learner trains the engine's own weights"}

    async def wake(self, timeout: float) -> None:
        """Return: the engine is awake."""

    async def probe(
        self, ids: list[int], timeout: float, adapter: str | None = None
    ) -> dict[str, list[float]]:
        """Return the log-probs of `ids[1:]` at temperature 1."""
        return {"local": await self._logprobs(ids)}

    async def loads(self) -> dict[str, EngineLoad]:
        return {"local": self._load()}
