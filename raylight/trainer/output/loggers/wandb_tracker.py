"""Metric logger that writes to Weights & Biases."""

from __future__ import annotations

import os

from raylight.trainer.output.loggers.protocol import Metrics, SampledRollout
from raylight.trainer.output.loggers.tracker import Tracker, points
from raylight.types import JsonObject


class WandbTracker(Tracker):
    """Writes a run to Weights & Biases.

    `WANDB_MODE=offline` keeps it in `wandb/` of the run directory, from where `wandb sync` sends it. Further
    settings, such as `entity`, `group`, `tags` and `mode`, are passed to `wandb.init`.
    """

    def start(self, config: JsonObject) -> None:
        import wandb

        mode = self.settings.get("mode") or os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not wandb.api.api_key:
            raise RuntimeError("wandb has no API key: run `wandb login`, or set WANDB_MODE=offline")
        self._run = wandb.init(
            project=self.project,
            name=self.name,
            id=self.saved_id,
            resume="allow",
            dir=str(self.folder),
            config=config,
            settings=wandb.Settings(console="off", silent=True),
            **self.settings,
        )
        self.save_id(self._run.id)
        # wandb's own step only grows, but an evaluation or a resumed run may be of an earlier step
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        at, values = points(step, metrics)
        self._run.log({"step": at, **values})

    def rollouts(self, step: int, table: list[SampledRollout]) -> None:
        import wandb

        columns: list[str | int] = list(SampledRollout._fields)
        self._run.log({"step": step, "rollouts": wandb.Table(columns=columns, data=[list(r) for r in table])})

    def finish(self) -> None:
        if self.failure is not None:
            self._run.summary["failure"] = self.failure
        self._run.finish(exit_code=0 if self.failure is None else 1)
