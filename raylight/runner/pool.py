"""The pool of RunnerActors, watched from the driver: a runner that dies is replaced and what it had is given back."""

from __future__ import annotations

import asyncio
import logging
import re
from pickle import PickleError
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raylight.agent.litagent import LitAgent
from raylight.config import RunnerConfig
from raylight.errors import ConfigError, PlacementError, RunnerLostError
from raylight.runner.runner import Runner
from raylight.store.client import StoreClient

logger = logging.getLogger(__name__)


class RunnerActor:
    """A Runner as a Ray actor."""

    def __init__(self, name: str, store: Any, agent: LitAgent, secret: str, max_concurrent: int) -> None:
        self._runner = Runner(name, StoreClient(store), agent, secret, max_concurrent)

    async def ready(self) -> None:
        """Answers once the actor is up."""

    async def serve(self) -> None:
        await self._runner.serve()


class RunnerPool:
    """Starts and watches the runners of a run.

    Args:
        store: the StoreActor's handle.
        agent: the agent that every runner executes.
    """

    def __init__(self, namespace: str, config: RunnerConfig, store: Any, agent: LitAgent, secret: str) -> None:
        self._namespace = namespace
        self._config = config
        self._store = store
        self._agent = _shipped(agent)
        self._secret = secret
        self._actors: dict[str, Any] = {}
        self._started = 0
        self.lost = 0

    async def start(self) -> None:
        """Start all runners and wait until they are up.

        Raises:
            PlacementError: the cluster has no room for them, or they did not start within `start_timeout_s`.
        """
        config = self._config
        for _ in range(config.n):
            self._start()
        ready = [asyncio.ensure_future(actor.ready.remote()) for actor in self._actors.values()]
        up, late = await asyncio.wait(ready, timeout=config.start_timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        broken = [error for task in up if (error := task.exception())]
        if broken:
            raise RunnerLostError(
                f"the runners did not start: {_reason(broken[0])}. A module that the agent needs must be importable on every "
                "node: put it beside the script, in the job's working directory, or install it"
            )
        if late:
            raise PlacementError(
                f"{len(late)} of {config.n} runners of {config.num_cpus:g} CPU were not up within {config.start_timeout_s:g} s; "
                f"free now: {ray.available_resources().get('CPU', 0):g} CPU. Ask for fewer runners, or for less CPU each"
            )

    async def watch(self) -> None:
        """Run the runners for as long as the run lasts.

        Raises:
            RunnerLostError: more runners died than `max_restarts` allows.
        """
        serving = {asyncio.ensure_future(actor.serve.remote()): name for name, actor in self._actors.items()}
        try:
            while serving:
                done, _ = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    name = await self._replace(serving.pop(task), task.exception())
                    serving[asyncio.ensure_future(self._actors[name].serve.remote())] = name
        finally:
            for task in serving:
                task.cancel()

    def stop(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()

    def _start(self) -> str:
        name = f"runner-{self._started}"
        self._started += 1
        config = self._config
        actor = (
            ray.remote(RunnerActor)
            .options(name=name, namespace=self._namespace, num_cpus=config.num_cpus, scheduling_strategy="SPREAD")
            .remote(name, self._store, self._agent, self._secret, config.max_concurrent)
        )
        self._actors[name] = actor
        return name

    async def _replace(self, name: str, error: BaseException | None) -> str:
        """Give a lost runner's rollouts back and start another in its place."""
        actor = self._actors.pop(name)
        if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
            raise RunnerLostError(f"{name} failed: {error.cause!r}") from error
        ray.kill(actor)
        self.lost += 1
        why = _reason(error) if error else "it ended"
        returned = await StoreClient(self._store).release_worker(name, why)
        if self.lost > self._config.max_restarts:
            raise RunnerLostError(
                f"{self.lost} runners died; the last one said: {why}. Look for its log with `ray logs actor`, "
                "or raise RunnerConfig.max_restarts"
            )
        logger.warning("%s died (%s); %d rollouts go back to the queue and another runner starts", name, why, returned)
        replacement = self._start()
        try:
            await asyncio.wait_for(self._actors[replacement].ready.remote(), self._config.start_timeout_s)
        except TimeoutError:
            raise RunnerLostError(f"{name} died ({why}), and the cluster has no room for another runner in its place") from None
        return replacement


def _reason(error: BaseException) -> str:
    """The line of a Ray error that tells what happened: the innermost exception's, or else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    inner = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (inner[-1] if inner else lines[0] if lines else type(error).__name__).rstrip(".")


def _shipped(agent: LitAgent) -> Any:
    """The agent in the object store.

    Raises:
        ConfigError: it cannot be pickled.
    """
    try:
        return ray.put(agent)
    except (PickleError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the agent cannot be sent to the runners: {str(error).splitlines()[0]}. Create clients, locks and caches inside the "
            "rollout function, or define them in an importable module"
        ) from None
