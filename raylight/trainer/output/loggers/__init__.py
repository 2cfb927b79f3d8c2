"""Metric loggers: receivers of the metrics of every step.

A logger is one class with the three methods of `MetricLogger`. `Trainer(loggers=[...])` takes the names in
`LOGGERS` and `TRACKERS`, instances, classes, dotted names such as "package.module:MyLogger", and dicts of
such a name as `type` with arguments. A constructor that has a parameter `folder`, `display` or `history`
receives the run directory, the Display of the run, and the rows of the steps that a resumed run keeps.

A subclass of `Tracker` is called in a separate thread, so that a slow one delays no step. A logger that
raises is reported once and does not end the run.
"""

from raylight.trainer.output.loggers.protocol import (
    VAL_STEP,
    Display,
    MetricLogger,
    Metrics,
    SampledRollout,
    evaluated_step,
)
from raylight.trainer.output.loggers.run_files import ConsoleLogger, JsonlLogger, PlotLogger
from raylight.trainer.output.loggers.tracker import Tracker

__all__ = [
    "VAL_STEP",
    "ConsoleLogger",
    "Display",
    "JsonlLogger",
    "MetricLogger",
    "Metrics",
    "PlotLogger",
    "SampledRollout",
    "Tracker",
    "evaluated_step",
]
