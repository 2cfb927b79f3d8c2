"""The learners of a run."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from ray.util.placement_group import PlacementGroup, remove_placement_group

from raylight.aio import cancel_all
from raylight.errors import LearnerError, LearnerLostError, PlacementError
from raylight.experience.batch import TrainBatch
from raylight.experience.checkpoints import TrainingStates
from raylight.experience.token_records import RowRecord
from raylight.learner.group import LearnerGroup, bundles
from raylight.learner.local import LocalLearner
from raylight.learner.simulated import SimulatedLearner
from raylight.runner.draining import watch_draining_nodes
from raylight.trainer import served_adapter
from raylight.trainer.cluster import reserve
from raylight.trainer.components.local_serving import LocalServing
from raylight.trainer.components.serving import Serving
from raylight.trainer.parity import Parity, make_probe
from raylight.trainer.publication import Publications
from raylight.trainer.resume import ResumePoint, resume_point_of
from raylight.trainer.served_adapter import PinnedAdapter
from raylight.trainer.settings import ResolvedSettings, ServingSettings, TrainingSettings
from raylight.weight_sync.client import CoordinatorClient


class NodeDrains(Exception):
    """A node of the learners drains; a training state is to be saved, and the learners may move."""


class Learners:
    """The ranks that train the model, and the publication of their weights to the engines.

    Args:
        training, serving: the parts of the settings.
        start: the position at which the run starts.
        show_stage: shows what the run is doing now.
    """

    group: LearnerGroup
    """The ranks, or a learner of another kind with their interface."""
    publications: Publications
    replicas: CoordinatorClient

    def __init__(
        self,
        settings: ResolvedSettings,
        training: TrainingSettings,
        serving: ServingSettings,
        start: ResumePoint,
        show_stage: Callable[[str], None],
    ) -> None:
        self._settings, self._training, self._serving = settings, training, serving
        self._start, self._show_stage = start, show_stage
        self._adapter = serving.name if training.serves_adapter else None
        """Name under which the engines serve the learners' adapter; None if they serve all weights."""
        self.version = start.version
        """Version of the learners' weights."""
        self.restarts = 0
        """Number of times that lost learners were restarted."""
        self._reported_no_sleep = False
        self._placement: PlacementGroup | None = None
        self._refuge: PlacementGroup | None = None
        """Bundles on other nodes, to which the learners can move from a node that drains."""
        self.moves = 0
        """Number of times that the learners moved from a node that drains."""
        self.drain_noticed = asyncio.Event()
        """Set when a node of the learners drains, and again when they can move."""

    async def reserve(self, stack: contextlib.AsyncExitStack) -> None:
        """Reserve the learners' resources as a placement group.

        Raises:
            PlacementError: the cluster has too few resources.
        """
        config = self._training.learner
        if config.kind != "ranks":
            return
        self._placement = await self._place("learners", config.placement_timeout_s)
        stack.callback(self._release)

    def _release(self) -> None:
        for placement in filter(None, (self._placement, self._refuge)):
            remove_placement_group(placement)

    async def _place(self, name: str, timeout_s: float) -> PlacementGroup:
        config = self._training.learner
        return await reserve(f"{self._settings.name}-{name}", bundles(config), config.strategy, timeout_s)

    def open(self, stack: contextlib.AsyncExitStack, serving: Serving) -> None:
        """Start the processes of the ranks, and serve replicas that join from them."""
        coordinator = serving.coordinator
        self.replicas = coordinator.client
        self.group = self._make_group(serving)
        stack.callback(self.group.stop)
        model, algorithm, kind = self._serving, self._training.algorithm, self._training.learner.kind
        probe = make_probe(model.model_path, model.engine.max_model_len, self._settings.seed)
        self.publications = Publications(
            self.group,
            coordinator,
            model.engine,
            algorithm.sync_timeout_s,
            adapter=self._adapter,
            probe=() if kind == "simulated" else probe,
            tolerance=algorithm.max_logprob_mismatch,
            beside_updates=algorithm.max_staleness > 0 and kind != "local",  # whose engine has the weights
        )
        serving_joined = asyncio.create_task(self.publications.serve_joined(lambda: self.version))
        stack.push_async_callback(cancel_all, [serving_joined])

    def _make_group(self, serving: Serving) -> Any:
        config = self._training.learner
        if isinstance(serving, LocalServing):
            return LocalLearner(serving.engine, config)
        if config.kind == "simulated":
            return SimulatedLearner(config)
        assert self._placement is not None, "the ranks have a place"
        return LearnerGroup(self._settings.name, config, self._placement)

    async def start(self) -> None:
        """Load the model.

        Raises:
            LearnerLostError: a rank died, or the ranks were not ready in time.
        """
        training = self._training
        await self.group.setup(
            self._serving.model_path,
            training.algorithm.policy_settings(),
            training.total_steps,
            self._settings.seed,
        )

    async def join(self) -> None:
        """Check the learners with the engines, which are up, and load the training state of a resumed run.

        Raises:
            ConfigError: the learners do not share the run's folders.
            EngineStartError: the engines cannot serve the learners' adapter.
            MismatchError: log-probs of engines and learners differ.
        """
        training = self._training
        if training.checkpoint.path:  # the models in output_dir can be exported from a state
            await self.group.check_storage({"checkpoint.path": training.state_url})
        else:
            await self.group.check_storage({"output_dir": self._settings.folder})
        # an engine may compile at its first request, which belongs to its start
        patience = max(training.algorithm.sync_timeout_s, self._serving.engine.start_timeout_s)
        if self._adapter is not None:
            await served_adapter.publish_initial(self.group, self.replicas, patience)
        await self.publications.check_parity(0, patience)
        if not self._start.is_fresh:
            await self.group.load_state(self._start.state_url, self._start.step, self.version)

    def watches(self) -> list[Coroutine[Any, Any, object]]:
        """Return a coroutine that notices draining nodes. Failures of ranks fail their calls."""
        return [self._notice_draining_nodes()] if self._training.learner.kind == "ranks" else []

    async def counts(self) -> dict[str, int]:
        """Return the numbers of restarts and of moves."""
        return {"learner_restarts": self.restarts, "learner_moves": self.moves}

    async def _notice_draining_nodes(self) -> None:
        """Reserve bundles on other nodes when a node of the learners drains, while they work on. Ray places
        nothing on a draining node."""
        noticed: set[str] = set()
        is_reported = False
        patience_s = self._training.learner.placement_timeout_s
        async for draining in watch_draining_nodes():
            affected = draining.keys() & set(self.group.nodes().values())
            if not affected or self._refuge is not None:
                continue
            if new := affected - noticed:
                noticed |= new
                is_reported = False
                nodes = ", ".join(sorted(node[:8] for node in new))
                self._show_stage(f"node {nodes} drains, and has learners: they move when others have room")
                self.drain_noticed.set()
            remaining_s = min((s for node in affected if (s := draining[node]) is not None), default=math.inf)
            try:
                name = f"learners-{self.moves + 1}"
                self._refuge = await self._place(name, min(patience_s, max(remaining_s, 1.0)))
            except PlacementError as error:
                if not is_reported:
                    is_reported = True
                    self._show_stage(
                        "no other nodes have room for the learners; when their node ends, they restart from "
                        f"the last training state, once Ray can place them: {error}"
                    )
            else:
                self.drain_noticed.set()

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """Update the weights; return metrics. Engines that share a device with the learners sleep
        meanwhile."""
        timeout = self._training.algorithm.sync_timeout_s
        async with self.publications.learners_busy:
            if not self._serving.engine.sleep_while_learning:
                metrics = await self.group.update(batch)
            else:
                try:
                    self._report_no_sleep(await self.replicas.sleep(timeout))
                    metrics = await self.group.update(batch)
                finally:
                    await self.replicas.wake(timeout)
            self.version += 1
        return metrics

    async def row_records(self) -> list[RowRecord]:
        """Return what the last update computed of each row. A row may come several times."""
        return await self.group.row_records()

    def _report_no_sleep(self, reasons: dict[str, Any]) -> None:
        """Show once which replicas cannot sleep, and why."""
        awake = {replica: reason for replica, reason in reasons.items() if reason}
        if awake and not self._reported_no_sleep:
            for replica, reason in awake.items():
                self._show_stage(f"replica {replica} cannot sleep: {reason}")
            self._reported_no_sleep = True

    @property
    def published(self) -> int:
        """Last version that the engines received."""
        return self.publications.published

    async def publish(self) -> Parity | None:
        """Send the current version to all replicas; see `Publications.publish`.

        Raises:
            WeightSyncError: the weights did not reach enough replicas within `sync_timeout_s`.
            MismatchError: a replica's log-probs differ from the learners'.
        """
        return await self.publications.publish(self.version)

    @property
    def pins(self) -> bool:
        """True if the engines can keep a version while later ones are published."""
        return self._adapter is not None and self._training.algorithm.max_staleness > 0

    async def pin(self, step: int) -> PinnedAdapter:
        """Have the engines keep the published version, see `Publications.pin`."""
        return await self.publications.pin(step)

    async def release(self, pinned: PinnedAdapter) -> None:
        """Have the engines drop a pinned version."""
        await self.publications.release(pinned)

    async def recover(self, fault: LearnerLostError) -> ResumePoint:
        """Restart lost learners and load the last training state; return its position. The engines keep
        running.

        Raises:
            LearnerError: the learners were lost more often than `max_restarts` allows.
        """
        limit = self._training.learner.max_restarts
        if self.restarts >= limit:
            raise LearnerError(
                f"the learners were lost more often than learner.max_restarts={limit} allows; the last time: "
                f"{fault}"
            ) from fault
        self.restarts += 1
        self._show_stage("restarting the learners")
        return await self._restart(fault)

    @property
    def can_move(self) -> bool:
        """True if the learners are on a node that drains, and others have room."""
        return self._refuge is not None

    async def wait_for_drain(self) -> NoReturn:
        """Raise NodeDrains as soon as `drain_noticed` is set."""
        await self.drain_noticed.wait()
        raise NodeDrains

    async def move(self) -> ResumePoint:
        """Move the learners from a node that drains, and load the last training state; return its position.

        Raises:
            LearnerError: they did not start elsewhere.
        """
        self.moves += 1
        self._show_stage("moving the learners to other nodes")
        return await self._restart("their node drained")

    async def _restart(self, reason: object) -> ResumePoint:
        """Restart the learners, where they can move to if they can."""
        async with self.publications.learners_busy:
            before, refuge = self._placement, self._refuge
            if refuge is not None:
                self._placement, self._refuge = refuge, None
            try:
                await self.group.restart(self._placement)
            finally:
                if refuge is not None and before is not None:
                    remove_placement_group(before)
            states = TrainingStates(self._training.state_url)
            steps = await asyncio.to_thread(states.steps)
            if not steps:
                raise LearnerError(
                    f"the learners were lost before {states.url} had a training state: {reason}"
                )
            point = resume_point_of(states, steps[-1])
            await self.group.load_state(states.url, point.step, point.version)
            self.version = point.version
        self.notice_version()
        return point

    def notice_version(self) -> None:
        """Notice that the learners work, and may hold a version that joined replicas lack."""
        self.publications.notice_version()

    async def wait_for_failure(self) -> NoReturn:
        """Wait until a replica that joined cannot be served, because the learners have failed.

        Raises:
            LearnerError: the failure.
        """
        await self.publications.wait_for_failure()

    async def save(self, folder: str, pinned: PinnedAdapter | None = None) -> None:
        """Write the model in Hugging Face format.

        Args:
            pinned: the version to write; None for the current one.
        """
        await self.group.save(folder, *(() if pinned is None else pinned.payload_refs))

    async def save_state(self, step: int, metadata: dict[str, Any]) -> None:
        """Write the training state after a step, in the background.

        Args:
            metadata: JSON values that are stored with the state.

        Raises:
            CheckpointError, DiskError: the last state could not be written.
        """
        checkpoint = self._training.checkpoint
        await self.group.save_state(
            self._training.state_url, step, metadata, checkpoint.keep, checkpoint.write_timeout_s
        )

    async def finish_saving(self) -> None:
        """Wait until the last training state is written.

        Raises:
            CheckpointError, DiskError: it could not be written in time.
        """
        await self.group.finish_saving(self._training.checkpoint.write_timeout_s)
