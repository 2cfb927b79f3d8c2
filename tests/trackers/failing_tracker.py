"""A tracker that raises in every call of log."""

from typing import Any

from raylight.trainer.output.loggers import Metrics, Tracker


class FailingTracker(Tracker):
    """Raises in log."""

    def start(self, config: dict[str, Any]) -> None: ...

    def log(self, step: int, metrics: Metrics) -> None:
        raise ConnectionError("no route to the tracker")

    def finish(self) -> None: ...
