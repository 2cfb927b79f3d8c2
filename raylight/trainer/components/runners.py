"""`Runners`: starts and watches the runner pool, or waits for runners in other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace

import ray

from raylight._utils.no_proxy import LOOPBACK
from raylight.config import SessionConfig
from raylight.runner.actor import RunnerPayload
from raylight.runner.external_runners import ExternalRunners
from raylight.runner.pool import RunnerPool
from raylight.runner.scaling import Resizable
from raylight.serving.deploy.ingress import head_node
from raylight.serving.deploy.ingress_host import ANY_HOST
from raylight.store.client import StoreClient
from raylight.trainer.components import Component
from raylight.trainer.spec.settings import RolloutSettings, ServingSettings


class Runners:
    """The run's own pool of runners, or the runners of other processes that join the run.

    Args:
        payload: the agent and what else a runner needs to execute it.
        show_stage: shows what the run is doing now.
    """

    is_started = True
    """False for agents that the run does not start."""

    def __init__(
        self,
        settings: RolloutSettings,
        payload: RunnerPayload,
        store: StoreClient,
        show_stage: Callable[[str], None],
    ) -> None:
        self._config, self._name, self._show_stage = settings.runner, settings.name, show_stage
        kind = ExternalRunners if self._config.external else RunnerPool
        payload = replace(payload, gateway_hosts=gateway_hosts(settings.serving))
        self.pool = kind(settings.name, self._config, store, payload)

    @property
    def resizable(self) -> dict[str, Resizable]:
        """Parts that `raylight scale` can resize, by name."""
        return {"runners": self.pool}

    def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Register the end of the runners."""
        stack.push_async_callback(self.pool.stop)

    async def start(self) -> None:
        """Start the runners, or wait for other processes' runners.

        Raises:
            PlacementError: the cluster has too few free resources.
            RunnerLostError: a runner failed while it started, or did not start in time.
        """
        external = self._config.external
        if external:
            command = f"raylight runner AGENT --run {self._name}"
            self._show_stage(f"waiting for external runners; start them with `{command}`")
        await self.pool.start()
        self._show_stage("runners joined" if external else f"{self._config.n} runner(s) ready")

    def watches(self) -> list[Coroutine[object, object, object]]:
        """Return a coroutine that replaces lost runners, and fails if too many are lost."""
        return [self.pool.watch()]

    def metrics(self) -> dict[str, float]:
        """Return the number of runners that are up, or send heartbeats."""
        return {"runners/n": float(self.pool.size)}

    def most_rollouts(self) -> int:
        """Return the number of rollouts that the runners execute at a time, once all that are asked for are
        up."""
        return max(self.pool.size, self._config.n) * self._config.max_concurrent

    async def counts(self) -> dict[str, int]:
        """Return the numbers of lost and replaced runners."""
        return {"runners_lost": self.pool.lost, "runners_replaced": self.pool.replaced}


class OutsideAgents(Component):
    """Agents that open sessions at the served model. The run starts none of them; a session without an agent
    expires."""

    is_started = False

    def __init__(self, config: SessionConfig) -> None:
        self._config = config

    @property
    def resizable(self) -> dict[str, Resizable]:
        """Nothing: `raylight scale` does not start agents."""
        return {}

    def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Do nothing: the agents do not end with the run."""

    async def start(self) -> None:
        """Do nothing."""

    def metrics(self) -> dict[str, float]:
        """Return nothing: the training groups count the sessions."""
        return {}

    def most_rollouts(self) -> int:
        """Return the number of sessions that may be open at a time."""
        return self._config.max_open


def gateway_hosts(serving: ServingSettings | None) -> tuple[str, ...]:
    """Return the hosts at which agents may call the run's models: Serve's ingress is on the head, and the
    server of a local learner on this node.

    Args:
        serving: the run's own model; None if it has none.
    """
    host = None if serving is None else serving.engine.host
    hosts = {head_node()["NodeManagerAddress"], ray.util.get_node_ip_address(), host}
    return tuple(sorted(hosts - {None, ANY_HOST, *LOOPBACK}))
