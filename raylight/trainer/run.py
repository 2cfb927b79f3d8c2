"""A run: the components that its settings ask for, started together, watched, and stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, Self

from raylight.aio import cancel_all, task_group
from raylight.runner.scaling import Resizable, ScaleRequests
from raylight.store.client import StoreClient
from raylight.trainer.cluster_monitor import is_cluster_lost
from raylight.trainer.components.learner_ranks import LearnerRanks
from raylight.trainer.components.learners import Learners
from raylight.trainer.components.local_serving import LocalServing
from raylight.trainer.components.reward_models import RewardModels
from raylight.trainer.components.runners import Runners
from raylight.trainer.components.serving import Serving
from raylight.trainer.components.sessions import OutsideAgents
from raylight.trainer.components.store import RunStore
from raylight.trainer.components.teacher import Teacher
from raylight.trainer.resume import ResumePoint, fresh_start
from raylight.trainer.run_metrics import ComponentMetrics
from raylight.trainer.settings import ResolvedSettings, SupervisedTraining, TrainingSettings
from raylight.weights.starts import derive_seed

logger = logging.getLogger(__name__)
PrepareStore = Callable[[StoreClient], Awaitable[None]]


class Component(Protocol):
    """A component, as a run watches it."""

    def watches(self) -> list[Coroutine[Any, Any, object]]:
        """Return coroutines that run while the run works, and fail if the component has failed for good."""
        ...

    async def counts(self) -> dict[str, int]:
        """Return counters for the summary of the run."""
        ...


class Run:
    """The running components of one run. Use `async with`: the exit stops everything that was started.

    Args:
        show_stage: shows what the run is doing now.
        owns_cluster: True if the Ray cluster ends with this run.
        start: the position at which the run starts; None is a fresh start.
        prepare_store: called before anything can take rollouts from the store.
    """

    store: StoreClient
    serving: Serving
    runners: Runners | OutsideAgents
    learners: Learners
    """Only in a run that trains a policy."""
    ranks: LearnerRanks
    """The learners of a run that trains, whatever it trains on."""
    teacher: Teacher | None = None
    """The model that scores the tokens of the policy, if there is one."""

    def __init__(
        self,
        settings: ResolvedSettings,
        show_stage: Callable[[str], None],
        owns_cluster: bool,
        start: ResumePoint | None = None,
        prepare_store: PrepareStore | None = None,
    ) -> None:
        self.settings = settings
        self.start = start or fresh_start()
        self._show_stage, self._owns_cluster, self._prepare_store = show_stage, owns_cluster, prepare_store
        self._stack = contextlib.AsyncExitStack()
        self._components: list[Component] = []
        self.reward_models = RewardModels(settings, show_stage, owns_cluster)
        """The reward models that the group reward calls, perhaps none."""

    @property
    def training(self) -> TrainingSettings:
        """The training part of the settings of a run that trains."""
        assert self.settings.training is not None, "the run trains"
        return self.settings.training

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        if is_cluster_lost():
            self._stack.pop_all()
            return
        try:
            await self._stack.aclose()  # continues with the remaining callbacks when one fails
        except Exception:  # the run's own result or error is more important
            logger.exception("some components of %s could not be stopped", self.settings.name)

    async def _open(self) -> None:
        """Compose the components that the settings ask for, and start them."""
        settings, stack, show = self.settings, self._stack, self._show_stage
        if settings.supervised is not None:
            await self._open_ranks(settings.supervised)
            return
        learners = self._make_learners()
        if learners is not None:
            await learners.reserve(stack)
        store = RunStore(settings, self.start.same_run, show)
        self.store = await store.open(stack)
        if self._prepare_store is not None:
            await self._prepare_store(self.store)
        self.serving = self._make_serving()
        await self.serving.open(stack)
        if learners is not None:
            self.learners = self.ranks = learners
            learners.open(stack, self.serving)
        self.teacher = self._make_teacher()
        if self.teacher is not None:
            await self.teacher.open(stack)
        await self.reward_models.open(stack)
        if settings.sessions is not None:
            self.runners, runners = OutsideAgents(settings.sessions), None
            rollouts = settings.sessions.max_open
        else:
            self.runners = runners = Runners(settings, self.store, show)
            runners.open(stack)
            rollouts = settings.runner.n * settings.runner.max_concurrent
        self.serving.prepare(await self._sampling_seed(), rollouts)
        await self._start(runners)
        await self.store.continue_time()
        resizable: dict[str, Resizable] = {} if runners is None else {"runners": runners.pool}
        scaling = ScaleRequests(settings.name, self.store, resizable | self.serving.resizable, show)
        metrics = ComponentMetrics(settings.name, self.store, self.runners.metrics, self.serving.metrics)
        self._components = [store, self.runners, self.serving, self.reward_models, scaling, metrics]
        self._components += [part for part in (learners, self.teacher) if part is not None]

    async def _open_ranks(self, training: SupervisedTraining) -> None:
        """Start the learners of a run without rollouts, which needs nothing else."""
        ranks = LearnerRanks(self.settings, training, training.model_path, self.start, self._show_stage)
        await ranks.reserve(self._stack)
        ranks.open_ranks(self._stack)
        self._show_stage("starting the learners")
        await ranks.start()
        await ranks.check_storage()
        await ranks.load_start()
        self.ranks, self._components = ranks, [ranks]

    def _make_learners(self) -> Learners | None:
        settings = self.settings
        if settings.training is None or settings.serving is None:
            return None
        return Learners(settings, settings.training, settings.serving, self.start, self._show_stage)

    def _make_serving(self) -> Serving:
        settings = self.settings
        assert settings.payload is not None, "the run has agents"
        secret, show, owns_cluster = settings.payload.secret, self._show_stage, self._owns_cluster
        parts = settings.name, settings.serving, secret, self.store, show, owns_cluster
        if settings.training is not None and settings.training.learner.kind == "local":
            return LocalServing(settings.training.learner, *parts)
        return Serving(*parts)

    def _make_teacher(self) -> Teacher | None:
        settings = self.settings
        if settings.training is None or settings.training.teacher is None:
            return None
        assert settings.payload is not None, "the run has agents"
        config = settings.training.algorithm.teacher_model
        assert config is not None, "a run with a teacher has its settings"
        secret, model, show = settings.payload.secret, settings.training.teacher, self._show_stage
        parts = settings.name, model, config.timeout_s, secret, show, self._owns_cluster
        return Teacher(*parts, config.prompt)

    async def _start(self, runners: Runners | None) -> None:
        """Start the components side by side, then what needs all of them."""
        settings = self.settings
        roles = {"the engine": settings.serving, "the learners": settings.training, "the runners": runners}
        started = [role for role, part in roles.items() if part]
        self._show_stage(f"starting {', '.join(started[:-1])}{' and ' if started[1:] else ''}{started[-1]}")
        async with task_group() as tasks:
            if settings.training:
                tasks.create_task(self.learners.start())
            if runners is not None:
                tasks.create_task(runners.start())
            if settings.serving:
                tasks.create_task(self._serve())
        if settings.training:
            await self.learners.join()
        await self.serving.offer(settings.resources)

    async def _serve(self) -> None:
        await self.serving.start()
        if self.teacher is not None:
            await self.teacher.start()
        await self.reward_models.start()

    async def _sampling_seed(self) -> int:
        """Return the engines' seed. A resumed run must not repeat responses of groups that it completes.

        A store that was lost has no attempts; the step then tells the resumed run from the first one.
        """
        if self.start.is_fresh and not self.start.same_run:
            return self.settings.seed
        attempts = (await self.store.statistics())["total_attempts"]
        return derive_seed(self.settings.seed, "resumed", self.start.step, attempts)

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
        """Return the counters of all components."""
        counts: dict[str, int] = {}
        for component in self._components:
            counts |= await component.counts()
        return counts
