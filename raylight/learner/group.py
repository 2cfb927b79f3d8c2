"""The learner group as the driver sees it: ranks in a placement group, called together, lost together and started anew together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylight.config import LearnerConfig
from raylight.errors import LearnerError, LearnerLostError
from raylight.experience.batch import TrainBatch
from raylight.learner.actor import WATCH, WATCH_THREADS, LearnerActor
from raylight.learner.faults import fault_of, is_hearsay

logger = logging.getLogger(__name__)

CAUSE_S = 5.0
"""How long to wait for the death of the rank that another one says it has lost."""
STACKS_TIMEOUT_S = 5.0


def bundles(config: LearnerConfig) -> list[dict[str, float]]:
    """What each rank asks of the cluster, for a placement group."""
    one = {"CPU": config.num_cpus, "GPU": config.num_gpus}
    return [{name: amount for name, amount in one.items() if amount} for _ in range(config.n)]


class LearnerGroup:
    """Starts, calls, restarts and stops the ranks.

    Every call has a deadline, and the first failure of a rank ends it for all, because the others may wait for the failed one
    forever. After a LearnerError the ranks are out of step, and only `restart` makes them answer again.

    Args:
        placement: a placed group with one bundle per rank.
        actor: what a rank is.
    """

    def __init__(
        self, namespace: str, config: LearnerConfig, placement: PlacementGroup, actor: type = LearnerActor
    ) -> None:
        self._namespace = namespace
        self._config = config
        self._placement = placement
        remote: Any = ray.remote  # whose types know no concurrency groups
        self._class = remote(concurrency_groups={WATCH: WATCH_THREADS})(actor)
        self._setup: tuple[Any, ...] = ()
        self._broken = ""
        self._actors = self._start()

    def _start(self) -> list[Any]:
        config = self._config
        return [
            self._class.options(
                name=f"learner-{rank}",
                namespace=self._namespace,
                num_cpus=config.num_cpus,
                num_gpus=config.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=rank
                ),
            ).remote(rank, config.n, config)
            for rank in range(config.n)
        ]

    async def setup(self, *args: Any) -> None:
        """Bring all ranks up in parallel.

        Args:
            args: those of `LearnerActor.setup` after the first; `restart` gives them again.

        Raises:
            LearnerLostError: they were not up within `start_timeout_s`, or one died.
        """
        self._setup = args
        limit, clock = self._config.start_timeout_s, asyncio.get_running_loop().time
        end = clock() + limit
        (address,) = await self._call([0], "open_rendezvous", setting="start_timeout_s", limit=limit)
        await self._call(self._ranks, "setup", address, *args, setting="start_timeout_s", limit=end - clock())

    async def restart(self) -> None:
        """Kill all ranks and start them anew where they were, set up as they were at first: with the model's first weights.

        Raises:
            LearnerLostError: they did not end, or were not up again, within `start_timeout_s`.
        """
        ends = [asyncio.ensure_future(actor.linger.remote()) for actor in self._actors]
        self.stop()
        _, alive = await asyncio.wait(ends, timeout=self._config.start_timeout_s)
        await _let_go(ends)
        if alive:
            raise LearnerLostError(
                f"{len(alive)} learner(s) did not end within {self._config.start_timeout_s:g} s of being killed"
            )
        self._actors = self._start()
        self._broken = ""
        await self.setup(*self._setup)

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """One update of the policy; returns metrics."""
        return (await self._all("update", ray.put(batch)))[0]

    async def logprobs(self, ids: list[int]) -> list[float]:
        """The policy's log-probs at temperature 1 of `ids[1:]`, to be compared with the engines'."""
        return (await self._all("logprobs", ids))[0]

    async def export(self) -> tuple[int, list[Any]]:
        """The current version and a box with the object reference of its weights."""
        return (await self._all("export"))[0]

    async def save(self, folder: str) -> None:
        """Write the model in Hugging Face format to a folder that the ranks can reach."""
        await self._all("save", folder)

    async def save_state(self, url: str, step: int, about: dict[str, Any], keep: int) -> None:
        """Have the training state of a step written in the background; see `checkpoints.TrainingStates`.

        Args:
            about: JSON, kept with it.
            keep: how many states remain.
        """
        await self._all("save_state", url, step, about, keep)

    async def finish_saving(self) -> None:
        """Wait until the last state is written."""
        await self._all("finish_saving")

    async def load_state(self, url: str, step: int, version: int) -> None:
        """Continue from the state of a step, whose weights are called `version` from now on."""
        await self._all("load_state", url, step, version)

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    @property
    def _ranks(self) -> range:
        return range(self._config.n)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank; see `_call`."""
        limit = self._config.collective_timeout_s
        return await self._call(self._ranks, method, *args, setting="collective_timeout_s", limit=limit)

    async def _call(
        self, ranks: Sequence[int], method: str, *args: Any, setting: str, limit: float
    ) -> list[Any]:
        """Call a method on these ranks; returns what each of them returned.

        Args:
            setting: where the deadline comes from, of which `limit` seconds are left.

        Raises:
            LearnerLostError: a rank died, or they were not done within `limit` seconds.
            LearnerMemoryError: a rank ran out of memory.
            LearnerError: a rank failed otherwise.
            RaylightError: what a rank raised on purpose.
        """
        if self._broken:
            raise LearnerLostError(f"the learners have not been started anew since: {self._broken}")
        calls: dict[asyncio.Future[Any], int] = {
            asyncio.ensure_future(
                self._actors[rank].call.options(name=f"LearnerActor.{method}").remote(method, limit, *args)
            ): rank
            for rank in ranks
        }
        try:
            done, late = await asyncio.wait(calls, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
            if any(call.exception() for call in done):
                rank, error = await self._first_cause(calls)
                raise self._noted(fault_of(error, rank, self._config, self._log_of(rank)), error) from None
            if late:
                raise self._noted(await self._hang(method, setting, [calls[call] for call in late]))
            return [call.result() for call in calls]
        finally:
            await _let_go(calls)

    async def _first_cause(self, calls: dict[asyncio.Future[Any], int]) -> tuple[int, BaseException]:
        """The rank that failed, and how: one that only lost another hears of it sooner than the driver does."""
        clock = asyncio.get_running_loop().time
        end = clock() + CAUSE_S
        while True:
            errors = [
                (rank, error) for call, rank in calls.items() if call.done() and (error := call.exception())
            ]
            telling = [(rank, error) for rank, error in errors if not is_hearsay(error)]
            waiting, left = [call for call in calls if not call.done()], end - clock()
            if telling or not waiting or left <= 0:
                return (telling or errors)[0]
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def _hang(self, method: str, setting: str, late: list[int]) -> LearnerLostError:
        """Put the stacks of all ranks into the log; returns an error that tells where they are."""
        asked = {
            asyncio.ensure_future(actor.stacks.remote()): rank for rank, actor in enumerate(self._actors)
        }
        await asyncio.wait(asked, timeout=STACKS_TIMEOUT_S)
        places = []
        limit = getattr(self._config, setting)
        for task, rank in asked.items():
            if not task.done() or task.exception():
                places.append(
                    f"{rank} says nothing (it has not started, is dead or is stuck; see `{self._log_of(rank)}`)"
                )
                continue
            stacks = task.result()
            logger.error(
                "learner %d after %g s of %s; its threads, innermost call last:\n%s",
                rank,
                limit,
                method,
                stacks.text,
            )
            places.append(
                f"{rank} is at {stacks.summary}"
                if stacks.summary
                else f"{rank} is {'idle' if rank in late else 'done'}"
            )
        await _let_go(asked)
        return LearnerLostError(
            f"{len(late)} of {self._config.n} learners were not done with {method} within {limit:g} s ({setting}): learner "
            f"{'; learner '.join(places)}. The stacks of all threads are in the driver's log; raise {setting} if the work takes "
            "so long"
        )

    def _noted(self, fault: BaseException, error: BaseException | None = None) -> BaseException:
        """The same fault; what made the ranks useless is kept in mind, and Ray's whole account of it is in the log."""
        if isinstance(fault, LearnerError):
            self._broken = str(fault)
            if error is not None:
                logger.error("%s", error)
        return fault

    def _log_of(self, rank: int) -> str:
        return f"ray logs actor --id {self._actors[rank]._actor_id.hex()} --err"


async def _let_go(tasks: Any) -> None:
    """Wait no longer for what is under way."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
