"""Metric logger that writes to SwanLab."""

from __future__ import annotations

import os

from raylight.trainer.output.loggers.protocol import Metrics, SampledRollout
from raylight.trainer.output.loggers.tracker import Tracker, points
from raylight.types import JsonObject


class SwanlabTracker(Tracker):
    """Writes a run to SwanLab.

    `SWANLAB_MODE=offline` keeps it in `swanlog/` of the run directory, from where `swanlab sync` sends it.
    Further settings are passed to `swanlab.init`. SwanLab continues a resumed run only online; otherwise each
    process of the run is a run in SwanLab.
    """

    def start(self, config: JsonObject) -> None:
        import swanlab

        settings = {"mode": os.environ.get("SWANLAB_MODE", "online"), **self.settings}
        if settings["mode"] == "online" and self.saved_id is not None:
            settings |= {"id": self.saved_id, "resume": "allow"}
        self._run = swanlab.init(
            **{
                "project": self.project,
                "name": self.name,
                "config": config,
                "log_dir": str(self.folder / "swanlog"),
                **settings,
            }
        )
        self.save_id(self._run.id)

    def log(self, step: int, metrics: Metrics) -> None:
        at, values = points(step, metrics)
        self._run.log(values, step=at)

    def rollouts(self, step: int, table: list[SampledRollout]) -> None:
        import swanlab

        rows = [["" if value is None else value for value in row] for row in table]
        shown = swanlab.echarts.Table()
        shown.add(list(SampledRollout._fields), rows)
        self._run.log({"rollouts": shown}, step=step)

    def finish(self) -> None:
        if self.failure is None:
            self._run.finish()
        else:
            self._run.finish(state="crashed", error=self.failure)
