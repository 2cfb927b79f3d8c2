"""Metric logger that writes event files of TensorBoard."""

from __future__ import annotations

import html

import yaml

from raylight.trainer.output.loggers.protocol import Metrics, SampledRollout
from raylight.trainer.output.loggers.tracker import Tracker, points
from raylight.types import JsonObject


class TensorboardTracker(Tracker):
    """Writes a run to `tensorboard/` of the run directory: `tensorboard --logdir outputs` shows all runs.

    Further settings, such as `flush_secs`, are passed to `torch.utils.tensorboard.SummaryWriter`.
    """

    def start(self, config: JsonObject) -> None:
        from torch.utils.tensorboard import SummaryWriter

        is_resumed = self.saved_id is not None
        self._writer = SummaryWriter(
            str(self.folder / "tensorboard"), **{"flush_secs": 10, "purge_step": None, **self.settings}
        )
        self.save_id("tensorboard")
        if not is_resumed:
            text = html.escape(yaml.safe_dump(config, sort_keys=False), quote=False)
            self._writer.add_text("config", f"<pre>{text}</pre>", 0)

    def log(self, step: int, metrics: Metrics) -> None:
        at, values = points(step, metrics)
        for name, value in values.items():
            self._writer.add_scalar(name, value, at)

    def rollouts(self, step: int, table: list[SampledRollout]) -> None:
        rows = [SampledRollout._fields, *table]
        lines = [f"|{'|'.join(_cell(value) for value in row)}|" for row in rows]
        lines.insert(1, "|---" * len(SampledRollout._fields) + "|")
        self._writer.add_text("rollouts", "\n".join(lines), step)

    def finish(self) -> None:
        if self.failure is not None:
            self._writer.add_text("failure", self.failure, 0)
        self._writer.close()


def _cell(value: object) -> str:
    """Return a value as a cell of a table in Markdown."""
    text = "" if value is None else html.escape(str(value), quote=False)
    return text.replace("|", "\\|").replace("\n", "<br>")
