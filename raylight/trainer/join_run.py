"""The process that has only the runners of a run whose algorithm is in another process on the same cluster."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from raylight.agent.litagent import LitAgent
from raylight.errors import ConfigError, RaylightError
from raylight.runner.external_runners import RENDEZVOUS_NAME, JoinedPool, find_rendezvous
from raylight.runner.pool import RunnerPayload
from raylight.store.actor import STORE_NAME
from raylight.trainer.cluster import ray_session
from raylight.trainer.display import make_display
from raylight.trainer.inputs import as_agent

if TYPE_CHECKING:
    from raylight.trainer.trainer import Trainer

END_S = 10.0
"""How long after its store a run may be known to be over."""


def must_be_joinable(run: str, local: bool) -> None:
    """Raise ConfigError unless other processes can find a run of this name here.

    Args:
        local: the cluster was started by this process, for itself.
    """
    if local:
        raise ConfigError(
            "runners of other processes need a cluster that both join; start one with `ray start --head`"
        )
    if _is_there(RENDEZVOUS_NAME, run) or _is_there(STORE_NAME, run):
        raise ConfigError(
            f"there is a run {run!r} on this cluster already; give this one another run_name, or stop that one"
        )


def _is_there(actor: str, run: str) -> bool:
    try:
        ray.get_actor(actor, namespace=run)
    except ValueError:
        return False
    return True


class RemoteRunnerProcess:
    """Joins a run and executes its rollouts until it is over.

    Args:
        trainer: whose agent, tracer, hooks and runner settings are used.

    Raises:
        ConfigError: there is no agent, or no name of a run.
    """

    def __init__(self, trainer: Trainer, agent: Any = None) -> None:
        if trainer.run_name is None:
            raise ConfigError("runners join a run by its name: give run_name, or set RAYLIGHT_RUN")
        self._trainer = trainer
        self._run = trainer.run_name
        self._agent: LitAgent = as_agent(agent if agent is not None else trainer.agent)
        self._config = trainer.runner

    async def work(self) -> dict[str, Any]:
        """Do it; returns how many runners were lost or replaced.

        Raises:
            ConfigError: there is no such run.
            RaylightError: the runners did not start, or kept dying.
        """
        trainer = self._trainer
        with (
            ray_session(trainer._address, trainer._log_to_driver) as connection,
            make_display(trainer.progress, 0) as shown,
        ):
            if connection.local:
                raise ConfigError(
                    f"there is no cluster here on which run {self._run!r} could be; give its address, or set RAY_ADDRESS"
                )
            shown.stage(f"looking for run {self._run}")
            rendezvous = await find_rendezvous(self._run, self._config.start_timeout_s)
            try:
                store, secret = await rendezvous.access.remote()
            except RayActorError:
                raise ConfigError(
                    f"run {self._run!r} ended before its runners could join it; start them again with it"
                ) from None
            payload = replace(RunnerPayload(self._agent, trainer.tracer, trainer.hooks), secret=secret)
            pool = JoinedPool(f"{self._run}-{secrets.token_hex(3)}", self._config, store, payload)
            try:
                await pool.start()
                shown.stage(
                    f"{self._config.n} runner(s) work for run {self._run}, until it is over or Ctrl-C"
                )
                over = await self._until_over(rendezvous, pool)
            finally:
                await pool.stop()
            shown.stage(f"run {self._run} is over" if over else "all runners have run their max_rollouts")
        return {"run": self._run, "runners_lost": pool.lost, "runners_replaced": pool.replaced}

    async def _until_over(self, rendezvous: Any, pool: JoinedPool) -> bool:
        """Returns whether the run is over; if not, these runners have done enough."""
        ending, watching = asyncio.ensure_future(_end_of(rendezvous)), asyncio.ensure_future(pool.watch())
        try:
            await asyncio.wait([ending, watching], return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                await ending
                return True
            try:
                await watching
            except RaylightError:
                over, _ = await asyncio.wait(
                    [ending], timeout=END_S
                )  # that the store is gone may be heard of first
                if not over:
                    raise
            return ending.done()
        finally:
            for task in (ending, watching):
                task.cancel()
            await asyncio.gather(ending, watching, return_exceptions=True)


async def _end_of(rendezvous: Any) -> None:
    """Join the run; returns when it is over."""
    try:
        await rendezvous.join.remote()
        await rendezvous.wait_for_end.remote()
    except RayActorError:  # what it waits for
        return
