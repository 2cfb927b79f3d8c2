"""Reports of a replica's start, from a thread: the start blocks the event loop."""

from __future__ import annotations

import threading
from typing import Any

from raylight.engines.start_stages import StartStages

INTERVAL_S = 1.0
READ_UNIT = 2**20
"""Bytes that must be read for it to count as progress: a process that waits reads a little, too."""


class StartReporter:
    """Tells the coordinator every second how far a replica's start has come, until it is closed.

    Args:
        coordinator: handle of the coordinator's actor.
        replica: the replica's name.
    """

    def __init__(self, coordinator: Any, replica: str) -> None:
        self._coordinator, self._replica = coordinator, replica
        self._stages = StartStages()
        self.entered = False
        """True once the replica may take device memory, see `weights.starts`."""
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            stage, read = self._stages.read()
            stage = stage or "importing the engine"
            if not self._closed.is_set():
                self._coordinator.report_start.remote(self._replica, stage, read // READ_UNIT, self.entered)

    def close(self) -> None:
        """End the reports: the replica is up, or has failed."""
        if not self._closed.is_set():
            self._closed.set()
            self._coordinator.end_start.remote(self._replica)
