"""Metric logger that writes to ClearML."""

from __future__ import annotations

from raylight.trainer.output.loggers.protocol import Metrics, SampledRollout
from raylight.trainer.output.loggers.tracker import Tracker, points
from raylight.types import JsonObject

OFFLINE_ID = "offline-"
"""Start of the ids of tasks that no server has."""


class ClearmlTracker(Tracker):
    """Writes a run to ClearML as a task.

    `CLEARML_OFFLINE_MODE=1` keeps it in ClearML's cache, from where `Task.import_offline_session` sends it; a
    resumed run is then a separate task. Further settings are passed to `clearml.Task.init`. Output and
    frameworks are not captured.
    """

    def start(self, config: JsonObject) -> None:
        from clearml import Task

        # threads report: a reporting process that is forked while another thread starts git inherits git's
        # pipe; that thread waits for its end, and the driver's exit for the thread
        Task._report_subprocess_enabled = False
        saved = self.saved_id
        continued = saved if saved and not saved.startswith(OFFLINE_ID) else False
        self._task = Task.init(
            **{
                "project_name": self.project,
                "task_name": self.name,
                "reuse_last_task_id": False,
                "continue_last_task": continued,
                "auto_connect_arg_parser": False,
                "auto_connect_frameworks": False,
                "auto_resource_monitoring": False,
                "auto_connect_streams": False,
                **self.settings,
            }
        )
        if continued:
            self._task.set_initial_iteration(0)  # raylight's steps continue by themselves
        self.save_id(self._task.id)
        self._task.connect_configuration(config, name="config")

    def log(self, step: int, metrics: Metrics) -> None:
        at, values = points(step, metrics)
        for name, value in values.items():
            title, _, series = name.partition("/")
            self._task.get_logger().report_scalar(title, series or title, value=value, iteration=at)

    def rollouts(self, step: int, table: list[SampledRollout]) -> None:
        rows = [list(SampledRollout._fields), *(list(row) for row in table)]
        self._task.get_logger().report_table("rollouts", "evaluation", iteration=step, table_plot=rows)

    def finish(self) -> None:
        if self.failure is not None:
            self._task.flush(wait_for_uploads=True)
            self._task.mark_failed(status_reason="error", status_message=self.failure)
        self._task.close()
