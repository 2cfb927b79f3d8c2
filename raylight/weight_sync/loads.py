"""Loads of the replicas' engines, read by the trainer in one call.

The coordinator cannot call replicas. Each replica parks a call that carries its load; asking for the loads
ends these calls, and each replica measures again. Nothing is sent while nobody asks, except a renewal of the
parked call.
"""

from __future__ import annotations

from collections.abc import Callable

from raylight._utils.aio import BroadcastCondition
from raylight.engines.protocol import EngineLoad


class LoadReports:
    """Numbered rounds of reports."""

    def __init__(self) -> None:
        self._round = 0
        self._reports: dict[str, tuple[int, EngineLoad]] = {}
        """Last load of each replica, and the round in which it was measured."""
        self._changed = BroadcastCondition()

    async def report(self, replica: str, measured_in: int, load: EngineLoad, timeout: float) -> int:
        """Take a replica's load; wait up to `timeout` seconds for the next round, and return its number."""
        self._reports[replica] = measured_in, load
        self._changed.notify_all()
        await self._changed.wait_for(lambda: self._round != measured_in, timeout)
        return self._round

    async def collect(self, live: Callable[[str], bool], timeout: float) -> dict[str, EngineLoad]:
        """Begin a round; return the loads of the live replicas that report within `timeout` seconds."""
        self._reports = {name: report for name, report in self._reports.items() if live(name)}
        self._round += 1
        number = self._round
        self._changed.notify_all()
        await self._changed.wait_for(lambda: len(self._of_round(number)) == len(self._reports), timeout)
        return {name: load for name, load in self._of_round(number).items() if live(name)}

    def _of_round(self, number: int) -> dict[str, EngineLoad]:
        return {name: load for name, (measured_in, load) in self._reports.items() if measured_in >= number}
