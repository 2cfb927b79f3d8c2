"""Write Grafana's board of the metrics: python scripts/generate_board.py

Ray's own dashboard classes render it, which the package does not need: it has the result as a file.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from ray.dashboard.modules.metrics import grafana_dashboard_factory as factory
from ray.dashboard.modules.metrics.dashboards.common import DashboardConfig, Panel, Row, Target

from raylight.ray_metrics.table import BOARD, METRICS, PREFIX, RAY_PREFIX

UID = "raylightDashboard"
WINDOW = "1m"
"""Window of rates: several scrapes of Ray's default interval of 10 s."""
BELOW_ZERO = {"Reward", "Loss and entropy", "KL divergence"}
"""Panels with negative values; Ray's panels begin at 0."""
RUN_SOURCES = "ray_raylight_rollouts|ray_raylight_requests_in_flight"
"""Metrics of which every run, evaluation and server has one."""


def board() -> str:
    """Return the board as JSON, to be imported into Grafana."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base.json")  # Ray reads the frame of a board from a file
        base.write_text(json.dumps(_base()))
        config = DashboardConfig(
            name="RAYLIGHT",
            default_uid=UID,
            standard_global_filters=['SessionName=~"$SessionName"', 'run=~"$run"'],
            base_json_file_name=str(base),
            rows=_rows(),
        )
        rendered: Any = factory._generate_grafana_dashboard(config)  # and the board's id
    content = json.loads(rendered[0])
    for panel in content["panels"]:
        if panel["title"] in BELOW_ZERO:
            panel["yaxes"][0]["min"] = None
    return json.dumps(content, separators=(",", ":")) + "\n"


def _variable(name: str, label: str, text: str) -> dict[str, Any]:
    query = f'label_values({{{{__name__=~"{RUN_SOURCES}", {{global_filters}}}}}}, {label})'
    return {
        "name": name,
        "label": text,
        "type": "query",
        "datasource": "${datasource}",
        "definition": query,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "sort": 2,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _base() -> dict[str, Any]:
    """Return the frame of the board, to which Ray adds the panels."""
    datasource = {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 2, "refresh": 1}
    return {
        "title": "raylight",
        "version": 1,
        "schemaVersion": 27,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "panels": [],
        "time": {"from": "now-30m", "to": "now"},
        "annotations": {"list": []},
        "templating": {
            "list": [
                datasource,
                _variable("SessionName", "SessionName", "Ray session"),
                _variable("run", "run", "Run"),
            ]
        },
    }


def _gauge(name: str, by: str = "", fold: str = "max") -> str:
    """Return the expression of a gauge, by run and further labels."""
    labels = f"run, {by}" if by else "run"
    return f"{fold} by ({labels}) ({RAY_PREFIX}{PREFIX}{name}{{{{{{global_filters}}}}}})"


def _rate(name: str, by: str = "") -> str:
    """Return the expression of a counter's increase per second, by run and further labels."""
    labels = f"run, {by}" if by else "run"
    return f"sum by ({labels}) (rate({RAY_PREFIX}{PREFIX}{name}{{{{{{global_filters}}}}}}[{WINDOW}]))"


def _quantile(share: float, name: str) -> str:
    """Return the expression of a quantile of a histogram, by run."""
    return f"histogram_quantile({share}, {_rate(name + '_bucket', 'le')})"


