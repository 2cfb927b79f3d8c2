"""Driver of a run under fault: python chaos_driver.py '{"folder": ..., "resume": ...}'

Besides what a user's script does, it sends events to the test: each step, each finished group, and the start
of each update, weight sync and training state. It also logs the batches.
"""

import asyncio
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chaos_agent import asker, asker_program
from chaos_log import BATCHES, HELD_UPDATE, HOLD_VARIABLE, SAMPLES, TASKS, append_line, send_event

import raylight as rl
from raylight.experience.batches.batch import BatchReport, BatchRules, TrainBatch, build_batch
from raylight.learner.ranks.group import LearnerGroup
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.trainer.components.publication import Publications
from raylight.trainer.loops import policy_loop
from raylight.trainer.loops.training_groups import TrainingGroups
from raylight.types import FinishedRollout


@dataclass(frozen=True)
class LoggedRules(BatchRules):
    """Rules of a batch with the learners' version before the update."""

    version: int = 0


class LoggedGRPO(rl.GRPO):
    """GRPO whose rules have the learners' version, for the log of batches."""

    def batch_rules(self, learner: Any, trained_agents: str | None = None, version: int = 0) -> LoggedRules:
        rules = super().batch_rules(learner, trained_agents, version)
        return LoggedRules(**vars(rules), version=version)


def logged_batch(finished: list[FinishedRollout], rules: LoggedRules) -> tuple[TrainBatch, BatchReport]:
    """Build a batch and log it."""
    batch, report = build_batch(finished, rules)
    rewards = {item.rollout.rollout_id: rules.rewards.reward(item) for item in finished}
    oldest = min((int(row.weight_versions[row.mask == 1].min()) for row in batch.rows), default=None)
    append_line(BATCHES, rewards=rewards, version=rules.version, oldest=oldest, driver=os.getpid())
    return batch, report


class StepEvents:
    """Metric logger that sends an event for each step."""

    def start(self, config: dict[str, Any]) -> None:
        pass

    def log(self, step: int, metrics: dict[str, float]) -> None:
        send_event("step", step=step)

    def finish(self) -> None:
        pass


def around(
    owner: type,
    method: str,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Call functions with the arguments of a method before and after each call of it."""
    wrapped: Callable[..., Any] = getattr(owner, method)

    @functools.wraps(wrapped)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before:
            before(self, *args, **kwargs)
        result = await wrapped(self, *args, **kwargs)
        if after:
            after(self, *args, **kwargs)
        return result

    setattr(owner, method, call)


def watch() -> None:
    """Send the events of the loop, and log the training states that the learners load."""
    around(LearnerGroup, "update", lambda *_: send_event("update"))
    around(LearnerGroup, "save_state", lambda *_: send_event("checkpoint"))
    around(Publications, "publish", lambda *_: send_event("sync"))
    around(
        LearnerGroup,
        "load_state",
        lambda group, url, step, version: append_line(BATCHES, loaded=step, driver=os.getpid()),
    )
    around(TrainingGroups, "_wait", after=send_finished)
    policy_loop.build_batch = logged_batch  # type: ignore[attr-defined]


def send_finished(groups: TrainingGroups, group: int) -> None:
    """Send the numbers of finished groups that no step took, and of those in progress."""
    send_event("group", finished=len(groups._finished), waiting=len(groups._waiting))


def hold() -> None:
    """Let an update and some rollouts last until the driver is killed; the groups between them wait."""
    os.environ[HOLD_VARIABLE] = "1"
    updated, calls = LearnerGroup.update, itertools.count(1)

    @functools.wraps(updated)
    async def update(*args: Any) -> dict[str, float]:
        if next(calls) == HELD_UPDATE:
            send_event("held")
            await asyncio.Event().wait()
        return await updated(*args)

    LearnerGroup.update = update  # type: ignore[method-assign]


def main(
    folder: str,
    steps: int,
    replicas: int = 1,
    learners: int = 1,
    learner_node: bool = False,
    runners: int = 2,
    program: bool = False,
    address: str = "local",
    resume: bool = False,
    holds: bool = False,
    **algorithm_settings: Any,
) -> None:
    if holds and not resume:
        hold()
    watch()
    train, val = additions(0)
    algorithm = LoggedGRPO(
        model=STARTER_MODEL,
        lr=1e-4,
        group_size=SAMPLES,
        tasks_per_step=TASKS,
        n_steps=steps,
        val_every=2,
        best=None,
        sync_timeout_s=45,
        rollout=rl.RolloutConfig(timeout_seconds=90),
        **algorithm_settings,
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        output_dir=folder,
        address=address,
        engine={"max_model_len": 128, "replicas": replicas, "num_cpus": 0.2, "start_timeout_s": 120},
        learner={
            "n": learners,
            "num_cpus": 0.2,
            "resources": {"learner_node": 1} if learner_node else {},
            "collective_timeout_s": 30,
            "start_timeout_s": 120,
            "max_restarts": 5,
        },
        runner={"n": runners, "max_concurrent": 4, "stuck_after_s": 10, "start_timeout_s": 90},
        store={"lease_s": 15},
        checkpoint={"every": 2, "keep": 2},
        loggers=["console", "jsonl", StepEvents],
    )
    agent = asker_program() if program else asker
    trainer.fit(agent, train, val[:8], resume="auto" if resume else False)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
