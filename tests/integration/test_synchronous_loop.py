"""The loop with `max_staleness=0` against a loop with a barrier between rollouts and updates."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

import raylight as rl
from raylight.experience.batches.batch import build_batch
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder
from raylight.tasks.task_set import TaskSet
from raylight.trainer.components.run_components import PolicyComponents
from raylight.trainer.loops.policy_rollouts import PolicyRollouts
from raylight.trainer.output.report import Report

STEPS, GROUPS, SAMPLES = 10, 4, 4


pytestmark = pytest.mark.usefixtures("connected")


@rl.rollout
async def seeded_adder(task: dict, llm: rl.LLM, rollout: rl.Rollout) -> float:
    """The quickstart's agent, whose answers depend on the weights, the group and the sample only."""
    _, _, group, sample = rollout.rollout_id.split("-")
    seed = int(group) * 1000 + int(sample)
    parameters = llm.sampling_parameters | {"seed": seed}
    return await adder(task, llm.model_copy(update={"sampling_parameters": parameters}))


class BarrierTraining:
    """All rollouts of a step, then its update, then the publication of its weights."""

    def __init__(
        self, run: PolicyComponents, tasks: TaskSet, val_tasks: list[Any], report: Report, *_: Any
    ) -> None:
        self._run, self._tasks, self._report = run, tasks, report

    async def run(self) -> None:
        run, algorithm = self._run, self._run.training.algorithm
        rollouts, sampler = PolicyRollouts(run), self._tasks.sampler(run.settings.seed)
        await rollouts.add_resources()
        for step in range(STEPS):
            groups = range(step * GROUPS, (step + 1) * GROUPS)
            for group in groups:
                await rollouts.enqueue(rollouts.group_requests(group, sampler.draw(group)))
            ids = [name for group in groups for name in rollouts.group_ids(group)]
            await run.store.wait_until_decided(rollout_ids=ids)
            batch, content = build_batch(
                await rollouts.collect(ids), algorithm.batch_rules(run.training.learner)
            )
            if content.has_signal:
                await run.learners.update(batch)
                await run.learners.publications.publish(run.learners.version)
        await run.learners.save(str(self._report.checkpoint))


def train(folder: Path, seed: int) -> str:
    """Train; return a digest of the trained weights."""
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        group_size=SAMPLES,
        tasks_per_step=GROUPS,
        n_steps=STEPS,
        lr=1e-3,
        val_every=None,
        val_before_train=False,
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        runner={"n": 1, "max_concurrent": 1},  # the engine computes one response at a time
        output_dir=folder,
        seed=seed,
        progress=False,
    )
    trainer.fit(seeded_adder, additions(seed)[0])
    return hashlib.sha256((folder / "checkpoint" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_without_staleness_the_weights_are_those_of_a_barrier(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = train(tmp_path / "loop", seed)
    initial = (Path(STARTER_MODEL) / "model.safetensors").read_bytes()
    assert digest != hashlib.sha256(initial).hexdigest()
    monkeypatch.setattr("raylight.trainer.runs.policy_run.PolicyLoop", BarrierTraining)
    assert train(tmp_path / "barrier", seed) == digest
