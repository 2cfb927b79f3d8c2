"""The components of a run: composed from its settings, started together, watched, and stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self

from raylight._utils.aio import cancel_all, task_group
from raylight.config import SessionConfig
from raylight.runner.scaling import ScaleRequests
from raylight.store.client import StoreClient
from raylight.trainer.components import Component
from raylight.trainer.components.endpoints import Endpoints
from raylight.trainer.components.learners import Learners
from raylight.trainer.components.local_model import LocalModel
from raylight.trainer.components.reward_models import RewardModels
from raylight.trainer.components.run_learner import RunLearner
from raylight.trainer.components.run_metrics import ComponentMetrics
from raylight.trainer.components.runners import OutsideAgents, Runners
from raylight.trainer.components.served_model import ServedModel, ServingContext
from raylight.trainer.components.store import RunStore, cancel_undecided
from raylight.trainer.components.teacher import Teachers
from raylight.trainer.ray_session.cluster_monitor import drop_if_lost
from raylight.trainer.spec.resume import ResumePoint, fresh_start
from raylight.trainer.spec.settings import (
    CommonSettings,
    RolloutSettings,
    ServedSettings,
    SupervisedRunSettings,
    TrainedSettings,
    TrainingSettings,
)
from raylight.weights.starts import derive_seed

logger = logging.getLogger(__name__)


class RunComponents(ABC):
    """The running components of one run. Use `async with`: the exit stops everything that was started.

    Args:
        show_stage: shows what the run is doing now.
        owns_cluster: True if the Ray cluster ends with this run.
        start: the position at which the run starts; None is a fresh start.
    """

    def __init__(
        self,
        settings: CommonSettings,
        show_stage: Callable[[str], None],
        owns_cluster: bool,
        start: ResumePoint | None = None,
    ) -> None:
        self.settings, self.start = settings, start or fresh_start()
        self._name, self._show_stage, self._owns_cluster = settings.name, show_stage, owns_cluster
        self._stack = contextlib.AsyncExitStack()
        self._components: list[Component] = []

    @abstractmethod
    async def _open(self) -> None:
        """Start the components, each of which registers its end with the stack."""

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        drop_if_lost(self._stack)
        try:
            await self._stack.aclose()  # continues with the remaining callbacks when one fails
        except Exception:  # the run's own result or error is more important
            logger.exception("some components of %s could not be stopped", self._name)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Watch the components during a block, which is the run's work. If a component fails for good, cancel
        the block, and raise the component's error."""
        task, failures, is_over = asyncio.current_task(), [], False
        assert task is not None, "only a task can be watched"

        def end(watch: asyncio.Task[object]) -> None:
            if not is_over and not watch.cancelled() and (error := watch.exception()) is not None:
                failures.append(error)
                if len(failures) == 1:
                    task.cancel()

        watching = [asyncio.create_task(w) for component in self._components for w in component.watches()]
        for watch in watching:
            watch.add_done_callback(end)
        try:
            yield
        except BaseException:
            if not failures:
                raise
            task.uncancel()
            raise failures[0] from None
        finally:
            is_over = True
            await cancel_all(watching)

    async def counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for component in self._components:
            counts |= await component.counts()
        return counts


class SupervisedComponents(RunComponents):
    """The learners of a run without rollouts, which needs nothing else."""

    settings: SupervisedRunSettings
    learner: RunLearner

    async def _open(self) -> None:
        training, stack = self.settings.training, self._stack
        self.learner = RunLearner(self.settings, training, training.model_path, self.start, self._show_stage)
        await self.learner.reserve(stack)
        self.learner.open_ranks(stack)
        self._show_stage("starting the learners")
        await self.learner.start()
        await self.learner.check_storage()
        await self.learner.load_start()
        self._components = [self.learner]


