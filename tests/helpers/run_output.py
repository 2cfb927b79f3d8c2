"""Readers of a run's output folder."""

import json
from pathlib import Path
from typing import Any


def metric_rows(output: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, a dict for each step."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
