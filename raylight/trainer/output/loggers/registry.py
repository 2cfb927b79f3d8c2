"""Registry of metric loggers: construction from names, classes and dicts."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable

from raylight.components import import_dotted_name
from raylight.errors import ConfigError
from raylight.trainer.output.loggers.run_files import ConsoleLogger, JsonlLogger, PlotLogger

LOGGERS: dict[str, type] = {"console": ConsoleLogger, "jsonl": JsonlLogger, "plot": PlotLogger}
"""Loggers of the run itself, by name."""
DEFAULT_LOGGERS = ("console", "jsonl", "plot")
_PACKAGE = "raylight.trainer.output.loggers"
TRACKERS: dict[str, tuple[str, str]] = {
    "wandb": ("wandb", f"{_PACKAGE}.wandb_tracker:WandbTracker"),
    "mlflow": ("mlflow", f"{_PACKAGE}.mlflow_tracker:MlflowTracker"),
    "tensorboard": ("tensorboard", f"{_PACKAGE}.tensorboard_tracker:TensorboardTracker"),
    "trackio": ("trackio", f"{_PACKAGE}.trackio_tracker:TrackioTracker"),
    "swanlab": ("swanlab", f"{_PACKAGE}.swanlab_tracker:SwanlabTracker"),
    "clearml": ("clearml", f"{_PACKAGE}.clearml_tracker:ClearmlTracker"),
    "otlp": ("opentelemetry", f"{_PACKAGE}.otlp_tracker:OtlpTracker"),
}
"""Trackers by name: the Python package that each needs, and the dotted name of its class. Each name but otlp
is also the name of an extra of raylight."""


def find_loggers(loggers: Iterable[object] | None) -> tuple[object, ...]:
    """Replace names by what they name, so that a wrong name is an error before the run starts.

    Args:
        loggers: as for `Trainer(loggers=...)`; None means `DEFAULT_LOGGERS`.

    Raises:
        ConfigError: `loggers` is not a list, an entry names nothing, or the package of a tracker is not
            installed.
    """
    if loggers is None:
        loggers = DEFAULT_LOGGERS
    if isinstance(loggers, str | dict) or not isinstance(loggers, Iterable):
        raise ConfigError(f"loggers: {loggers!r:.80} is not a list; give a list such as ['console', 'jsonl']")
    return tuple(_find(entry) for entry in loggers)


def is_installed(tracker: str) -> bool:
    """Return True if the package of a tracker in `TRACKERS` is installed."""
    return importlib.util.find_spec(TRACKERS[tracker][0]) is not None


def _find(entry: object) -> object:
    if isinstance(entry, dict) and isinstance(entry.get("type"), str):
        return entry | {"type": _find(entry["type"])}
    if not isinstance(entry, str):
        return entry
    if entry in LOGGERS:
        return LOGGERS[entry]
    if entry in TRACKERS:
        if not is_installed(entry):
            raise ConfigError(
                f"loggers: {TRACKERS[entry][0]} is not installed; pip install 'raylight[{entry}]', or leave "
                f"{entry!r} out"
            )
        return import_dotted_name(TRACKERS[entry][1], "loggers")
    if "." in entry or ":" in entry:
        return import_dotted_name(entry, "loggers")
    names = [*LOGGERS, *TRACKERS]
    nearest = difflib.get_close_matches(entry, names, n=3, cutoff=0.5) or names
    raise ConfigError(
        f"loggers: there is no logger {entry!r}; the nearest are: {', '.join(nearest)}. Your own logger "
        "has a dotted name: package.module:MyLogger"
    )
