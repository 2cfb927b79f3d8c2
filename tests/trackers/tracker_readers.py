"""Readers of what each tracker wrote offline: values by metric and step, and whether rollouts are there."""

import json
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from raylight.trainer.output.loggers.mlflow_tracker import mlflow_name


class Recorded(NamedTuple):
    """Content of a run in a tracker."""

    values: dict[str, dict[int, float]]
    tables: set[int]
    """Steps with a table of rollouts."""


def read_tensorboard(outputs: Path) -> Recorded:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(outputs / "run" / "tensorboard"), {"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    assert "config/text_summary" in tags["tensors"]
    values = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags["scalars"]}
    return Recorded(values, {event.step for event in events.Tensors("rollouts/text_summary")})


def read_mlflow(outputs: Path) -> Recorded:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{outputs}/mlflow.db")
    experiment = client.get_experiment_by_name("raylight")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["algorithm.name"] == "GRPO"
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    tables = [item.path for item in client.list_artifacts(run.info.run_id, "rollouts")]
    return Recorded(
        {name: {point.step: point.value for point in points} for name, points in history.items()},
        {int(path.rpartition("_")[2].removesuffix(".json")) for path in tables},
    )


def read_trackio(outputs: Path) -> Recorded:
    values: dict[str, dict[int, float]] = defaultdict(dict)
    tables = set()
    with sqlite3.connect(outputs / "trackio" / "raylight.db") as database:
        rows = database.execute("select step, metrics from metrics where run_name = 'run'").fetchall()
    for step, text in rows:
        for name, value in json.loads(text).items():
            if name == "rollouts":
                tables.add(step)
            else:
                values[name][step] = value
    return Recorded(values, tables)


def read_clearml(outputs: Path) -> Recorded:
    values: dict[str, dict[int, float]] = defaultdict(dict)
    tables = set()
    (file,) = (outputs / "clearml").glob("offline/offline-*/metrics.jsonl")
    for line in file.read_text().splitlines():
        for event in json.loads(line):
            if event["type"] == "plot":
                tables.add(event["iter"])
            else:
                metric, variant = event["metric"], event["variant"]
                name = metric if metric == variant else f"{metric}/{variant}"
                values[name][event["iter"]] = event["value"]
    return Recorded(values, tables)


def read_wandb(outputs: Path) -> Recorded:
    """Read the records of `*.wandb` with the reader that SwanLab has for them."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    values: dict[str, dict[int, float]] = defaultdict(dict)
    tables = set()
    (file,) = (outputs / "run" / "wandb").glob("offline-run-*/*.wandb")
    with WBDataStoreReader() as reader:
        reader.open(file)
        while (content := reader.scan()) is not None:
            record = Record()
            record.ParseFromString(content)
            if not record.history.item:
                continue
            row: dict[str, Any] = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            step = row.pop("step")
            for name, value in row.items():
                if name.startswith("rollouts"):
                    tables.add(step)
                elif not name.startswith("_"):
                    values[name][step] = value
    return Recorded(values, tables)


def read_swanlab(outputs: Path) -> Recorded:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    values: dict[str, dict[int, float]] = defaultdict(dict)
    (file,) = (outputs / "run" / "swanlog").glob("run-*/*.swanlab")
    tables = set()
    reader = DataStoreReader()
    reader.open(file)
    for content in reader:
        record = Record()
        record.ParseFromString(content)
        if record.HasField("scalar") and not record.scalar.key.startswith("__swanlab__"):
            values[record.scalar.key][record.scalar.step] = record.scalar.value.number
        elif record.HasField("media"):
            tables.add(record.media.step)
    reader.close()
    return Recorded(values, tables)


READERS = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
    "clearml": read_clearml,
    "wandb": read_wandb,
    "swanlab": read_swanlab,
}
RENAMED = {"mlflow": mlflow_name}
"""Names of metrics in the trackers that do not take all of them."""
