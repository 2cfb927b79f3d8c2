"""A display that records, and a report that writes to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from raylight.trainer.report import Report


class RecordingDisplay:
    """A display that records what it receives."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.steps: list[int] = []
        self.notes: list[str] = []

    def progress(self, text: str) -> None: ...

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def shown() -> RecordingDisplay:
    return RecordingDisplay()


@pytest.fixture
def report(tmp_path: Path, shown: RecordingDisplay) -> Report:
    return Report(tmp_path / "deep" / "run", shown, {"seed": 3, "engine": {"replicas": 1}})