def _rows() -> list[Any]:
    """Return the rows of panels. A panel has a title, a description, a unit, and expressions with legends."""
    rows: dict[str, list[tuple[str, str, str, dict[str, str]]]] = {
        "Training": [
            (
                "Reward",
                _help("reward"),
                "none",
                {"{{run}} {{mode}}": _gauge("reward", "mode")},
            ),
            ("Step", _help("step"), "none", {"{{run}}": _gauge("step")}),
            (
                "Seconds of a step",
                _help("phase_seconds"),
                "s",
                {"{{run}} {{phase}}": _gauge("phase_seconds", "phase")},
            ),
            (
                "Loss and entropy",
                f"{_help('loss')}. {_help('entropy')}.",
                "none",
                {"{{run}} loss": _gauge("loss"), "{{run}} entropy": _gauge("entropy")},
            ),
            ("KL divergence", _help("kl"), "none", {"{{run}} {{of}}": _gauge("kl", "of")}),
            ("Gradient norm", _help("gradient_norm"), "none", {"{{run}}": _gauge("gradient_norm")}),
            (
                "Groups without signal",
                _help("groups_without_signal"),
                "none",
                {"{{run}}": _gauge("groups_without_signal")},
            ),
            (
                "Tokens of an answer",
                _help("response_tokens"),
                "short",
                {"{{run}} {{mode}}": _gauge("response_tokens", "mode")},
            ),
            (
                "Token ledger",
                _help("ledger_tokens"),
                "short",
                {"{{run}} {{fate}}": _gauge("ledger_tokens", "fate")},
            ),
        ],
        "Rollouts": [
            (
                "Rollouts by status",
                _help("rollouts"),
                "none",
                {"{{run}} {{status}}": _gauge("rollouts", "status")},
            ),
            (
                "Waiting and leased rollouts",
                "Rollouts in the queue, and those that runners execute",
                "none",
                {
                    "{{run}} waiting": _selected("rollouts", 'status=~"queuing|requeuing"'),
                    "{{run}} leased": _selected("rollouts", 'status=~"preparing|running"'),
                },
            ),
            (
                "Busy runners",
                "Rollouts that the runners execute, and those that they could execute at once",
                "none",
                {
                    "{{run}} executed": _gauge("runner_rollouts", fold="sum"),
                    "{{run}} capacity": _gauge("runner_capacity", fold="sum"),
                },
            ),
            ("Runners", _help("runners"), "none", {"{{run}}": _gauge("runners")}),
            (
                "Failed rollouts",
                _help("failed_rollouts"),
                "none",
                {"{{run}} {{kind}}": _gauge("failed_rollouts", "kind")},
            ),
        ],
        "Engines": [
            (
                "Sampled tokens per second",
                _help("output_tokens_total"),
                "short",
                {"{{run}} {{replica}}": _rate("output_tokens_total", "replica")},
            ),
            (
                "Prompt tokens per second",
                _help("prompt_tokens_total"),
                "short",
                {"{{run}} {{replica}}": _rate("prompt_tokens_total", "replica")},
            ),
            (
                "Requests per second",
                _help("requests_total"),
                "reqps",
                {"{{run}} {{route}} {{status}}": _rate("requests_total", "route, status")},
            ),
            (
                "Requests in flight",
                _help("requests_in_flight"),
                "none",
                {"{{run}} {{replica}}": _gauge("requests_in_flight", "replica")},
            ),
            (
                "Seconds of a request",
                _help("request_seconds"),
                "s",
                {
                    "{{run}} median": _quantile(0.5, "request_seconds"),
                    "{{run}} 95 %": _quantile(0.95, "request_seconds"),
                },
            ),
            (
                "Seconds until the first byte",
                _help("first_byte_seconds"),
                "s",
                {
                    "{{run}} median": _quantile(0.5, "first_byte_seconds"),
                    "{{run}} 95 %": _quantile(0.95, "first_byte_seconds"),
                },
            ),
            (
                "Idle share of the engine",
                "Share of the time without a request: the engine waits for agents or for the learners",
                "percentunit",
                {"{{run}} {{replica}}": _rate("engine_idle_seconds_total", "replica")},
            ),
            (
                "Requests in the engine",
                "Requests that are being sampled, and those that wait",
                "none",
                {
                    "{{run}} {{replica}} running": _gauge("engine_running_requests", "replica"),
                    "{{run}} {{replica}} waiting": _gauge("engine_waiting_requests", "replica"),
                },
            ),
            (
                "Key-value cache",
                _help("engine_kv_use_ratio"),
                "percentunit",
                {"{{run}} {{replica}}": _gauge("engine_kv_use_ratio", "replica")},
            ),
            (
                "Records on their way",
                f"{_help('recorder_unsent_records')}. Lost ones are an error.",
                "none",
                {
                    "{{run}} unsent": _gauge("recorder_unsent_records", fold="sum"),
                    "{{run}} lost": _gauge("recorder_lost_records_total", fold="sum"),
                },
            ),
        ],
        "Learners": [
            (
                "Seconds of an update",
                _help("learner_update_seconds"),
                "s",
                {"{{run}} rank {{rank}}": _gauge("learner_update_seconds", "rank")},
            ),
            (
                "Peak memory of the ranks",
                _help("learner_memory_peak_bytes"),
                "bytes",
                {"{{run}} rank {{rank}} {{memory}}": _gauge("learner_memory_peak_bytes", "rank, memory")},
            ),
            (
                "Mismatch of engine and learner",
                _help("mismatch"),
                "none",
                {"{{run}} {{statistic}}": _gauge("mismatch", "statistic")},
            ),
            (
                "Restarts of the learners",
                _help("learner_restarts_total"),
                "none",
                {"{{run}}": _gauge("learner_restarts_total")},
            ),
        ],
        "Weights": [
            (
                "Version of the weights",
                f"{_help('weight_version')}, and of each replica",
                "none",
                {
                    "{{run}} learners": _gauge("weight_version"),
                    "{{run}} {{replica}}": _gauge("replica_weight_version", "replica"),
                },
            ),
            (
                "Staleness",
                _help("staleness_versions"),
                "none",
                {"{{run}} {{statistic}}": _gauge("staleness_versions", "statistic")},
            ),
            ("Publication", _help("publication_seconds"), "s", {"{{run}}": _gauge("publication_seconds")}),
            (
                "Replicas",
                _help("subscribed_replicas"),
                "none",
                {
                    "{{run}} {{state}}": _gauge("subscribed_replicas", "state"),
                    "{{run}} evicted": _gauge("evicted_replicas_total"),
                },
            ),
        ],
    }
    return _as_rows(rows)


def _selected(name: str, condition: str) -> str:
    """Return the expression of the sum of a gauge's series that meet a condition, by run."""
    return f"sum by (run) ({RAY_PREFIX}{PREFIX}{name}{{{{{{global_filters}}, {condition}}}}})"


def _help(name: str) -> str:
    return METRICS[PREFIX + name].help


def _as_rows(rows: dict[str, list[tuple[str, str, str, dict[str, str]]]]) -> list[Any]:
    """Return Ray's rows; `rows` has title, description, unit, and expressions by legend, of each panel."""
    ids = itertools.count(1)
    return [
        Row(
            title=name,
            id=next(ids),
            panels=[
                Panel(
                    id=next(ids),
                    title=title,
                    description=text,
                    unit=unit,
                    targets=[Target(expr=expr, legend=legend) for legend, expr in targets.items()],
                    fill=0,
                    stack=False,
                )
                for title, text, unit, targets in panels
            ],
        )
        for name, panels in rows.items()
    ]


if __name__ == "__main__":
    BOARD.write_text(board())
