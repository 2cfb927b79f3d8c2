"""Metrics of a run that its driver reports to Ray: of its steps, its store and its components."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import get_args

from raylight._utils.aio import pause
from raylight.ray_metrics.reporter import REPORT_S, Measurement, MetricReporter
from raylight.ray_metrics.table import ROWS
from raylight.store.client import StoreClient
from raylight.trainer.components import Component
from raylight.types import JsonObject
from raylight.types.rollouts import RolloutStatus

logger = logging.getLogger(__name__)

QUERY_TIMEOUT_S = 30.0
"""Longest wait for the store's counters; it may be restarting."""
COMPONENTS = {
    "runners/n": "raylight_runners",
    "serving/replicas": "raylight_replicas",
    "serving/away_s": "raylight_serving_away_seconds_total",
}
"""Metrics of the components, by their name in `metrics.jsonl`."""


class StepMetrics:
    """Metric logger that reports the last value of each metric in `ROWS`.

    Args:
        run: name of the run.
    """

    def __init__(self, run: str) -> None:
        self._measured: dict[str, Measurement] = {}
        """Last values by name in `metrics.jsonl`."""
        self._reporter = MetricReporter(lambda: self._measured.copy().values(), run)

    def start(self, config: JsonObject) -> None:
        self._reporter.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in {"step": float(step), **metrics}.items():
            if name in ROWS:
                spec, labels = ROWS[name]
                self._measured[name] = Measurement(spec.name, value, dict(labels))

    def finish(self) -> None:
        self._reporter.stop()


class ComponentMetrics(Component):
    """Component of a run that reports its rollouts by status, its runners and its replicas.

    Args:
        run: name of the run.
        reads: return metrics of components, by name.
    """

    def __init__(self, run: str, store: StoreClient, *reads: Callable[[], dict[str, float]]) -> None:
        self._store, self._reads = store, reads
        self._rollouts: list[Measurement] = []
        self._reporter = MetricReporter(self._collect, run)

    def watches(self) -> list[Coroutine[object, object, object]]:
        """Return a coroutine that reports until it is cancelled."""
        return [self._report()]

    async def _report(self) -> None:
        self._reporter.start()
        try:
            while True:
                try:
                    async with asyncio.timeout(QUERY_TIMEOUT_S):
                        counts = await self._store.statistics()
                    self._rollouts = [
                        Measurement("raylight_rollouts", counts[f"rollouts_{status}"], {"status": status})
                        for status in get_args(RolloutStatus)
                    ]
                except Exception:  # the store's own watch judges it
                    logger.debug("the store did not return its counters", exc_info=True)
                await pause(REPORT_S)
        finally:
            self._reporter.stop()

    def _collect(self) -> list[Measurement]:
        components = {name: value for read in self._reads for name, value in read().items()}
        measured = [
            Measurement(metric, components[name]) for name, metric in COMPONENTS.items() if name in components
        ]
        return [*self._rollouts, *measured]
