"""`RunLearner`: starts the learner of a run, and restarts its ranks after a loss or a move."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine
from typing import NoReturn

from ray.util.placement_group import PlacementGroup, remove_placement_group

from raylight.errors import LearnerError, LearnerLostError, PlacementError
from raylight.experience.batches.batch import TrainBatch
from raylight.learner.protocol import Learner
from raylight.learner.ranks.group import LearnerGroup, bundles
from raylight.learner.state.checkpoints import TrainingStates
from raylight.runner.draining import watch_draining_nodes
from raylight.trainer.components.publication import PinnedAdapter
from raylight.trainer.ray_session.connection import reserve
from raylight.trainer.spec.resume import ResumePoint, resume_point_of
from raylight.trainer.spec.settings import CommonSettings, LearningSettings
from raylight.types import JsonObject


class NodeDrains(Exception):
    """A node of the learners drains; a training state is to be saved, and the learners may move."""


class RunLearner:
    """The learner of a run's model: its resources, training states, restarts and moves.

    Args:
        training: the part of the settings.
        model_path: folder of the initial model.
        start: the position at which the run starts.
        show_stage: shows what the run is doing now.
    """

    learner: Learner
    _placement: PlacementGroup
    """Bundles of the ranks, if the learner has ranks."""

    def __init__(
        self,
        settings: CommonSettings,
        training: LearningSettings,
        model_path: str,
        start: ResumePoint,
        show_stage: Callable[[str], None],
    ) -> None:
        self._settings, self._training, self._model_path = settings, training, model_path
        self._start, self._show_stage = start, show_stage
        self.version = start.version
        """Version of the learners' weights."""
        self.restarts = 0
        """Number of times that lost learners were restarted."""
        self._standby_group: PlacementGroup | None = None
        """Bundles on other nodes, to which the learners can move from a node that drains."""
        self.moves = 0
        """Number of times that the learners moved from a node that drains."""
        self.drain_noticed = asyncio.Event()
        """Set when a node of the learners drains, and again when they can move."""

    async def reserve(self, stack: contextlib.AsyncExitStack) -> None:
        """Reserve the resources of ranks as a placement group.

        Raises:
            PlacementError: the cluster has too few resources.
        """
        self._placement = await self._place("learners", self._training.learner.placement_timeout_s)
        stack.callback(self._release)

    def _release(self) -> None:
        for placement in filter(None, (self._placement, self._standby_group)):
            remove_placement_group(placement)

    async def _place(self, name: str, timeout_s: float) -> PlacementGroup:
        config = self._training.learner
        return await reserve(f"{self._settings.name}-{name}", bundles(config), config.strategy, timeout_s)

    def open_ranks(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the processes of the ranks, whose resources are reserved."""
        self.learner = LearnerGroup(self._settings.name, self._training.learner, self._placement)
        stack.callback(self.learner.stop)

    async def start(self) -> None:
        """Load the model.

        Raises:
            LearnerLostError: a rank died, or the ranks were not ready in time.
        """
        training = self._training
        await self.learner.setup(
            self._model_path,
            training.learner_settings,
            training.total_steps,
            self._settings.seed,
        )

    async def check_storage(self) -> None:
        """Check that the learners share the run's folders.

        Raises:
            ConfigError: they do not.
        """
        training = self._training
        if training.checkpoint.path:  # the models in output_dir can be exported from a state
            await self.learner.check_storage({"checkpoint.path": training.state_url})
        else:
            await self.learner.check_storage({"output_dir": self._settings.folder})

    async def load_start(self) -> None:
        """Load the training state of a resumed run."""
        if not self._start.is_fresh:
            await self.learner.load_state(self._start.state_url, self._start.step, self.version)

    def watches(self) -> list[Coroutine[object, object, object]]:
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
            affected = draining.keys() & set(self.learner.nodes().values())
            if not affected or self._standby_group is not None:
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
                self._standby_group = await self._place(name, min(patience_s, max(remaining_s, 1.0)))
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
        """Update the weights; return metrics."""
        metrics = await self.learner.update(batch)
        self.version += 1
        return metrics

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
        return self._standby_group is not None

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
        """Restart the ranks, on the reserved bundles if any."""
        before, standby = None, self._standby_group
        if standby is not None:
            before, self._placement, self._standby_group = self._placement, standby, None
        try:
            await self.learner.restart(standby)
        finally:
            if before is not None:
                remove_placement_group(before)
        states = TrainingStates(self._training.state_url)
        steps = await asyncio.to_thread(states.steps)
        if not steps:
            raise LearnerError(f"the learners were lost before {states.url} had a training state: {reason}")
        point = resume_point_of(states, steps[-1])
        await self.learner.load_state(states.url, point.step, point.version)
        self.version = point.version
        return point

    async def save(self, folder: str, pinned: PinnedAdapter | None = None) -> None:
        """Write the model in Hugging Face format.

        Args:
            pinned: the version to write; None for the current one.
        """
        await self.learner.save(folder, None if pinned is None else pinned.payload_refs)

    async def save_state(self, step: int, metadata: JsonObject) -> None:
        """Write the training state after a step, in the background.

        Args:
            metadata: JSON values that are stored with the state.

        Raises:
            CheckpointError, DiskError: the last state could not be written.
        """
        checkpoint = self._training.checkpoint
        await self.learner.save_state(
            self._training.state_url, step, metadata, checkpoint.keep, checkpoint.write_timeout_s
        )

    async def finish_saving(self) -> None:
        """Wait until the last training state is written.

        Raises:
            CheckpointError, DiskError: it could not be written in time.
        """
        await self.learner.finish_saving(self._training.checkpoint.write_timeout_s)
