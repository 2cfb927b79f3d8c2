"""A process that has only runners, and joins a run whose algorithm is in another process on the same
cluster."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError

from raylight._utils.aio import cancel_all
from raylight.config import RunnerConfig
from raylight.errors import ConfigError, RaylightError
from raylight.runner.actor import RunnerPayload
from raylight.runner.external_runners import RENDEZVOUS_NAME, JoinedPool, find_rendezvous
from raylight.store.actor import STORE_NAME
from raylight.trainer.output.displays import make_display
from raylight.trainer.output.loggers import Display
from raylight.trainer.ray_session.cluster_monitor import component_stack, until_lost
from raylight.trainer.ray_session.connection import ray_session
from raylight.trainer.spec.arguments import TrainerArguments
from raylight.types import JsonObject

END_TIMEOUT_S = 10.0
"""Time to wait for the end of a run after its store is gone, in seconds."""


def check_joinable(run_name: str, owns_cluster: bool) -> None:
    """Check that other processes can join a run of this name on this cluster.

    Args:
        owns_cluster: True if this process started the cluster for itself.

    Raises:
        ConfigError: other processes cannot join the cluster, or it already has a run of this name.
    """
    if owns_cluster:
        raise ConfigError(
            "external runners require a shared Ray cluster, and none is running; start one with `ray start "
            "--head`"
        )
    if _actor_exists(RENDEZVOUS_NAME, run_name) or _actor_exists(STORE_NAME, run_name):
        raise ConfigError(
            f"this cluster already has a run {run_name!r}; choose another run_name, or stop that run"
        )


def _actor_exists(actor: str, run_name: str) -> bool:
    try:
        ray.get_actor(actor, namespace=run_name)
    except ValueError:
        return False
    return True


class RemoteRunnerProcess:
    """Joins a run and executes its rollouts until the run ends.

    Args:
        payload: agent, tracer and hooks; the run has the secret.
        arguments: the Trainer's.
    """

    def __init__(
        self, run_name: str, payload: RunnerPayload, config: RunnerConfig, arguments: TrainerArguments
    ) -> None:
        self._run_name, self._payload = run_name, payload
        self._config, self._arguments = config, arguments

    async def work(self) -> JsonObject:
        """Execute rollouts until the run ends; return the numbers of lost and replaced runners.

        Raises:
            ConfigError: the run does not exist.
            RaylightError: the runners did not start, or died too often.
        """
        arguments, start_timeout_s = self._arguments, self._config.start_timeout_s
        with (
            ray_session(arguments.address, arguments.log_to_driver, start_timeout_s) as connection,
            make_display(arguments.progress) as display,
        ):
            if connection.owns_cluster:
                raise ConfigError(
                    f"run {self._run_name!r} cannot be joined: no Ray cluster was found; give its address, "
                    "or set RAY_ADDRESS"
                )
            display.stage(connection.description)
            display.stage(f"looking for run {self._run_name}")
            return await until_lost(self._join(display), "Start the runners again after the run")

    async def _join(self, display: Display) -> JsonObject:
        """Execute rollouts on the connected cluster until the run ends."""
        rendezvous = await find_rendezvous(self._run_name, self._config.start_timeout_s)
        try:
            access = await rendezvous.access.remote()
        except RayActorError:
            raise ConfigError(
                f"run {self._run_name!r} ended before the runners joined; start the runners after the "
                "next run"
            ) from None
        payload = replace(
            self._payload, secret=access.secret, run=self._run_name, gateway_hosts=access.gateway_hosts
        )
        pool = JoinedPool(f"{self._run_name}-{secrets.token_hex(3)}", self._config, access.store, payload)
        async with component_stack() as stack:
            stack.push_async_callback(pool.stop)
            run_ended = await self._work_until_end(rendezvous, pool, display)
        if run_ended:
            display.stage(f"run {self._run_name} ended")
        else:
            display.note("all runners have executed max_rollouts rollouts")
        return {"run": self._run_name, "runners_lost": pool.lost, "runners_replaced": pool.replaced}

    async def _work_until_end(self, rendezvous: object, pool: JoinedPool, display: Display) -> bool:
        """Return True when the run has ended, False when all runners have executed `max_rollouts`."""
        ending = asyncio.ensure_future(_end_of(rendezvous))
        working = asyncio.ensure_future(self._work(rendezvous, pool, display))
        try:
            await asyncio.wait([ending, working], return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                await ending
                return True
            try:
                await working
            except (RaylightError, RayActorError):
                # runners that work or start may notice that the store is gone before this process notices
                # the end of the run
                ended, _ = await asyncio.wait([ending], timeout=END_TIMEOUT_S)
                if not ended:
                    raise
            return ending.done()
        finally:
            await cancel_all([ending, working])

    async def _work(self, rendezvous: Any, pool: JoinedPool, display: Display) -> None:
        """Start the runners and watch them."""
        await pool.start()
        await rendezvous.join.remote()
        display.stage(
            f"{self._config.n} runner(s) joined run {self._run_name}; they end with it, or on Ctrl-C"
        )
        await pool.watch()


async def _end_of(rendezvous: Any) -> None:
    """Return when the run has ended."""
    try:
        await rendezvous.wait_for_end.remote()
    except RayActorError:  # the rendezvous actor ends with the run
        return
