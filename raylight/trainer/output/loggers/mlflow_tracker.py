"""Metric logger that writes to MLflow."""

from __future__ import annotations

import os
import re
import time

from raylight.trainer.output.loggers.protocol import Metrics, SampledRollout
from raylight.trainer.output.loggers.tracker import Tracker, points
from raylight.trainer.spec.resume import flatten
from raylight.types import JsonObject

MAX_PARAMS = 100
"""Parameters that MLflow takes in one request."""
MAX_VALUE = 500
"""Characters of a parameter that every MLflow server takes."""


class MlflowTracker(Tracker):
    """Writes a run to MLflow.

    It goes to the server or database of `MLFLOW_TRACKING_URI`, or else to `mlflow.db` next to the run
    directory.

    Further settings are `tracking_uri` and arguments of `MlflowClient.create_run`, such as `tags`.
    """

    def start(self, config: JsonObject) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        settings = dict(self.settings)
        given = settings.pop("tracking_uri", None) or os.environ.get("MLFLOW_TRACKING_URI")
        outputs = self.folder.parent
        self._client = MlflowClient(given or f"sqlite:///{outputs}/mlflow.db")
        run_id = self.saved_id
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
        else:
            run_id = self._client.create_run(
                self._experiment(None if given else (outputs / "mlflow_artifacts").as_uri()),
                run_name=self.name,
                **settings,
            ).info.run_id
            params = [Param(mlflow_name(n), str(v)[:MAX_VALUE]) for n, v in flatten(config).items()]
            for start in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(run_id, params=params[start : start + MAX_PARAMS])
            self.save_id(run_id)
        self._run_id = run_id

    def log(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        at, values = points(step, metrics)
        now = int(time.time() * 1000)
        rows = [Metric(mlflow_name(name), value, now, at) for name, value in values.items()]
        self._client.log_batch(self._run_id, rows)

    def rollouts(self, step: int, table: list[SampledRollout]) -> None:
        content = {"columns": list(SampledRollout._fields), "data": [list(row) for row in table]}
        self._client.log_dict(self._run_id, content, f"rollouts/step_{step}.json")

    def finish(self) -> None:
        if self.failure is not None:
            self._client.set_tag(self._run_id, "failure", self.failure[:MAX_VALUE])
        self._client.set_terminated(self._run_id, "FINISHED" if self.failure is None else "FAILED")

    def _experiment(self, artifacts: str | None) -> str:
        """Return the id of the experiment with the name of the project; create it if there is none."""
        found = self._client.get_experiment_by_name(self.project)
        if found is not None:
            return found.experiment_id
        return self._client.create_experiment(self.project, artifact_location=artifacts)


def mlflow_name(name: str) -> str:
    """Return the name of a metric or a parameter with the characters that MLflow allows."""
    return re.sub(r"[^\w./: -]", "_", name)
