"""The loop of a run that trains a model on given examples.

Law: a step can be taken again. Its examples follow from the data and the seed, and its update from the
training state before it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator

from raylight.experience.batches.supervised_batches import (
    SupervisedData,
    build_supervised_batch,
    split_examples,
)
from raylight.trainer.components.run_components import SupervisedComponents
from raylight.trainer.loops.model_selection import ModelSelection
from raylight.trainer.loops.step_loop import StepLoop
from raylight.trainer.loops.supervised_data import batch_schedule
from raylight.trainer.output.report import Metrics, Report
from raylight.types import JsonObject


class SupervisedLoop(StepLoop):
    """The planned steps of a run, from its starting point to the model in `checkpoint/`.

    Args:
        config: the run's resolved configuration, which is stored with every training state.
    """

    def __init__(
        self, run: SupervisedComponents, data: SupervisedData, report: Report, config: JsonObject
    ) -> None:
        training = run.settings.training
        held_out = SupervisedData(data.held_out).fingerprint() if data.held_out else None
        selection = ModelSelection(run.learner, training.algorithm, report, held_out)
        super().__init__(run.learner, run.start, report, training, config, selection)
        self._algorithm, self._data = training.algorithm, data
        self._schedule = batch_schedule(training.algorithm, data, run.settings.seed)
        self._total = self._schedule.steps

    @contextlib.asynccontextmanager
    async def _prepared(self) -> AsyncIterator[None]:
        notes = [*self._data.notes]
        known = self._schedule.fingerprint(self._start.step)
        if known and self._start.tasks != known:
            notes.append(
                f"step {self._start.step} had other examples: the data or the size of the batches has "
                "changed, so in this epoch some examples are repeated or left out. To learn all of them "
                "equally often, start another run from the exported model"
            )
        self._begin(notes)
        yield

    async def _take_step(self, step: int) -> None:
        is_new = step > self._reported
        if step > self._total or (is_new and self._stop_reason is not None):
            return await self._finish()
        metrics = await self._learn(step) if step else {}
        evaluates = is_new and self._selection.is_due(step, step == self._total)
        if evaluates:
            metrics |= await self._evaluate(step)
        if is_new and (step or evaluates):  # without an evaluation, step 0 is nothing
            metrics["learner/restarts"] = float(self._learner.restarts)
            self._report.step(step, metrics)
            self._reported, self._evaluated = step, self._selection.state_dict()
        await self._end_step(step)

    async def _learn(self, step: int) -> Metrics:
        """Update the weights with the examples of a step; return the metrics."""
        if step <= self._reported:
            self._report.stage(f"replaying step {step}")
        started = time.perf_counter()
        examples = [self._data.train[index] for index in self._schedule.batch(step)]
        with self._report.phase("update of the weights"):
            metrics = await self._learner.update(build_supervised_batch(examples))
        return metrics | {
            "train/examples": float(len(examples)),
            "train/tokens": float(sum(example.tokens for example in examples)),
            "train/learned_tokens": float(sum(example.learned_tokens for example in examples)),
            "train/epoch": self._schedule.epochs_after(step),
            "weights/version": float(self._learner.version),
            "time/update_s": time.perf_counter() - started,
        }

    async def _evaluate(self, step: int) -> Metrics:
        """Measure the model on the held-out examples, and compare it with the best so far."""
        algorithm, held_out = self._algorithm, self._data.held_out
        started = time.perf_counter()
        lengths = [example.tokens for example in held_out]
        parts = list(
            split_examples(range(len(held_out)), lengths, algorithm.batch_size, algorithm.batch_tokens)
        )
        progress = self._report.rollout_progress("held-out")
        totals: Counter[str] = Counter()
        for done, part in enumerate(parts, 1):
            batch = build_supervised_batch([held_out[index] for index in part])
            totals.update(await self._learner.learner.evaluate(batch))
            progress(done, len(parts))
        count = totals.pop("count")
        metrics = {f"val/{name}": total / count for name, total in totals.items()}
        await self._selection.compare(step, metrics)
        return metrics | {"time/val_s": time.perf_counter() - started}

    def _progress(self, step: int) -> JsonObject:
        return {
            "groups": {},
            "tasks": self._schedule.fingerprint(step),
            "observed_step": step,
            "steps_without_signal": 0,
            "evaluation": self._selection.state_dict(),
            "ledger": {},
        }
