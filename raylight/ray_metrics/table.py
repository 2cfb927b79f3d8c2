"""Table of the metrics that raylight adds to those of Ray. Reports, board and reference follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from raylight.types.rollouts import FailureKind

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

    @property
    def exposed(self) -> tuple[str, ...]:
        """Names of its series in Prometheus."""
        suffixes = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return tuple(f"{RAY_PREFIX}{self.name}{suffix}" for suffix in suffixes)


def _metric(source: Source, name: str, text: str, *labels: str, **rows: Labels) -> MetricSpec:
    """Return a counter if its name ends with `_total`, else a gauge.

    Args:
        rows: metrics of `metrics.jsonl`, with "__" for "/".
    """
    kind: Kind = "counter" if name.endswith("_total") else "gauge"
    sources = {row.replace("__", "/"): of for row, of in rows.items()}
    return MetricSpec(PREFIX + name, kind, text, source, labels, sources)


def _driver(name: str, text: str, *labels: str, **rows: Labels) -> MetricSpec:
    return _metric("driver", name, text, *labels, **rows)


def _gateway(name: str, text: str, *labels: str) -> MetricSpec:
    return _metric("gateway", name, text, "replica", *labels)


def _histogram(name: str, text: str) -> MetricSpec:
    return MetricSpec(PREFIX + name, "histogram", text, "gateway", ("replica", "route"))


_DRIVER = (
    _driver("step", "Last training step", step={}),
    _driver(
        "reward",
        "Mean reward of the last step's rollouts (train) or of the last evaluation (val)",
        "mode",
        train__reward={"mode": "train"},
        val__reward={"mode": "val"},
    ),
    _driver(
        "reward_stddev",
        "Standard deviation of these rewards",
        "mode",
        train__reward_std={"mode": "train"},
        val__reward_std={"mode": "val"},
    ),
    _driver("loss", "Loss of the policy in the last update", learner__pg_loss={}),
    _driver(
        "kl",
        "Divergence of the policy from the one before the update (update) or from the reference (reference)",
        "of",
        learner__ppo_kl={"of": "update"},
        learner__kl={"of": "reference"},
    ),
    _driver("entropy", "Mean entropy of the policy per token, in nats", learner__entropy={}),
    _driver("gradient_norm", "Norm of the gradient before clipping, last update", learner__grad_norm={}),
    _driver(
        "mismatch",
        "Absolute difference of the log-probs of engine and learner for the same weights",
        "statistic",
        mismatch__logprob_abs_mean={"statistic": "mean"},
        mismatch__logprob_abs_max={"statistic": "max"},
    ),
    _driver(
        "staleness_versions",
        "Age of the last batch's tokens in versions of the weights, of an asynchronous run",
        "statistic",
        async__staleness_mean={"statistic": "mean"},
        async__staleness_max={"statistic": "max"},
    ),
    _driver(
        "phase_seconds",
        "Seconds of the last step by phase; waiting is that of the learners in an asynchronous run",
        "phase",
        time__rollout_s={"phase": "rollouts"},
        time__update_s={"phase": "update"},
        time__sync_s={"phase": "publication"},
        time__val_s={"phase": "evaluation"},
        async__trainer_idle_s={"phase": "waiting"},
    ),
    _driver(
        "ledger_tokens",
        "Sampled tokens since the start by what became of them",
        "fate",
        **{
            f"ledger__{fate}": {"fate": fate}
            for fate in (
                "trained",
                "masked",
                "auxiliary",
                "unselected",
                "dropped",
                "failed",
                "open",
                "unaccounted",
            )
        },
    ),
    _driver(
        "groups_without_signal",
        "Groups of the last step whose rewards did not differ",
        train__groups_without_signal={},
    ),
    _driver(
        "response_tokens",
        "Mean tokens of an answer",
        "mode",
        train__response_tokens={"mode": "train"},
        val__response_tokens={"mode": "val"},
    ),
    _driver(
        "failed_rollouts",
        "Failed rollouts of the last step by kind of failure",
        "kind",
        **{f"failures__{kind}": {"kind": kind} for kind in get_args(FailureKind)},
    ),
    _driver("weight_version", "Version of the weights after the last update", weights__version={}),
    _driver("learner_restarts_total", "Restarts of the learners after a loss", learner__restarts={}),
    _driver(
        "rollouts",
        "Rollouts in the store by status; queuing and requeuing ones wait, preparing and running ones are "
        "leased to a runner",
        "status",
    ),
    _driver("runners", "Runners that are up"),
    _driver("replicas", "Replicas of the engine that are up"),
    _driver("serving_away_seconds_total", "Seconds in which no replica answered"),
)
_GATEWAY = (
    _gateway("requests_total", "Requests by route and status", "route", "status"),
    _gateway("requests_in_flight", "Requests that are not yet answered"),
    _histogram("request_seconds", "Seconds from a request to the end of its answer"),
    _histogram("first_byte_seconds", "Seconds from a request to the first byte of its answer"),
    _gateway("prompt_tokens_total", "Prompt tokens of recorded calls"),
    _gateway("output_tokens_total", "Tokens sampled in recorded calls"),
    _gateway("aborted_calls_total", "Recorded calls that ended before their answer was complete"),
    _gateway("replays_total", "Retries answered with the answer already sampled"),
    _gateway(
        "ignored_fields_total", "Requests from which a field of engine.ignore_fields was dropped", "field"
    ),
    _gateway("dropped_tools_total", "Tools of requests that no model here can use", "tool"),
    _gateway("overridden_requests_total", "Training requests whose sampling was replaced"),
    _gateway("auxiliary_requests_total", "Requests of attempts for another model name"),
    _gateway("rejected_keys_total", "Requests without a valid API key"),
    _gateway("engine_idle_seconds_total", "Seconds in which the engine had no request"),
    _gateway("engine_kv_use_ratio", "Share of the key-value cache in use"),
    _gateway("engine_kv_capacity_tokens", "Tokens that the key-value cache holds"),
    _gateway("engine_running_requests", "Requests that are being sampled"),
    _gateway("engine_waiting_requests", "Requests that wait for the engine"),
    _gateway("engine_preemptions_total", "Times that a request lost its place in the cache"),
    _gateway("replica_weight_version", "Version of the weights or the adapter of a replica"),
    _gateway("recorder_open_calls", "Announced calls that have not ended"),
    _gateway("recorder_unsent_records", "Announcements and records that the store does not have yet"),
    _gateway("recorder_lost_records_total", "Announcements and records that never reached the store"),
    _gateway(
        "recorder_overloaded_calls_total",
        "Calls rejected because the recorder was full or the store unreachable",
    ),
    _gateway("recorder_rejected_calls_total", "Calls rejected because their attempt had finished"),
    _gateway(
        "prompts_total",
        "Prompts of attempts by source: spliced from the conversation's tokens, partly spliced, rendered "
        "from messages, or refused because the chat template cannot be continued in tokens",
        "source",
    ),
)
_OTHERS = (
    _metric("runner", "runner_rollouts", "Rollouts that a runner executes", "runner"),
    _metric(
        "runner", "runner_capacity", "Rollouts that a runner executes at most (max_concurrent)", "runner"
    ),
    _metric("learner", "learner_update_seconds", "Seconds of a rank's last update", "rank"),
    _metric(
        "learner",
        "learner_memory_peak_bytes",
        "Most memory that a rank has used, of its process (host) and of its GPU (device)",
        "rank",
        "memory",
    ),
    _metric(
        "coordinator",
        "subscribed_replicas",
        "Replicas that have executed all orders (ready), and others (joining)",
        "state",
    ),
    _metric(
        "coordinator",
        "publication_seconds",
        "Seconds in which the last version of the weights or the adapter reached all replicas",
    ),
    _metric("coordinator", "evicted_replicas_total", "Replicas that were too late"),
)
METRICS = {spec.name: spec for spec in (*_DRIVER, *_GATEWAY, *_OTHERS)}
"""All metrics by name."""
ROWS = {row: (spec, labels) for spec in _DRIVER for row, labels in spec.rows.items()}
"""Metric and labels of each metric of `metrics.jsonl` that is reported."""


def reference() -> str:
    """Return the metrics as a table in Markdown."""
    lines = ["| metric | kind | labels | source | |", "|---|---|---|---|---|"]
    for spec in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        rows = "".join(f"; `{row}`" for row in spec.rows)
        lines.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.source} | {spec.help}{rows} |")
    return "\n".join(lines) + "\n"
