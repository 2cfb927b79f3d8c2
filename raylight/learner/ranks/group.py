"""The learner group in the driver: ranks in a placement group that are called, fail and restart together."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import secrets
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylight._utils.aio import cancel_all, wait_while_progressing
from raylight.config import LearnerConfig
from raylight.engines.protocol import LoraAdapter
from raylight.errors import LearnerError, LearnerLostError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.batches.shards import shard_batch, shard_by_model
from raylight.experience.batches.token_records import RowRecord
from raylight.learner.faults import classify_in_driver, reports_lost_peer
from raylight.learner.protocol import Learner, LearnerSettings
from raylight.learner.ranks.actor import SENDING_GROUP, WATCHDOG_GROUP, WATCHDOG_THREADS, LearnerActor
from raylight.learner.state.checkpoints import TrainingStates
from raylight.learner.state.shared_storage import check_shared
from raylight.types import JsonObject
from raylight.weights.sender import PublicationSettings

logger = logging.getLogger(__name__)

ROOT_CAUSE_TIMEOUT_S = 5.0
"""Seconds to wait for the failure of a rank that another rank reports as lost."""
STACKS_TIMEOUT_S = 5.0
GRACE_S = 60.0
"""Seconds beyond the timeout of a call that itself raises an error when it expires."""


def bundles(config: LearnerConfig) -> list[dict[str, float]]:
    """Return the resources of each rank, as bundles of a placement group."""
    resources = {"CPU": config.num_cpus, "GPU": config.num_gpus, **config.resources}
    return [{name: amount for name, amount in resources.items() if amount} for _ in range(config.n)]


def order_by_node(nodes: Mapping[int, str]) -> list[int]:
    """Return the index of each rank's bundle: ranks in a row share a node, as the ranks of a shard or of a
    sequence should.

    Args:
        nodes: the node of each bundle.
    """
    seen = {node: position for position, node in reversed(list(enumerate(nodes[i] for i in sorted(nodes))))}
    return sorted(nodes, key=lambda bundle: (seen[nodes[bundle]], bundle))


class LearnerGroup(Learner):
    """A learner of ranks that are called, fail and restart together.

    Laws: every call has a deadline, for all of it or for each of its parts. The first failure of a rank ends
    the call for all ranks, because the others may wait for the failed one forever. After a LearnerError the
    ranks are out of step: a concurrent call ends with the same error, and every call raises until `restart`.

    Args:
        placement: a placed group with one bundle per rank.
        actor: class of a rank.
    """

    def __init__(
        self, namespace: str, config: LearnerConfig, placement: PlacementGroup, actor: type = LearnerActor
    ) -> None:
        self._namespace = namespace
        self._config = config
        self._placement = placement
        remote: Any = ray.remote  # its type stubs lack concurrency groups
        self._class = remote(concurrency_groups={WATCHDOG_GROUP: WATCHDOG_THREADS, SENDING_GROUP: 1})(actor)
        self._setup_args: tuple[str, LearnerSettings, int, int] | None = None
        self._failure: asyncio.Future[LearnerError] = asyncio.Future()
        """Done with the error that made the ranks unusable."""
        self._actors = self._start()

    def _start(self) -> list[Any]:
        config = self._config
        order = order_by_node(self.nodes())
        return [
            self._class.options(
                name=f"learner-{rank}",
                namespace=self._namespace,
                num_cpus=config.num_cpus,
                num_gpus=config.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=order[rank]
                ),
            ).remote(rank, config.n, config, self._namespace)
            for rank in range(config.n)
        ]

    def nodes(self) -> dict[int, str]:
        """Return the id of the node of each bundle."""
        return placement_group_table(self._placement)["bundles_to_node_id"]

    async def setup(self, model_path: str, settings: LearnerSettings, total_steps: int, seed: int) -> None:
        """Set up all ranks in parallel. `restart` uses the arguments again.

        Raises:
            LearnerLostError: the ranks were not ready within `start_timeout_s`, or one died.
        """
        args = self._setup_args = (model_path, settings, total_steps, seed)
        limit, clock = self._config.start_timeout_s, asyncio.get_running_loop().time
        end = clock() + limit
        (address,) = await self._call(
            "open_rendezvous", ranks=[0], timeout_setting="start_timeout_s", limit=limit
        )
        await self._call("setup", address, *args, timeout_setting="start_timeout_s", limit=end - clock())

    async def check_storage(self, folders: Mapping[str, str]) -> None:
        """Check that learners on other nodes share folders with the driver; free if there are none."""
        nodes = [self.nodes()[bundle] for bundle in order_by_node(self.nodes())]
        if set(nodes) <= {ray.get_runtime_context().get_node_id()}:
            return
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

        async def ask(urls: list[str], token: str) -> list[Mapping[str, str]]:
            return await self._call("answer_driver", urls, token)

        await check_shared(folders, [addresses[node] for node in nodes], secrets.token_hex(4), ask)

    async def restart(self, placement: PlacementGroup | None = None) -> None:
        """Kill all ranks, and start them again in the same or other bundles, with the initial weights.

        Raises:
            LearnerLostError: the ranks did not end, or were not ready again, within `start_timeout_s`.
        """
        ends = [asyncio.ensure_future(actor.wait_forever.remote()) for actor in self._actors]
        self.stop()
        _, alive = await asyncio.wait(ends, timeout=self._config.start_timeout_s)
        await cancel_all(ends)
        if alive:
            raise LearnerLostError(
                f"{len(alive)} learners did not end within {self._config.start_timeout_s:g} s of being "
                "killed; end their processes on their nodes, or raise start_timeout_s"
            )
        self._placement = placement or self._placement
        self._actors, self._failure = self._start(), asyncio.Future()
        assert self._setup_args is not None, "restart follows a setup"
        await self.setup(*self._setup_args)

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """Update the policy with a batch, and return metrics. Each rank receives its own rows only."""
        shards = await asyncio.to_thread(self._put_shards, batch)
        return (await self._call("update", shards))[0]

    async def evaluate(self, batch: TrainBatch) -> dict[str, float]:
        """Return sums of a supervised model's figures over a batch, and their count."""
        shards = await asyncio.to_thread(self._put_shards, batch)
        return (await self._call("evaluate", shards))[0]

    async def row_records(self) -> list[RowRecord]:
        return [record for records in await self._call("row_records") for record in records]

    def _put_shards(self, batch: TrainBatch) -> list[object]:
        """Put each rank's shard into the object store; the ranks of a sequence-parallel group share one."""
        assert self._setup_args is not None, "an update follows a setup"
        ranks, settings = self._config.n // self._config.ulysses, self._setup_args[1]
        if isinstance(settings, dict):
            by_name = {name: model.policy for name, model in settings.items()}
            return [ray.put(shards) for shards in shard_by_model(batch, by_name, ranks)]
        return [ray.put(shard) for shard in shard_batch(batch, settings, ranks)]

    async def logprobs(self, ids: list[int], model: str = "") -> list[float]:
        return (await self._call("logprobs", ids, model))[0]

    async def take_snapshot(self, ids: list[int], settings: PublicationSettings) -> list[float]:
        return (await self._call("take_snapshot", ids, settings))[0]

    async def publish_weights(self, version: int, token: str, settings: PublicationSettings) -> None:
        """Send the weights to the engine replicas that lack them; see `LearnerActor.publish_weights`."""
        await self._call(
            "publish_weights",
            version,
            token,
            settings,
            timeout_setting="sync_timeout_s",
            limit=settings.limit_s,
            group=SENDING_GROUP if settings.during_updates else None,
        )

    async def export_adapter(self, model: str = "") -> tuple[int, LoraAdapter]:
        """Return the current version and the adapter."""
        return (await self._call("export_adapter", model))[0]

    async def save(self, folder: str, adapters: Mapping[str, Awaitable[LoraAdapter]] | None = None) -> None:
        """Write the model, or each of several; rank 0 writes the files."""
        found = {name: await ref for name, ref in (adapters or {}).items()}
        await self._call("save", folder, found)

    async def save_state(
        self, url: str, step: int, metadata: JsonObject, keep: int, timeout_s: float
    ) -> None:
        """Copy the training state of a step; each rank writes its part."""
        await self.finish_saving(timeout_s)
        content = TrainingStates(url).new_content(step)
        await self._call("save_state", url, step, content, metadata, keep, timeout_s)

    async def finish_saving(self, timeout_s: float) -> None:
        """Wait until the last training state is written."""
        # not a collective: slow storage does not justify a restart of the ranks
        await self._call("finish_saving", timeout_s, limit=timeout_s + GRACE_S)

    async def load_state(self, url: str, step: int, version: int) -> None:
        await self._call("load_state", url, step, version)

    def stop(self) -> None:
        """Kill all ranks."""
        for actor in self._actors:
            ray.kill(actor)

    async def _call(
        self,
        method: str,
        *args: object,
        ranks: Iterable[int] | None = None,
        timeout_setting: str = "collective_timeout_s",
        limit: float | None = None,
        group: str | None = None,
    ) -> list[Any]:
        """Call a method of `LearnerActor` on ranks, and return the result of each.

        Args:
            ranks: None for all ranks.
            timeout_setting: the setting that defines the deadline: `start_timeout_s` of the whole call,
                `collective_timeout_s` of each part of it that ranks mark as progress.
            limit: seconds for the whole call; None: the setting's.
            group: concurrency group of the ranks that executes the call.

        Raises:
            LearnerLostError: a rank died, or the ranks exceeded the deadline.
            LearnerMemoryError: a rank ran out of memory.
            LearnerError: a rank raised an ordinary exception.
            RaylightError: a rank raised a typed error.
        """
        if self._failure.done():
            raise LearnerLostError(
                f"the learners have failed and were not restarted: {self._failure.result()}"
            )
        bounded = limit is not None or timeout_setting == "start_timeout_s"
        limit = getattr(self._config, timeout_setting) if limit is None else limit
        failure = self._failure  # a restart begins another one
        calls: dict[asyncio.Future[object], int] = {
            asyncio.ensure_future(
                self._actors[rank]
                .call.options(name=f"LearnerActor.{method}", concurrency_group=group)
                .remote(method, limit, *args)
            ): rank
            for rank in (range(self._config.n) if ranks is None else ranks)
        }
        try:
            idle = None if bounded else functools.partial(self._idle_s, method, calls)
            done, late = await wait_while_progressing(calls, limit, idle, failure)
            if any(call.exception() for call in done):
                rank, error = await self._root_cause(calls)
                typed_error = classify_in_driver(error, rank, self._config, self._log_command(rank))
                raise _mark_failed(failure, typed_error, error) from None
            if late and failure.done():
                raise type(failure.result())(str(failure.result()))
            if late:
                hang = await self._hang_error(
                    method, timeout_setting, limit, bounded, [calls[call] for call in late]
                )
                raise _mark_failed(failure, hang)
            return [call.result() for call in calls]
        finally:
            await cancel_all(calls)

    async def _idle_s(self, method: str, calls: dict[asyncio.Future[object], int]) -> float:
        """Return the seconds since any rank made progress whose call is not done; infinity if one does not
        respond."""
        ranks = [rank for call, rank in calls.items() if not call.done()]
        requests = [asyncio.ensure_future(self._actors[rank].idle_s.remote(method)) for rank in ranks]
        if requests:
            await asyncio.wait(requests, timeout=STACKS_TIMEOUT_S)
        idle = [
            request.result() if request.done() and not request.exception() else math.inf
            for request in requests
        ]
        await cancel_all(requests)
        return math.inf if math.inf in idle else min(idle, default=0.0)

    async def _root_cause(self, calls: dict[asyncio.Future[object], int]) -> tuple[int, BaseException]:
        """Return the rank that failed first and its error.

        A rank that only lost a peer often fails before the driver receives the peer's error, so that is
        awaited for a while.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + ROOT_CAUSE_TIMEOUT_S
        while True:
            errors = [
                (rank, error) for call, rank in calls.items() if call.done() and (error := call.exception())
            ]
            causes = [(rank, error) for rank, error in errors if not reports_lost_peer(error)]
            pending, left = [call for call in calls if not call.done()], end - clock()
            if causes or not pending or left <= 0:
                return (causes or errors)[0]
            await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def _hang_error(
        self, method: str, timeout_setting: str, limit: float, bounded: bool, late: list[int]
    ) -> LearnerLostError:
        """Log the stacks of all ranks, and return an error with their summaries."""
        requests = {
            asyncio.ensure_future(actor.dump_stacks.remote(method)): rank
            for rank, actor in enumerate(self._actors)
        }
        await asyncio.wait(requests, timeout=STACKS_TIMEOUT_S)
        positions = []
        limit = getattr(self._config, timeout_setting, limit)
        for request, rank in requests.items():
            if not request.done() or request.exception():
                positions.append(
                    f"{rank} does not respond (it has not started, is dead or is stuck; see "
                    f"`{self._log_command(rank)}`)"
                )
                continue
            stacks = request.result()
            logger.error(
                "learner %d after %g s of waiting for %s; its threads, innermost call last:\n%s",
                rank,
                limit,
                method,
                stacks.text,
            )
            positions.append(
                f"{rank} is at {stacks.summary}"
                if stacks.summary
                else f"{rank} is {'idle' if rank in late else 'done'}"
            )
        await cancel_all(requests)
        return LearnerLostError(
            f"{len(late)} of {self._config.n} learners "
            f"{'did not finish' if bounded else 'made no progress in'} {method} within {limit:g} s "
            f"({timeout_setting}): learner {'; learner '.join(positions)}. The stacks of all threads are in "
            f"the driver's log; raise {timeout_setting} if the work takes that long"
        )

    def _log_command(self, rank: int) -> str:
        return f"ray logs actor --id {self._actors[rank]._actor_id.hex()} --err"


def _mark_failed(
    failure: asyncio.Future[LearnerError], typed_error: BaseException, original: BaseException | None = None
) -> BaseException:
    """Return the typed error. If it is a LearnerError, mark the ranks as failed and log the original."""
    if isinstance(typed_error, LearnerError):
        if not failure.done():
            failure.set_result(typed_error)
        if original is not None:
            logger.error("%s", original)
    return typed_error
