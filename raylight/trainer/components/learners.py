"""`Learners`: trains the models of a run, saves their states and publishes their weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from raylight._utils.aio import cancel_all
from raylight.experience.batches.batch import TrainBatch
from raylight.learner.ranks.local import LocalLearner
from raylight.learner.ranks.simulated import SimulatedLearner
from raylight.trainer.components.local_model import LocalModel
from raylight.trainer.components.parity import make_probe
from raylight.trainer.components.publication import Publications
from raylight.trainer.components.run_learner import RunLearner
from raylight.trainer.components.served_model import ServedModel
from raylight.trainer.spec.resume import ResumePoint
from raylight.trainer.spec.settings import TrainedSettings
from raylight.types import JsonObject
from raylight.weights.client import CoordinatorClient


class Learners(RunLearner):
    """The ranks that train the model of a run that serves it, and the publication of their weights to the
    engines.

    Args:
        start: the position at which the run starts.
        show_stage: shows what the run is doing now.
    """

    _settings: TrainedSettings
    publications: Publications
    replicas: CoordinatorClient

    def __init__(
        self,
        settings: TrainedSettings,
        start: ResumePoint,
        show_stage: Callable[[str], None],
    ) -> None:
        training, serving = settings.training, settings.serving
        super().__init__(settings, training, serving.model_path, start, show_stage)
        self._policy, self._serving = training, serving
        self._adapters = training.adapters
        """The learners' models, whose adapters the engines serve, by name; empty if they serve all
        weights."""
        self._reported_no_sleep = False

    def open(self, stack: contextlib.AsyncExitStack, model: ServedModel) -> None:
        """Start the processes of the ranks, and serve replicas that join from them."""
        coordinator = model.coordinator
        self.replicas = coordinator
        self._open_learner(stack, model)
        served, algorithm, kind = self._serving, self._policy.algorithm, self._policy.learner.kind
        probe = make_probe(served.model_path, served.engine.max_model_len, self._settings.seed)
        self.publications = Publications(
            self.learner,
            coordinator,
            served.engine,
            algorithm.sync_timeout_s,
            adapters=self._adapters,
            fixed=algorithm.untrained_models,
            probe=() if kind == "simulated" else probe,
            tolerance=algorithm.max_logprob_mismatch,
            during_updates=algorithm.max_staleness > 0 and kind != "local",  # whose engine has the weights
        )
        serving_joined = asyncio.create_task(self.publications.serve_joined(lambda: self.version))
        stack.push_async_callback(cancel_all, [serving_joined])

    def _open_learner(self, stack: contextlib.AsyncExitStack, model: ServedModel) -> None:
        config = self._policy.learner
        if config.kind == "ranks":
            self.open_ranks(stack)
            return
        if isinstance(model, LocalModel):
            self.learner = LocalLearner(model.engine, config)
        else:
            self.learner = SimulatedLearner(config)
        stack.callback(self.learner.stop)

    async def start(self) -> None:
        """Load the model."""
        async with self._alone():
            await super().start()

    def _alone(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Return a context in which no replica takes memory on the learners' GPUs."""
        return self.replicas.starts_held() if self._settings.shares_gpus else contextlib.nullcontext()

    async def join(self) -> None:
        """Check the learners with the engines, which are up, and load the training state of a resumed run.

        Raises:
            ConfigError: the learners do not share the run's folders.
            EngineStartError: the engines cannot serve the learners' adapter.
            MismatchError: log-probs of engines and learners differ.
        """
        await self.check_storage()
        # an engine may compile at its first request, which belongs to its start
        patience = max(self._policy.algorithm.sync_timeout_s, self._serving.engine.start_timeout_s)
        if self._adapters:
            await self.publications.publish_initial(0, patience)
        await self.publications.check_parity(0, patience)
        await self.load_start()

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """Update the weights; return metrics. Engines that share a device with the learners sleep
        meanwhile."""
        timeout = self._policy.algorithm.sync_timeout_s
        async with self.publications.learners_busy:
            sleeps = self._serving.engine.sleep_while_learning
            try:
                if sleeps:
                    self._report_no_sleep(await self.replicas.sleep(timeout))
                async with self._alone():
                    metrics = await self.learner.update(batch)
            finally:
                if sleeps:
                    await self.replicas.wake(timeout)
            self.version += 1
        return metrics

    def _report_no_sleep(self, reasons: JsonObject) -> None:
        """Show once which replicas cannot sleep, and why."""
        awake = {replica: reason for replica, reason in reasons.items() if reason}
        if awake and not self._reported_no_sleep:
            for replica, reason in awake.items():
                self._show_stage(f"replica {replica} cannot sleep: {reason}")
            self._reported_no_sleep = True

    @property
    def pins(self) -> bool:
        """True if the engines can keep a version while later ones are published."""
        return bool(self._adapters) and self._policy.algorithm.max_staleness > 0

    async def _restart(self, reason: object) -> ResumePoint:
        async with self.publications.learners_busy, self._alone():
            point = await super()._restart(reason)
        self.publications.notice_version()
        return point
