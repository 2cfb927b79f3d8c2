"""The loop of a run that trains a model on given examples.

Law: a step can be taken again. Its examples follow from the data and the seed, and its update from the
training state before it.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from raylight.errors import LearnerLostError
from raylight.experience.supervised_batches import SupervisedData, build_supervised_batch, split_examples
from raylight.trainer.components.run_components import SupervisedComponents
from raylight.trainer.loops.model_selection import ModelSelection
from raylight.trainer.loops.step_loop import StepLoop
from raylight.trainer.loops.supervised_data import batch_schedule
from raylight.trainer.output.report import Metrics, Report
from raylight.trainer.spec.resume import ResumePoint, state_metadata


class SupervisedLoop(StepLoop):
    """The planned steps of a run, from its starting point to the model in `checkpoint/`.

    Args:
        config: the run's resolved configuration, which is stored with every training state.
    """

    def __init__(
        self, run: SupervisedComponents, data: SupervisedData, report: Report, config: dict[str, Any]
    ) -> None:
        training = run.settings.training
        super().__init__(run.ranks, run.start, report)
        self._training, self._data, self._config = training, data, config
        self._schedule = batch_schedule(training.algorithm, data, run.settings.seed)
        self._selection = ModelSelection(run.ranks, training.algorithm, report, bool(data.held_out))
        self._evaluated = self._selection.state_dict()
        """State of the selection after the last logged step."""

    async def run(self) -> None:
        """Train and report each step."""
        if self._start.evaluation is not None:
            self._selection.load_state_dict(self._start.evaluation)
            self._evaluated = self._selection.state_dict()
        notes = [*self._start.notes, *self._data.notes]
        known = self._schedule.fingerprint(self._start.step)
        if known and self._start.tasks != known:
            notes.append(
                f"step {self._start.step} had other examples: the data or the size of the batches has "
                "changed, so in this epoch some examples are repeated or left out. To learn all of them "
                "equally often, start another run from the exported model"
            )
        for note in notes:
            self._report.note(note)
        is_fork = self._start.step > 0 and self._start.starts_new_lineage
        fault: LearnerLostError | None = None
        while True:
            try:
                if fault is not None:
                    await self._go_back(fault)
                    fault = None
                if is_fork:  # the learners could not go back to a state of another lineage
                    await self._save_state(self._start.step)
                    is_fork = False
                if self._is_over:
                    await self._finish()
                    return
                if self._ranks.drain_noticed.is_set():
                    await self._leave_draining_nodes()
                await self._take_step(self._next)
            except LearnerLostError as error:
                self._report.note(f"the learners were lost and are restarted: {error}")
                fault = error

    @property
    def _is_over(self) -> bool:
        if self._next > self._schedule.steps:
            return True
        return self._next > self._reported and self._selection.stop_reason is not None

    async def _take_step(self, step: int) -> None:
        """Take a step, perhaps again after the learners went back to a training state before it."""
        is_new = step > self._reported
        metrics = await self._learn(step) if step else {}
        evaluates = is_new and self._selection.is_due(step, step == self._schedule.steps)
        if evaluates:
            metrics |= await self._evaluate(step)
        if is_new and (step or evaluates):  # without an evaluation, step 0 is nothing
            metrics["learner/restarts"] = float(self._ranks.restarts)
            self._report.step(step, metrics)
            self._reported, self._evaluated = step, self._selection.state_dict()
        every = self._training.checkpoint.every
        if step >= self._reported and step > 0 and every > 0 and step % every == 0:
            await self._save_state(step)
        self._next = step + 1

    async def _learn(self, step: int) -> Metrics:
        """Update the weights with the examples of a step; return the metrics."""
        if step <= self._reported:
            self._report.stage(f"replaying step {step}")
        started = time.perf_counter()
        examples = [self._data.train[index] for index in self._schedule.batch(step)]
        with self._report.phase("update of the weights"):
            metrics = await self._ranks.update(build_supervised_batch(examples))
        return metrics | {
            "train/examples": float(len(examples)),
            "train/tokens": float(sum(example.tokens for example in examples)),
            "train/learned_tokens": float(sum(example.learned_tokens for example in examples)),
            "train/epoch": self._schedule.epochs_after(step),
            "weights/version": float(self._ranks.version),
            "time/update_s": time.perf_counter() - started,
        }

    async def _evaluate(self, step: int) -> Metrics:
        """Measure the model on the held-out examples, and compare it with the best so far."""
        algorithm, held_out = self._training.algorithm, self._data.held_out
        started = time.perf_counter()
        lengths = [example.tokens for example in held_out]
        parts = list(
            split_examples(range(len(held_out)), lengths, algorithm.batch_size, algorithm.batch_tokens)
        )
        progress = self._report.rollout_progress("held-out")
        totals: Counter[str] = Counter()
        for done, part in enumerate(parts, 1):
            batch = build_supervised_batch([held_out[index] for index in part])
            totals.update(await self._ranks.ranks.evaluate(batch))
            progress(done, len(parts))
        count = totals.pop("count")
        metrics = {f"val/{name}": total / count for name, total in totals.items()}
        await self._selection.compare(step, metrics)
        return metrics | {"time/val_s": time.perf_counter() - started}

    async def _finish(self) -> None:
        """Write the model to `checkpoint/`, and the last training state."""
        step = self._next - 1
        if self._saved < step:
            await self._save_state(step)
        if step < self._schedule.steps and (reason := self._selection.stop_reason) is not None:
            self._report.note(reason)
        with self._report.phase("saving of the model"):
            await self._ranks.save(str(self._report.checkpoint))
            await self._ranks.finish_saving()

    async def _save_state(self, step: int) -> None:
        metadata = state_metadata(
            self._start,
            self._config,
            version=self._ranks.version,
            groups={},
            tasks=self._schedule.fingerprint(step),
            observed_step=step,
            steps_without_signal=0,
            evaluation=self._selection.state_dict(),
            ledger={},
        )
        await self._ranks.save_state(step, metadata)
        self._saved = step

    async def _return_to(self, point: ResumePoint) -> None:
        self._selection.load_state_dict(self._evaluated)