class RolloutComponents(RunComponents):
    """The store, the models and the runners of a run with rollouts."""

    settings: RolloutSettings
    store: StoreClient
    models: list[ServedModel]
    """The model that the run serves, if it serves one."""
    endpoints: Endpoints
    runners: Runners | OutsideAgents

    def __init__(self, settings: RolloutSettings, *others: Any) -> None:
        super().__init__(settings, *others)
        self._context = ServingContext(settings.name, settings.secret, self._show_stage, self._owns_cluster)
        self.reward_models = RewardModels(self._context, settings.reward_models)
        """The reward models that the group reward calls, perhaps none."""

    async def _open(self) -> None:
        settings, stack, show = self.settings, self._stack, self._show_stage
        store = RunStore(settings, self.start.same_run, show)
        self.store = await store.open(stack)
        self.runners = self._make_runners()
        await self._open_models()
        self.runners.open(stack)
        for model in self.models:
            model.prepare(await self._sampling_seed(), self.runners.most_rollouts())
        await self._start()
        await self.store.continue_time()
        resizable = self.runners.resizable | self.endpoints.resizable
        scaling = ScaleRequests(settings.name, self.store, resizable, show)
        metrics = ComponentMetrics(settings.name, self.store, self.runners.metrics, self.endpoints.metrics)
        self._components += [store, self.runners, *self.models, self.endpoints]
        self._components += [self.reward_models, scaling, metrics]

    async def _open_models(self) -> None:
        """Prepare the served model and the reward models, before runners can take rollouts."""
        settings = self.settings
        self.models = [self._make_model(settings)] if isinstance(settings, ServedSettings) else []
        for model in self.models:
            await model.open(self._stack)
        self.endpoints = Endpoints(self._context, self.models, self.store)
        await self.reward_models.open(self._stack)

    def _make_model(self, settings: ServedSettings) -> ServedModel:
        return ServedModel(self._context, settings.serving, self.store)

    def _make_runners(self) -> Runners | OutsideAgents:
        settings = self.settings
        if isinstance(settings.agents, SessionConfig):
            return OutsideAgents(settings.agents)
        return Runners(settings, settings.agents, self.store, self._show_stage)

    async def _start(self) -> None:
        """Start the models and the runners side by side, and publish the resources with their addresses."""
        await self._start_together({})
        await self.endpoints.offer(self.settings.resources, self._stack)

    async def _start_together(self, others: dict[str, Coroutine[object, object, object]]) -> None:
        """Start the models, the runners and others.

        Args:
            others: coroutines that start them, by name.
        """
        starts = dict(others)
        if self.models:
            starts = {"the engine": self._start_models()} | starts
        if self.runners.is_started:
            starts["the runners"] = self.runners.start()
        *first, last = starts
        self._show_stage(f"starting {', '.join(first)}{' and ' if first else ''}{last}")
        async with task_group() as tasks:
            for start in starts.values():
                tasks.create_task(start)

    async def _start_models(self) -> None:
        """Start one model after the other: two must not start Serve."""
        for model in self.models:
            await model.start()
        await self.reward_models.start()

    async def _sampling_seed(self) -> int:
        """Return the engines' seed. A resumed run must not repeat responses of groups that it completes.

        A store that was lost has no attempts; the step then tells the resumed run from the first one.
        """
        if self.start.is_fresh and not self.start.same_run:
            return self.settings.seed
        attempts = (await self.store.statistics())["total_attempts"]
        return derive_seed(self.settings.seed, "resumed", self.start.step, attempts)


class PolicyComponents(RolloutComponents):
    """The components of a run that trains a policy."""

    settings: TrainedSettings
    learners: Learners
    teachers: Teachers | None = None
    """The models that score the tokens of the policy, if there are such."""

    @property
    def training(self) -> TrainingSettings:
        """The training part of the settings."""
        return self.settings.training

    async def _open(self) -> None:
        self.learners = Learners(self.settings, self.start, self._show_stage)
        if self.training.learner.kind == "ranks":
            await self.learners.reserve(self._stack)
        await super()._open()
        self._components += [self.learners, *(() if self.teachers is None else (self.teachers,))]

    async def _open_models(self) -> None:
        if self.start.same_run:
            await cancel_undecided(self.store, self.start, keeps=not self.runners.is_started)
        await super()._open_models()
        (model,) = self.models
        self.learners.open(self._stack, model)
        if self.training.served_teachers or len(self.training.teachers) > 1:
            choice = self.training.algorithm.teacher_choice
            self.teachers = Teachers(self._context, self.training.teachers, choice)
            await self.teachers.open(self._stack)

    def _make_model(self, settings: ServedSettings) -> ServedModel:
        learner = self.training.learner
        if learner.kind == "local":
            return LocalModel(self._context, settings.serving, self.store, learner=learner)
        sends = not self.training.adapters  # which travel as objects of Ray
        return ServedModel(self._context, settings.serving, self.store, learner=learner if sends else None)

    async def _start(self) -> None:
        await self._start_together({"the learners": self.learners.start()})
        await self.learners.join()
        await self.endpoints.offer(self.settings.resources, self._stack)

    async def _start_models(self) -> None:
        for model in self.models:
            await model.start()
        if self.teachers is not None:
            await self.teachers.start()
        await self.reward_models.start()
