"""Start of actors: waiting until they are up, and distinguishing slow ones from those that the cluster cannot
place."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ray
import ray._private.state as ray_state
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayError

from raylight._utils.aio import cancel_all
from raylight._utils.machine import available_cpus
from raylight._utils.ray_resources import format_amounts
from raylight.config import RunnerConfig
from raylight.errors import PlacementError, RunnerLostError, summarize_ray_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartState:
    """Position of an actor on its way up."""

    phase: Literal["unplaced", "starting", "loading"]
    """"unplaced": it waits for resources. "starting": a node has reserved them and starts a process.
    "loading": the process imports the agent."""
    pid: int = 0
    actor_id: str = ""

    def __str__(self) -> str:
        if self.phase == "loading":
            return f"is importing the agent in process {self.pid} (`ray logs actor --id {self.actor_id}`)"
        return "waits for resources" if self.phase == "unplaced" else "waits for its process to start"


UNPLACED = StartState("unplaced")


class StartUp:
    """One start of runners, which waits until all are up.

    A runner without resources has `placement_timeout_s`. A runner that a node has accepted has
    `start_timeout_s`, counted from the last progress of any runner, so that a busy machine delays a run and
    does not end it.

    Args:
        actors: actor handles by name.
        read_states: returns the states of the actors with these names.
        on_up: called with the name of each runner that is up, and the id of its node.
    """

    def __init__(
        self,
        actors: Mapping[str, Any],
        config: RunnerConfig,
        read_states: Callable[[Mapping[str, Any], Mapping[str, float]], dict[str, StartState]] | None = None,
        on_up: Callable[[str, str], None] = lambda name, node: None,
    ) -> None:
        self._actors = dict(actors)
        self._config = config
        self._read_states = read_states or read_start_states
        self._on_up = on_up
        self._states = dict.fromkeys(self._actors, UNPLACED)
        self._warned = False
        self._bundle = {"CPU": config.num_cpus, **config.resources}

    async def wait(self) -> None:
        """Wait until every runner responds.

        Raises:
            PlacementError: the cluster has too few free resources for a runner.
            RunnerLostError: a runner failed while it started, or was placed and made no progress in time.
        """
        ready = {asyncio.ensure_future(actor.ready.remote()): name for name, actor in self._actors.items()}
        try:
            await self._wait(ready)
        finally:
            await cancel_all(ready)

    async def _wait(self, ready: Mapping[asyncio.Future[Any], str]) -> None:
        clock = asyncio.get_running_loop().time
        placement_end = clock() + self._config.placement_timeout_s
        give_up_at = clock() + self._config.start_timeout_s
        late = set(ready)
        while late:
            next_check = give_up_at if clock() >= placement_end else min(placement_end, give_up_at)
            done, late = await asyncio.wait(
                late, timeout=max(next_check - clock(), 0.0), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if task.exception() is None:
                    self._on_up(ready[task], task.result())
            if errors := [error for task in done if (error := task.exception())]:
                raise RunnerLostError(_failure_message(errors[0])) from errors[0]
            if done or await self._check(
                {ready[task] for task in late}, clock() >= placement_end, clock() >= give_up_at
            ):
                give_up_at = clock() + self._config.start_timeout_s

    async def _check(self, late: set[str], placement_over: bool, start_over: bool) -> bool:
        """Return True if a runner made progress since the last check; raise if its time is over."""
        actors = {name: self._actors[name] for name in sorted(late)}
        states = await asyncio.to_thread(self._read_states, actors, self._bundle)
        unplaced = [name for name, state in states.items() if state.phase == "unplaced"]
        if unplaced and placement_over:
            raise PlacementError(self._placement_message(len(unplaced)))
        progress = any(self._states[name] != state for name, state in states.items())
        placed = {name: state for name, state in states.items() if name not in unplaced}
        if placed and start_over and not progress:
            raise RunnerLostError(
                f"{len(placed)} of {len(self._actors)} runners made no progress for "
                f"{self._config.start_timeout_s:g} s (runner.start_timeout_s) while they started: "
                f"{_describe(placed)}. If the machine is only busy, raise runner={{'start_timeout_s': ...}}"
            )
        if placed and not self._warned:
            self._warned = True
            logger.warning(
                "%d of %d runners have resources but are not up yet: %s. They have %g s to make progress "
                "(runner.start_timeout_s)",
                len(placed),
                len(self._actors),
                _describe(placed),
                self._config.start_timeout_s,
            )
        self._states |= states
        return progress or not placed

    def _placement_message(self, unplaced: int) -> str:
        config, nodes = self._config, [node for node in ray.nodes() if node["Alive"]]
        total, free = map(format_amounts, (ray.cluster_resources(), ray.available_resources()))
        return (
            f"{unplaced} of {len(self._actors)} runners cannot be placed: each needs "
            f"{format_amounts(self._bundle)}. After {config.placement_timeout_s:g} s "
            f"(runner.placement_timeout_s) the cluster of {len(nodes)} node(s) has {total}, free now {free}. "
            "Lower n_runners or runner={'num_cpus': ...}, end other work on the cluster, or add nodes"
        )


def _describe(states: Mapping[str, StartState]) -> str:
    described = "; ".join(f"{name} {state}" for name, state in states.items())
    load = f"{os.getloadavg()[0]:.1f} on {available_cpus()} CPUs"
    return f"{described}. The load of the driver's machine is {load}"


def read_start_states(actors: Mapping[str, Any], bundle: Mapping[str, float]) -> dict[str, StartState]:
    """Return how far actors that are not up have come, from Ray.

    Ray calls an actor "pending" both without resources and during its start. Only in the first case its
    request is among the cluster's demands.

    Args:
        bundle: resources of each actor.
    """
    demands = get_cluster_status(ray.get_runtime_context().gcs_address).resource_demands.ray_task_actor_demand
    wanted = {name: amount for name, amount in bundle.items() if amount}
    unplaced = bool(wanted) and any(
        request.bundle.keys() == wanted.keys()
        and all(math.isclose(request.bundle[name], amount) for name, amount in wanted.items())
        for demand in demands
        for request in demand.bundles_by_count
    )
    return {name: _state(actor._actor_id.hex(), unplaced) for name, actor in actors.items()}


def _state(actor_id: str, unplaced: bool) -> StartState:
    try:
        # `ray.util.state` asks the cluster at RAY_ADDRESS or on this machine, which may be another one
        pid = ray_state.actors(actor_id).get("Pid", 0)
    except RayError as error:
        logger.debug("no state of actor %s: %s", actor_id, error)
        pid = 0
    if pid:
        return StartState("loading", pid, actor_id)
    return UNPLACED if unplaced else StartState("starting", 0, actor_id)


def _failure_message(error: BaseException) -> str:
    reason = summarize_ray_error(error)
    hint = (
        ". A module that the agent needs must be importable on every node: put it next to the script, in the "
        "job's working directory, or install it"
    )
    return f"the runners did not start: {reason}{hint if 'No module named' in reason else ''}"
