"""Metric logger that writes to Trackio."""

from __future__ import annotations

from raylight.trainer.output.loggers.protocol import Metrics, SampledRollout
from raylight.trainer.output.loggers.tracker import Tracker, points
from raylight.types import JsonObject


class TrackioTracker(Tracker):
    """Writes a run to Trackio, which `trackio show` displays.

    It is in Trackio's own folder (`TRACKIO_DIR`), or in the Hugging Face Space of the setting `space_id`.
    Further settings are passed to `trackio.init`. Trackio marks no run as failed.
    """

    def start(self, config: JsonObject) -> None:
        import trackio

        self._run = trackio.init(
            **{
                "project": self.project,
                "name": self.saved_id or self.name,
                "resume": "allow" if self.saved_id else "never",
                "config": config,
                "embed": False,
                "auto_log_gpu": False,
                "auto_log_cpu": False,
                **self.settings,
            }
        )
        self.save_id(self._run.name)

    def log(self, step: int, metrics: Metrics) -> None:
        at, values = points(step, metrics)
        self._run.log(values, step=at)

    def rollouts(self, step: int, table: list[SampledRollout]) -> None:
        import trackio

        rows = trackio.Table(columns=list(SampledRollout._fields), data=[list(row) for row in table])
        self._run.log({"rollouts": rows}, step=step)

    def finish(self) -> None:
        self._run.finish()
