"""The loop of the own backend: roll out, update, validate, save."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import statistics
import time
from typing import Any

from raylight.agent.resources import LLM
from raylight.algorithms.base import RunContext
from raylight.algorithms.minigrpo.endpoint import Endpoint
from raylight.algorithms.minigrpo.engine import TrainableEngine
from raylight.algorithms.minigrpo.settings import MiniSettings
from raylight.algorithms.minigrpo.setup import MODEL_NAME, build
from raylight.algorithms.minigrpo.tuner import Tuner
from raylight.errors import StoreLostError
from raylight.experience.batch import BatchRules, build_batch
from raylight.experience.rewards import effective_reward
from raylight.experience.task_sampler import TaskSampler
from raylight.store.client import StoreClient
from raylight.types import TRAINABLE_AGENTS, EnqueueRolloutRequest, FinishedRollout, RolloutMode

CANCEL_TIMEOUT_S = 5.0
Metrics = dict[str, float]


async def train(
    settings: MiniSettings, store: StoreClient, side: RunContext, tasks: list[Any], val_tasks: list[Any]
) -> None:
    """Bring the model up, serve it to the agents, and train it for the planned number of steps."""
    side.stage("loading the model")
    engine, tuner, memory = await asyncio.to_thread(build, side.model_path(settings.model), settings)
    side.note(f"MiniGRPO takes {memory}")
    try:
        async with Endpoint(engine, store, side.secret, settings.host, settings.port) as endpoint:
            llm = LLM(endpoint=endpoint.url, model=MODEL_NAME, traced=True)
            await store.add_resources(side.resources_with(llm))
            side.stage(f"the model answers at {endpoint.url}")
            await Loop(settings, store, side, engine, tuner, endpoint).run(tasks, val_tasks)
    finally:
        await asyncio.to_thread(engine.close)


class Loop:
    """Trains for the planned number of steps, reporting each."""

    def __init__(
        self,
        settings: MiniSettings,
        store: StoreClient,
        side: RunContext,
        engine: TrainableEngine,
        tuner: Tuner,
        endpoint: Endpoint,
    ) -> None:
        self._settings = settings
        self._store = store
        self._side = side
        self._engine = engine
        self._tuner = tuner
        self._endpoint = endpoint

    async def run(self, tasks: list[Any], val_tasks: list[Any]) -> None:
        settings, side = self._settings, self._side
        total, batches = (
            settings.steps(len(tasks)),
            TaskSampler(tasks, settings.tasks_per_step, settings.seed),
        )
        if val_tasks and settings.val_before_train:
            side.step(0, await self._validate(val_tasks))
        without_signal = 0
        for step in range(1, total + 1):
            metrics, learned = await self._step(next(batches))
            without_signal = 0 if learned else without_signal + 1
            stop = without_signal >= settings.max_steps_without_signal
            due = settings.val_every and step % settings.val_every == 0
            if val_tasks and (due or stop or step == total):
                metrics |= await self._validate(val_tasks)
            side.step(step, metrics)
            if settings.save_every and step % settings.save_every == 0:
                await self._engine.between_steps(
                    functools.partial(self._tuner.save, side.checkpoint / f"step-{step}")
                )
            if stop:
                side.note(
                    f"no group showed a difference for {without_signal} steps in a row, so training ends early: either the task is "
                    "learned, or its reward does not tell good from bad"
                )
                break
        await self._engine.between_steps(functools.partial(self._tuner.save, side.checkpoint))

    async def _step(self, tasks: list[Any]) -> tuple[Metrics, bool]:
        """One step; returns its metrics and whether there was anything to learn from."""
        settings, side, started = self._settings, self._side, time.perf_counter()
        finished = await self._rollout(tasks, "train", settings.group_size)
        rolled_out = time.perf_counter()
        rules = BatchRules(settings.failure_reward, min_group=2, trained_agents=side.trained_agents)
        batch, content = build_batch(finished, rules)
        metrics = side.batch_metrics(finished, content, rolled_out - started)
        if not content.has_signal:
            return metrics, False
        metrics |= await self._engine.train(lambda version: self._tuner.update(batch, version))
        metrics |= {
            "weights/version": float(self._engine.version),
            "time/update_s": time.perf_counter() - rolled_out,
        }
        return metrics, True

    async def _validate(self, tasks: list[Any]) -> Metrics:
        """Mean reward over the validation tasks. A rollout that failed counts with `failure_reward`, or is left out."""
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
        """Have every task rolled out `samples` times as one group, and wait until all are decided.

        Raises:
            RaylightError: none of them gave a reward, or the server ended.
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
        done = 0
        try:
            while done < len(ids):
                wanted = min(done + max(len(ids) // 20, 1), len(ids))
                done = len(await self._store.wait_for_rollouts(rollout_ids=ids, at_least=wanted))
                self._side.stage(f"{mode} rollouts {done}/{len(ids)}")
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError, StoreLostError):  # the run ends anyway
                await asyncio.wait_for(self._store.cancel_rollouts(ids), CANCEL_TIMEOUT_S)
            raise
        finished = await self._collect(ids)
        self._side.check_scored(finished, self._settings.failure_reward)
        return finished

    async def _collect(self, ids: list[str]) -> list[FinishedRollout]:
        """What the rollouts left; with spans where these tell which agent called."""
        finished = await self._store.collect(ids)
        marked = any(item.rollout.metadata.get(TRAINABLE_AGENTS) for item in finished)
        return (
            await self._store.collect(ids, with_spans=True)
            if marked or self._side.trained_agents is not None
            else finished
        )
