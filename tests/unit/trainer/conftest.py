"""A display, and a report that writes to it."""

from pathlib import Path

import pytest
from recording_display import RecordingDisplay

from raylight.trainer.output.report import Report


@pytest.fixture
def shown() -> RecordingDisplay:
    return RecordingDisplay()


@pytest.fixture
def report(tmp_path: Path, shown: RecordingDisplay) -> Report:
    return Report(tmp_path / "deep" / "run", shown, {"seed": 3, "engine": {"replicas": 1}})
