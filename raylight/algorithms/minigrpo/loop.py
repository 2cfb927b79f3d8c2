"""Training loop of the raylight backend: roll out, update, validate, save."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import statistics
import time
from typing import Any

from raylight.agent.resources import LLM
from raylight.algorithms.base import RunContext
from raylight.algorithms.minigrpo.adapter_trainer import AdapterTrainer
from raylight.algorithms.minigrpo.endpoint import Endpoint
from raylight.algorithms.minigrpo.settings import MiniGRPOSettings
from raylight.algorithms.minigrpo.setup import MODEL_NAME, build_engine_and_trainer
from raylight.engines.transformers.trainable import TrainableEngine
from raylight.errors import StoreLostError
from raylight.experience.batch import BatchRules, build_batch
from raylight.experience.rewards import effective_reward
from raylight.experience.task_sampler import TaskSampler
from raylight.store.client import StoreClient
from raylight.types import TRAINABLE_AGENTS, EnqueueRolloutRequest, FinishedRollout, RolloutMode

CANCEL_TIMEOUT_S = 5.0
Metrics = dict[str, float]


async def train(
    settings: MiniGRPOSettings,
    store: StoreClient,
    context: RunContext,
    tasks: list[Any],
    val_tasks: list[Any],
) -> None:
    """Load the model, serve it to the agents, and train it for the planned number of steps."""
    context.stage("loading the model")
    engine, trainer, memory = await asyncio.to_thread(
        build_engine_and_trainer, context.model_path(settings.model), settings
    )
    context.note(f"MiniGRPO needs {memory}")
    try:
        temperature = 1.0 if settings.override_sampling else None
        async with Endpoint(
            engine, store, context.secret, settings.host, settings.port, temperature
        ) as endpoint:
            llm = LLM(endpoint=endpoint.url, model=MODEL_NAME, traced=True)
            await store.add_resources(context.resources_with(llm))
            context.stage(f"serving the model at {endpoint.url}")
            await TrainingLoop(settings, store, context, engine, trainer, endpoint).run(tasks, val_tasks)
    finally:
        await asyncio.to_thread(engine.close)


class TrainingLoop:
    """Loop over the planned number of steps, which reports each."""

    def __init__(
        self,
        settings: MiniGRPOSettings,
        store: StoreClient,
        context: RunContext,
        engine: TrainableEngine,
        trainer: AdapterTrainer,
        endpoint: Endpoint,
    ) -> None:
        self._settings = settings
        self._store = store
        self._context = context
        self._engine = engine
        self._trainer = trainer
        self._endpoint = endpoint

    async def run(self, tasks: list[Any], val_tasks: list[Any]) -> None:
        """Train, with validations and saved adapters in between, and save the last adapter."""
        settings, context = self._settings, self._context
        total = settings.steps(len(tasks))
        sampler, size = TaskSampler(tasks, settings.seed), settings.tasks_per_step
        if val_tasks and settings.val_before_train:
            context.step(0, await self._validate(val_tasks))
        without_signal = 0
        for step in range(1, total + 1):
            groups = range((step - 1) * size, step * size)
            metrics, trained = await self._step([sampler.task(group) for group in groups])
            without_signal = 0 if trained else without_signal + 1
            stop = without_signal >= settings.max_steps_without_signal
            due = settings.val_every and step % settings.val_every == 0
            if val_tasks and (due or stop or step == total):
                metrics |= await self._validate(val_tasks)
            context.step(step, metrics)
            if settings.save_every and step % settings.save_every == 0:
                await self._engine.run_between_steps(
                    functools.partial(self._trainer.save, context.checkpoint / f"step-{step}")
                )
            if stop:
                context.note(
                    f"no group had different rewards for {without_signal} steps in a row, so training stops "
                    "early: either the task is learned, or the reward does not distinguish good rollouts "
                    "from bad ones"
                )
                break
        await self._engine.run_between_steps(functools.partial(self._trainer.save, context.checkpoint))

    async def _step(self, tasks: list[Any]) -> tuple[Metrics, bool]:
        """Run one step; return its metrics, and True if the weights were updated."""
        settings, context, started = self._settings, self._context, time.perf_counter()
        finished = await self._rollout(tasks, "train", settings.group_size)
        rolled_out = time.perf_counter()
        rules = BatchRules(
            settings.failure_reward,
            min_group=2,
            trained_agents=context.trained_agents,
            off_policy_sampling=settings.off_policy_sampling,
        )
        batch, content = build_batch(finished, rules)
        metrics = context.batch_metrics(finished, content, rolled_out - started, settings.failure_reward)
        if not content.has_signal:
            return metrics, False
        version = self._engine.version
        metrics |= await self._engine.change_weights(
            lambda: (version + 1, self._trainer.update(batch, version))
        )
        metrics |= {
            "weights/version": float(self._engine.version),
            "time/update_s": time.perf_counter() - rolled_out,
        }
        return metrics, True

    async def _validate(self, tasks: list[Any]) -> Metrics:
        """Return the validation metrics. A rollout whose agent failed has `failure_reward`, or is
        excluded."""
        started = time.perf_counter()
        finished = await self._rollout(tasks, "val", self._settings.val_samples)
        rewards = [
            reward
            for item in finished
            if (reward := effective_reward(item, self._settings.failure_reward)) is not None
        ]
        failed = sum(item.rollout.status != "succeeded" for item in finished)
        metrics = {"val/failed": float(failed), "time/val_s": time.perf_counter() - started}
        return metrics | ({"val/reward": statistics.fmean(rewards)} if rewards else {})

    async def _rollout(self, tasks: list[Any], mode: RolloutMode, samples: int) -> list[FinishedRollout]:
        """Roll every task out `samples` times as one group, and wait until all are decided.

        Raises:
            RaylightError: no rollout has a reward, or the server has stopped.
        """
        self._endpoint.check()
        requests = [
            EnqueueRolloutRequest(
                input=task, mode=mode, group_id=f"{mode}-{index}", config=self._settings.rollout
            )
            for index, task in enumerate(tasks)
            for _ in range(samples)
        ]
        ids = [rollout.rollout_id for rollout in await self._store.enqueue_many_rollouts(requests)]
        show_progress, done = self._context.rollout_progress(mode), 0
        try:
            while done < len(ids):
                wanted = min(done + max(len(ids) // 20, 1), len(ids))
                done = len(await self._store.wait_for_rollouts(rollout_ids=ids, at_least=wanted))
                show_progress(done, len(ids))
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError, StoreLostError):  # the run ends anyway
                await asyncio.wait_for(self._store.cancel_rollouts(ids), CANCEL_TIMEOUT_S)
            raise
        finished = await self._collect(ids)
        self._context.check_scored(finished, self._settings.failure_reward)
        return finished

    async def _collect(self, ids: list[str]) -> list[FinishedRollout]:
        """Return finished rollouts, with spans if these are needed to find the trained agents."""
        finished = await self._store.collect(ids)
        marked = any(item.rollout.metadata.get(TRAINABLE_AGENTS) for item in finished)
        return (
            await self._store.collect(ids, with_spans=True, with_span_tokens=False)
            if marked or self._context.trained_agents is not None
            else finished
        )
