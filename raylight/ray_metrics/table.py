"""Table of raylight's metrics in Ray, from `metrics.yaml`; reporters, Grafana board and docs use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from raylight._utils.files import read_table
from raylight.types.json_object import JsonObject

BOARD = Path(__file__).parent / "raylight_grafana_dashboard.json"
"""Grafana's board of the metrics. Written by `scripts/generate_board.py`."""
RAY_PREFIX = "ray_"
"""Prefix that Ray gives to the metrics of applications."""
PREFIX = "raylight_"
Kind = Literal["gauge", "counter", "histogram"]
Source = Literal["driver", "gateway", "runner", "learner", "coordinator"]
Labels = Mapping[str, str]
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histograms' buckets, in seconds."""


@dataclass(frozen=True)
class MetricSpec:
    """A metric.

    Attributes:
        name: without Ray's prefix.
        help: sentence for readers of Prometheus and of the reference.
        labels: names of the labels in addition to `run`; `replica`, `runner` or `rank` names a process.
        rows: metrics of `metrics.jsonl` whose last values it has, with the labels of each.
    """

    name: str
    kind: Kind
    help: str
    source: Source
    labels: tuple[str, ...] = ()
    rows: Mapping[str, Labels] = field(default_factory=dict)


def _spec(source: Source, name: str, entry: str | JsonObject) -> MetricSpec:
    """Return the metric of an entry in `metrics.yaml`."""
    fields: JsonObject = {"help": entry} if isinstance(entry, str) else dict(entry)
    kind: Kind = fields.pop("kind", "counter" if name.endswith("_total") else "gauge")
    labels = fields.pop("labels", ["replica"] if source == "gateway" else [])
    return MetricSpec(PREFIX + name, kind, source=source, labels=tuple(labels), **fields)


_TABLE: dict[Source, JsonObject] = read_table(Path(__file__).with_name("metrics.yaml"))
_SPECS = [_spec(source, name, entry) for source, part in _TABLE.items() for name, entry in part.items()]
METRICS = {spec.name: spec for spec in _SPECS}
"""All metrics by name."""
ROWS = {row: (spec, labels) for spec in _SPECS for row, labels in spec.rows.items()}
"""Metric and labels of each metric of `metrics.jsonl` that is reported."""


def reference() -> str:
    """Return the metrics as a table in Markdown."""
    lines = ["| metric | kind | labels | source | |", "|---|---|---|---|---|"]
    for spec in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        rows = "".join(f"; `{row}`" for row in spec.rows)
        lines.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.source} | {spec.help}{rows} |")
    return "\n".join(lines) + "\n"
