"""Driver of a run under fault: python chaos_driver.py '{"folder": ..., "steps": ...}'

Besides what a user's script does, it sends events to the test: each step, and the start of each update,
weight sync and training state. It also logs each batch that the learners receive.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from chaos_agent import asker, asker_program
from chaos_log import BATCHES, append_line, send_event

import raylight as rl
from raylight.learner.group import LearnerGroup
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.trainer.components.learners import Learners


class LoggedGRPO(rl.GRPO):
    """GRPO that logs each batch."""

    def build_train_batch(self, finished: Any, *args: Any) -> Any:
        batch, report = super().build_train_batch(finished, *args)
        rewards = {item.rollout.rollout_id: self.reward_of(item) for item in finished}
        append_line(BATCHES, rewards=rewards, driver=os.getpid())
        return batch, report


class StepEvents:
    """Metric logger that sends an event for each step."""

    def start(self, config: dict[str, Any]) -> None:
        pass

    def log(self, step: int, metrics: dict[str, float]) -> None:
        send_event("step", step=step)

    def finish(self) -> None:
        pass


def before(owner: type, method: str, action: Callable[..., None]) -> None:
    """Call `action` with the arguments of a method before each call of it."""
    wrapped: Callable[..., Any] = getattr(owner, method)

    @functools.wraps(wrapped)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return await wrapped(self, *args, **kwargs)

    setattr(owner, method, call)


def watch() -> None:
    """Send the events of the loop, and log the training states that the learners load."""
    before(LearnerGroup, "update", lambda *_: send_event("update"))
    before(LearnerGroup, "save_state", lambda *_: send_event("checkpoint"))
    before(Learners, "publish", lambda *_: send_event("sync"))
    before(
        LearnerGroup,
        "load_state",
        lambda url, step, version: append_line(BATCHES, loaded=step, driver=os.getpid()),
    )


def main(
    folder: str,
    steps: int = 8,
    replicas: int = 1,
    learners: int = 1,
    learner_node: bool = False,
    runners: int = 2,
    program: bool = False,
    address: str = "local",
    resume: bool = False,
) -> None:
    watch()
    train, val = additions(0)
    algorithm = LoggedGRPO(
        model=STARTER_MODEL,
        lr=1e-4,
        group_size=4,
        tasks_per_step=8,
        n_steps=steps,
        val_every=2,
        best=None,
        sync_timeout_s=45,
        rollout=rl.RolloutConfig(timeout_seconds=90),
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
        },
        runner={"n": runners, "max_concurrent": 4, "stuck_after_s": 10, "start_timeout_s": 90},
        store={"lease_seconds": 15},
        checkpoint={"every": 2, "keep": 2},
        loggers=["console", "jsonl", StepEvents],
    )
    agent = asker_program() if program else asker
    trainer.fit(agent, train[: 8 * steps], val[:8], resume="auto" if resume else False)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
